"""Tests that every checkpointing policy gives the same gradients as no checkpointing, and tests how far each policy
lowers the peak memory."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from host_memory import peak
from lowmem.config.declarations import techniques
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import run_of
from lowmem.data.loader import MicroBatch
from lowmem.system.errors import Refused
from lowmem.techniques.gradient_checkpointing import policies as checkpointing
from lowmem.techniques.loss import cross_entropy as losses
from networks import network, shaped

pytestmark = pytest.mark.kernels


# Maps the name of every policy of conf/ that saves memory to a function that applies the policy to a model.
SEGMENTED = {
    name: instantiate(run_of([f"gradient_checkpointing={name}"]).gradient_checkpointing)
    for name, technique in techniques("gradient_checkpointing").items()
    if technique.saves
}
SHAPES = ("gpt2", "llama", "qwen3", "opt", "gpt_neox", "gemma", "gemma2", "gemma3_text", "mistral")
WIDTH, VOCABULARY = 32, 500


@pytest.fixture
def batch():
    return MicroBatch(torch.randint(0, VOCABULARY, (2, 32)), torch.randint(0, VOCABULARY, (2, 32)))


def gradients(model, batch):
    torch.manual_seed(1)
    loss = losses.full(model, batch)
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + [torch.rand(1)]  # and the next random number


@pytest.mark.rows("*-0.3")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("model_type", SHAPES)
def test_each_checkpointing_policy_gives_the_gradient_bits_of_no_checkpointing(model_type, dropout, batch):
    kept = gradients(shaped(model_type, dropout=dropout), batch)
    for name, apply in SEGMENTED.items():
        model = shaped(model_type, dropout=dropout)
        apply(model)
        again = gradients(model, batch)
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True)), (
            f"gradient_checkpointing={name} changes the gradients of {model_type}: open a Segment around the blocks"
        )


@pytest.mark.wrong
def test_checkpoint_recomputation_without_the_random_state_changes_the_gradients(batch, monkeypatch):
    """In the deliberately wrong variant, recomputation draws new dropout masks."""
    kept = gradients(shaped("gpt2", dropout=0.3), batch)
    again = checkpointing.BlockCall.again

    def forgetful(self, hidden):
        self.random_states = [torch.get_rng_state()]
        torch.rand(1)
        return again(self, hidden)

    monkeypatch.setattr(checkpointing.BlockCall, "again", forgetful)
    model = shaped("gpt2", dropout=0.3)
    checkpointing.segments(model)
    assert not all(torch.equal(a, b) for a, b in zip(kept, gradients(model, batch), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "forgetful"),
    [("gpt2", False), ("llama", False), ("gpt2", True)],
    ids=["gpt2", "llama", "gpt2 forgetful"],
)
def test_checkpointing_on_a_card_gives_the_gradient_bits_of_none_unless_restoring_random_state_is_left_out(
    model_type, batch, deterministic, monkeypatch, forgetful
):
    """The card draws the dropout masks. In the deliberately wrong variant (`forgetful`), recomputation draws new
    masks."""
    if forgetful:
        monkeypatch.setattr(checkpointing, "restored", lambda *_: None)

    def on_card(apply):
        model = shaped(model_type, dropout=0.3).cuda()
        apply(model)
        return [*gradients(model, batch.to("cuda")), torch.rand(1, device="cuda")]

    kept = on_card(checkpointing.none)
    for name, apply in SEGMENTED.items():
        again = on_card(apply)
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True)) != forgetful, name


# --- bytes ------------------------------------------------------------------------------------------------------------


class Thin(nn.Module):
    """A layer that saves only two tensors of the size of its input for backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return torch.relu(self.linear(x))


@pytest.mark.parametrize(
    ("apply", "exponent", "within"), [(checkpointing.none, 1.0, 0.05), (checkpointing.segments, 0.5, 0.07)]
)
def test_peak_memory_grows_linearly_with_depth_or_as_its_square_root_with_checkpointed_segments(
    apply, exponent, within
):
    depths, peaks = (16, 36, 64, 144, 256, 400), []
    for n in depths:
        model = nn.Sequential(*(Thin() for _ in range(n))).train()
        apply(model)
        x = torch.randn(256, 16, requires_grad=True)
        x.grad = torch.zeros_like(x)
        peaks.append(peak(model, lambda model=model, x=x: model(x).sum(), inputs=[x]))
    assert np.polyfit(np.log(depths), np.log(peaks), 1)[0] == pytest.approx(exponent, abs=within)


BOUNDARY = 4 * 128 * 64 * 4  # batch x tokens x width x bytes of fp32


