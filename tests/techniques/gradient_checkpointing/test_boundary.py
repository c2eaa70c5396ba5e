"""Boundaries on a card: pinned, on a stream of their own, back in time. What a CPU does of it is in test_limit.py."""

import pytest
import torch

from devices import each_device
from lowmem.offload.copy_lanes import CardLane
from lowmem.techniques.gradient_checkpointing import boundary
from lowmem.techniques.gradient_checkpointing.boundary import Chain, OnHost
from same import last, same

ELEMENTS = 5_000_000  # 20 MB: a segment of its own
LONG = 200_000_000  # cycles that the stream of the copies is kept busy: a tenth of a second


@pytest.fixture
def busy():
    """The streams of the copies have something else to do first."""
    torch.cuda.empty_cache()
    lane = boundary._lane(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    for stream in (lane._down, lane._up):
        with stream:
            torch.cuda._sleep(LONG)
    return lane


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_fetched_boundary_is_complete_before_it_is_read(busy, monkeypatch, wrong):
    """Wrong: the device waits for no copy."""
    tensor = torch.randn(ELEMENTS, device="cuda", requires_grad=True)
    kept = tensor.detach().clone()
    torch.cuda.current_stream().synchronize()
    if wrong:
        monkeypatch.setattr(CardLane, "hold", lambda *_: None)
    back = Chain().make(0, tensor).fetch()
    assert torch.equal(back, kept) != wrong
    assert back.requires_grad and back.is_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_device_memory_of_a_boundary_is_not_reused_before_its_copy_is_done(busy, monkeypatch, wrong):
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
def test_fetching_a_boundary_prefetches_the_previous_one(busy):
    make = Chain().make
    tensors = [torch.full((ELEMENTS,), float(n), device="cuda") for n in range(3)]
    made = [make(block, tensor) for block, tensor in enumerate(tensors)]
    assert torch.equal(made[2].fetch(), tensors[2]) and made[1].back is not None and made[0].back is None
    assert torch.equal(made[1].fetch(), tensors[1]) and torch.equal(made[0].fetch(), tensors[0])


# Dropout draws again in each repetition of a block. Two evaluations and two checkpoints are between the steps.
DEEP = ("model.architecture.n_layer=4", "model.architecture.resid_pdrop=0.1")
RUN = (*DEEP, "max_steps=4", "val_every=2", "save_every=2")
SIZES = {"cpu": (), "cuda": ("model.architecture.n_embd=512", "seq_len=512", "batch_size=8")}


@each_device
@pytest.mark.parametrize("wrong", [False, True])
def test_offloaded_boundaries_give_the_bits_of_resident_boundaries(fit, deterministic, monkeypatch, device, wrong):
    """Wrong: each boundary comes back rolled by one element."""
    lines = (*RUN, *SIZES[device], f"device={device}")
    _, resident = fit(*lines, "gradient_checkpointing=every_layer", folder="resident")
    if wrong:
        fetch = OnHost.fetch
        monkeypatch.setattr(OnHost, "fetch", lambda self: fetch(self).detach().roll(1).requires_grad_())
    _, offloaded = fit(*lines, "gradient_checkpointing=offload", folder="offloaded")
    assert same(last(resident)["state_dict"], last(offloaded)["state_dict"]) != wrong
