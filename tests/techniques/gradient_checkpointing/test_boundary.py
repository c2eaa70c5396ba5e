"""Tests offloaded block inputs, above all on a card: pinned memory, copy streams and waits. More tests on a CPU are in
tests/memory/test_limit.py."""

import pytest
import torch

from devices import each_device
from lowmem.offload.copy_lanes import CardLane
from lowmem.techniques.gradient_checkpointing import boundary
from lowmem.techniques.gradient_checkpointing.boundary import Chain, OnHost
from same import last, same

ELEMENTS = 5_000_000  # 20 MB: the caching allocator gives it a separate segment
LONG = 200_000_000  # cycles for which the copy streams are busy: about 0.1 s


@pytest.fixture
def busy():
    """Keeps both copy streams busy, so that all copies are late."""
    torch.cuda.empty_cache()
    lane = boundary._lane(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    for stream in (lane._down, lane._up):
        with stream:
            torch.cuda._sleep(LONG)
    return lane


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_fetched_block_input_on_a_card_is_complete_unless_the_wait_for_its_copy_is_left_out(busy, monkeypatch, wrong):
    """In the deliberately wrong variant, the device does not wait for copies."""
    tensor = torch.randn(ELEMENTS, device="cuda", requires_grad=True)
    kept = tensor.detach().clone()
    torch.cuda.current_stream().synchronize()
    if wrong:
        monkeypatch.setattr(CardLane, "hold", lambda *_: None)
    back = Chain().make(0, tensor).fetch()
    assert torch.equal(back, kept) != wrong
    assert back.requires_grad and back.is_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_memory_of_an_offloaded_block_input_is_not_reused_early_unless_record_stream_is_left_out(
    busy, monkeypatch, wrong
):
    if wrong:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    tensor = torch.ones(ELEMENTS, device="cuda")
    made, place = Chain().make(0, tensor), tensor.data_ptr()
    assert made.host.is_pinned()
    del tensor
    other = torch.full((ELEMENTS,), 2.0, device="cuda")
    torch.cuda.synchronize()
    assert (other.data_ptr() == place) == wrong
    assert bool((made.host == 1.0).all()) != wrong


@pytest.mark.gpu
def test_fetching_a_block_input_on_a_card_prefetches_only_the_previous_block_input(busy):
    make = Chain().make
    tensors = [torch.full((ELEMENTS,), float(n), device="cuda") for n in range(3)]
    made = [make(block, tensor) for block, tensor in enumerate(tensors)]
    assert torch.equal(made[2].fetch(), tensors[2]) and made[1].back is not None and made[0].back is None
    assert torch.equal(made[1].fetch(), tensors[1]) and torch.equal(made[0].fetch(), tensors[0])


# Dropout is on, so recomputation must restore the random state. The run evaluates twice and saves twice.
DEEP = ("model.architecture.n_layer=4", "model.architecture.resid_pdrop=0.1")
RUN = (*DEEP, "max_steps=4", "val_every=2", "save_every=2")
SIZES = {"cpu": (), "cuda": ("model.architecture.n_embd=512", "seq_len=512", "batch_size=8")}


@each_device
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_offloaded_block_inputs_give_the_weights_of_block_inputs_on_the_device_unless_fetched_shifted(
    fit, deterministic, monkeypatch, device, wrong
):
    """In the deliberately wrong variant, each block input comes back rolled by one element."""
    lines = (*RUN, *SIZES[device], f"device={device}")
    _, resident = fit(*lines, "gradient_checkpointing=every_layer", folder="resident")
    if wrong:
        fetch = OnHost.fetch
        monkeypatch.setattr(OnHost, "fetch", lambda self: fetch(self).detach().roll(1).requires_grad_())
    _, offloaded = fit(*lines, "gradient_checkpointing=offload", folder="offloaded")
    assert same(last(resident)["state_dict"], last(offloaded)["state_dict"]) != wrong