def block_peak(apply, layers):
    """Returns the peak memory of forward and backward, in units of a block input. The vocabulary is small, so that the
    blocks determine the peak."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}  # GPT-2's ids are not in this vocabulary
    model = network(n_layer=layers, n_embd=64, n_positions=128, vocab_size=50, **ends)
    apply(model)
    ids = torch.randint(0, 50, (4, 128))
    return peak(model, lambda: losses.full(model, MicroBatch(ids, ids))) / BOUNDARY


@pytest.mark.matrix
def test_peak_grows_with_depth_under_none_and_every_layer_as_its_root_under_sqrt_and_not_under_offload():
    depths = (4, 16, 64)
    kept, every, root, away = (
        [block_peak(apply, n) for n in depths]
        for apply in (checkpointing.none, checkpointing.every_layer, checkpointing.segments, checkpointing.offload)
    )
    interior = (kept[2] - kept[0]) / (depths[2] - depths[0])  # of one block, 22 to 34 block inputs
    assert 22 < interior < 34
    for one, other in ((0, 1), (1, 2)):  # one more block input per block
        assert (every[other] - every[one]) / (depths[other] - depths[one]) == pytest.approx(1, rel=0.02)
    for n, found in zip(depths[1:], root[1:], strict=True):
        assert found == pytest.approx(math.sqrt(n) * (1 + interior), rel=0.1)
    assert away[0] == away[1] == away[2] < every[0]  # the block inputs are in host memory


def test_selective_checkpointing_more_than_halves_the_peak_of_no_checkpointing():
    kept, some, least = (
        block_peak(apply, 16) for apply in (checkpointing.none, checkpointing.selective, checkpointing.every_layer)
    )
    # saved per block, in block inputs: qkv 3, attention 1 and its statistics, projection 1, MLP 4 + 1, and the block
    # input itself: 11 to 12 of about 28
    assert least < some < 0.5 * kept


# --- behaviour --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apply", SEGMENTED.values(), ids=SEGMENTED)
def test_checkpointing_trains_blocks_behind_a_frozen_embedding(apply, batch):
    model = shaped("gpt2")
    apply(model)
    model.get_input_embeddings().weight.requires_grad_(False)
    losses.full(model, batch).backward()
    assert model.transformer.h[0].mlp.c_fc.weight.grad is not None


@pytest.mark.parametrize("apply", SEGMENTED.values(), ids=SEGMENTED)
def test_checkpointing_computes_blocks_once_in_evaluation_and_without_gradients(apply, batch):
    model = shaped("gpt2")
    apply(model)
    calls = []
    model.transformer.h[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    losses.full(model, batch).backward()  # gradients are on, but dropout and checkpointing are off
    assert len(calls) == 1
    with torch.no_grad():
        losses.full(model.train(), batch)
    assert len(calls) == 2


@pytest.mark.parametrize("k", [1, 3])
def test_exception_inside_a_checkpointed_block_leaves_no_saved_tensor_hook_behind(batch, k):
    """A hook that stayed on torch's stack would drop tensors that the next job of a sweep saves."""
    model = shaped("gpt2")
    checkpointing.segments(model, k)

    def fails(*_):
        raise torch.OutOfMemoryError("at the second block of a segment")

    handle = model.transformer.h[1].mlp.register_forward_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError):
        losses.full(model, batch)
    handle.remove()
    x = torch.ones(2, requires_grad=True)
    y = (x * x).sum()
    assert y.grad_fn.next_functions[0][0]._saved_self is x
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(model, batch), gradients(shaped("gpt2"), batch), strict=True)
    )


class Meddling(nn.Module):
    """Changes the hidden states after each block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Thin() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * 1.5
        return x


def test_checkpointing_a_model_that_changes_hidden_states_between_blocks_gives_the_gradient_bits_of_none():
    results = []
    for apply in (checkpointing.none, partial(checkpointing.segments, k=2), checkpointing.every_layer):
        torch.manual_seed(0)
        model = Meddling().train()
        apply(model)
        x = torch.randn(8, 16, requires_grad=True)
        model(x).sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results, strict=True))


@pytest.mark.parametrize(
    "apply",
    [checkpointing.every_layer, checkpointing.offload, checkpointing.selective, partial(checkpointing.segments, k=2)],
    ids=["every_layer", "offload", "selective", "segments"],
)
def test_checkpointing_refuses_a_block_that_changes_its_input_in_place(apply):
    class Adding(Thin):
        def forward(self, x):
            return super().forward(x.add_(1.0))

    model = nn.Sequential(Adding(), Thin()).train()
    checkpointing.none(model)
    model(torch.randn(8, 16)).sum().backward()
    apply(model)
    with pytest.raises(Refused, match="Adding changes its input in place"):
        model(torch.randn(8, 16))


@pytest.mark.parametrize("k", [1, 2])
def test_in_place_change_of_a_checkpointed_block_input_raises_an_error_in_backward(k):
    model = nn.Sequential(Thin(), Thin()).train()
    checkpointing.segments(model, k)
    x = torch.randn(8, 16, requires_grad=True)
    entering = x * 1.0
    loss = model(entering).sum()
    entering.add_(1.0)
    with pytest.raises(RuntimeError, match="in place"):
        loss.backward()


def test_offloaded_block_inputs_are_freed_with_the_autograd_graph(batch):
    import gc
    import weakref

    from lowmem.techniques.gradient_checkpointing import boundary

    alive, count = weakref.WeakSet(), 0
    made = boundary.OnHost.__init__

    def counted(self, *arguments, **named):
        nonlocal count
        made(self, *arguments, **named)
        alive.add(self)
        count += 1

    boundary.OnHost.__init__ = counted
    try:
        model = shaped("gpt2")
        checkpointing.offload(model)
        for _ in range(3):
            losses.full(model, batch)  # forward passes without backward
    finally:
        boundary.OnHost.__init__ = made
    gc.collect()
    assert count and not alive


def test_checkpointing_a_model_without_blocks_or_with_k_of_0_is_refused():
    with pytest.raises(Refused, match="gradient_checkpointing=none"):
        checkpointing.every_layer(nn.Linear(2, 2))
    with pytest.raises(Refused, match="k=0"):
        checkpointing.segments(nn.Sequential(Thin()), 0)


def test_blocks_of_a_mixture_of_experts_are_its_layers_not_its_experts():
    layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(Thin() for _ in range(8))}) for _ in range(3))
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})
    assert checkpointing.blocks(model) == list(layers)
