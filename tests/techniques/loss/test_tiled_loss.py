"""Tests that the tiled loss equals the full loss (in 16 bits, within a 16-bit tolerance), and that it allocates no fp32
tensor of the size of a 16-bit head."""

from dataclasses import replace

import pytest
import torch
from test_cross_entropy import AROUND, AcrossTokens, value_and_gradients, worst
from transformers import GPT2LMHeadModel

from lowmem.data.loader import MicroBatch
from lowmem.memory.ledger import Ledger
from lowmem.memory.tracker import StorageTracker
from lowmem.model import head_tiles
from lowmem.system.errors import Refused
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.techniques.loss import tiled as tiled_loss
from lowmem.techniques.loss.cross_entropy import counted
from lowmem.techniques.loss.head import enter
from lowmem.techniques.loss.tiled import Tiled
from networks import VOCABULARY, WIDTH, network
from tolerances import BF16, FP16, FP32_REORDERED

pytestmark = pytest.mark.kernels
COLUMNS = 96  # five tiles, and a smaller one
KINDS = AROUND | {"phi": {}}  # phi's head has a bias


@pytest.fixture
def batch():
    ids, labels = torch.randint(0, VOCABULARY, (2, 3, 20))
    labels[0, :5] = labels[2, 17:] = losses.IGNORED
    return MicroBatch(ids, labels)


def tiled(model, batch):
    return Tiled(COLUMNS)(model, batch)


@pytest.mark.parametrize("columns", [COLUMNS, VOCABULARY, 10 * VOCABULARY])
@pytest.mark.parametrize("model_type", KINDS)
def test_tiled_loss_equals_full_and_chunked_loss(model_type, columns, batch):
    model = network(model_type, **KINDS[model_type])
    ours, gradients = value_and_gradients(model, Tiled(columns), batch, 0.37)
    for loss in (losses.full, losses.Chunked(7)):
        value, theirs = value_and_gradients(model, loss, batch, 0.37)
        assert ours == pytest.approx(value, rel=FP32_REORDERED)
        assert worst(gradients, theirs) < FP32_REORDERED


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16), (torch.float16, FP16)])
@pytest.mark.parametrize("held", ["fp32", "16 bits"])
def test_full_and_tiled_loss_in_16_bits_have_the_gradients_of_fp32_within_16_bit_tolerance(
    dtype, tolerance, held, batch
):
    model = network()
    model.to(dtype).float()  # fp32 weights that 16 bits represent exactly
    _, exact = value_and_gradients(model, losses.full, batch)
    if held == "16 bits":
        model.to(dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=held == "fp32", cache_enabled=False):
        for loss in (losses.full, tiled):
            assert worst(value_and_gradients(model, loss, batch)[1], exact) < tolerance


def of_rows(hidden, weight, labels):
    """Returns the tiled loss, summed over rows, of hidden states (N, H), a head's weight (V, H) and labels (N,)."""
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = torch.nn.Parameter(weight, weight.requires_grad)
    how = counted(labels), head_tiles.tiles_of(linear), COLUMNS, None
    return tiled_loss._TiledCrossEntropy.apply(hidden, weight, None, labels, *how).sum()


# --- deliberately wrong variants --------------------------------------------------------------------------------------


def a_tile_left_out(monkeypatch):
    right = head_tiles.ResidentHead.tiles
    monkeypatch.setattr(head_tiles.ResidentHead, "tiles", lambda *of: list(right(*of))[1:])


def labels_of_other_tiles_counted(monkeypatch):
    right = tiled_loss._place
    monkeypatch.setattr(tiled_loss, "_place", lambda *of: (torch.ones_like((found := right(*of))[0]), found[1]))


def ignored_positions_counted(monkeypatch):
    monkeypatch.setattr(tiled_loss, "counted", lambda labels, count: torch.arange(len(labels)))


WRONG = a_tile_left_out, labels_of_other_tiles_counted, ignored_positions_counted


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", WRONG)
def test_tiled_loss_with_a_deliberate_fault_differs_from_the_full_loss(wrong, batch, monkeypatch):
    model = network()
    value, gradients = value_and_gradients(model, losses.full, batch)
    wrong(monkeypatch)
    ours, our_gradients = value_and_gradients(model, tiled, batch)
    assert abs(ours / value - 1) > 100 * FP32_REORDERED
    assert worst(our_gradients, gradients) > BF16


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_tiled_loss_with_huge_logits_equals_the_full_loss_unless_the_logit_maximum_is_capped(wrong, batch, monkeypatch):
    """The largest logit and the logit of the label are in different tiles. The deliberately wrong variant caps the
    maximum at 50."""
    model = network("llama", tie_word_embeddings=False)
    model.lm_head.weight.data *= 20000
    value, gradients = value_and_gradients(model, losses.full, batch)
    if wrong:
        right = torch.maximum
        monkeypatch.setattr(torch, "maximum", lambda one, other: right(one, other).clamp(max=50))
    ours, our_gradients = value_and_gradients(model, tiled, batch)
    right = ours == pytest.approx(value, rel=FP32_REORDERED) and worst(our_gradients, gradients) < 10 * FP32_REORDERED
    assert right != wrong


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_tiled_loss_keeps_tiny_fp16_gradients_unless_rounded_before_the_loss_scale(wrong, batch, monkeypatch):
    """The softmax of unlikely tokens is below fp16's range, but the loss scale lifts their gradients into the range.
    The deliberately wrong variant rounds gradients of the logits to fp16 before the loss scale multiplies them."""
    scale, hidden, weight = 1024.0, torch.ones(4, 8), -torch.arange(160.0)[:, None].expand(160, 8) / 64
    exact = torch.softmax(weight.sum(1), 0)  # 1e-9 at the end
    if wrong:

        def rounded_first(*of, right=tiled_loss.finished, **how):
            logits, back = right(*of, **how)
            return logits, lambda d_logits: back(d_logits.div(scale).half().float().mul(scale))

        monkeypatch.setattr(tiled_loss, "finished", rounded_first)
    weight = weight.half().requires_grad_()
    (of_rows(hidden.half(), weight, torch.zeros(4, dtype=int)) * scale).backward()
    found = weight.grad[1:, 0].float() / scale / 4
    assert (((found - exact[1:]).abs() / exact[1:]).max() > 0.5) == wrong


# --- bytes ------------------------------------------------------------------------------------------------------------

TALL = 4000  # size of a vocabulary that makes all other tensors small in comparison


LARGE = {"tie_word_embeddings": False, "vocab_size": TALL}


def allocated(model, loss, batch):
    """Returns the sizes of all allocations in a forward and backward pass, in bytes."""
    with StorageTracker({}) as tracker:
        loss(model, batch).backward()
    return {size for _, _, size in tracker.events if size > 0}


def test_tiled_loss_of_a_16_bit_head_allocates_no_fp32_tensor_of_the_size_of_the_head(batch):
    sizes = allocated(network("llama", **LARGE).bfloat16(), tiled, batch)
    assert max(sizes) == 2 * TALL * WIDTH  # gradients of head and embedding
    assert max(allocated(network("llama", **LARGE).bfloat16(), losses.Chunked(7), batch)) == 4 * TALL * WIDTH


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_peak_of_the_tiled_loss_is_the_head_gradient_plus_one_tile_of_logits(held):
    tokens, dtype = 300, torch.bfloat16
    hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(TALL, WIDTH, dtype=held, requires_grad=True)
    ledger = Ledger()
    ledger.own("weights", lambda: [hidden, weight])
    with StorageTracker(ledger.storages()) as tracker:
        of_rows(hidden, weight, torch.randint(0, TALL, (tokens,))).backward()
    peak = max(point.total - point.bytes["weights"] for point in tracker.timeline())
    known = weight.nbytes + tokens * COLUMNS * (4 + 2) + tokens * WIDTH * (2 + 4)  # head's input and its gradient
    known += 0 if held == dtype else 2 * COLUMNS * WIDTH  # a tile of the weight, rounded
    assert known <= peak < known + 5 * 8 * tokens  # sums, labels and columns


def test_tiled_loss_needs_no_more_memory_when_labels_are_ignored(batch):
    """The planner does not know the labels, and assumes that none is ignored."""

    def peak(labels):
        hidden = torch.randn(60, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with StorageTracker({}) as tracker:
            of_rows(hidden, torch.randn(TALL, WIDTH, dtype=torch.bfloat16, requires_grad=True), labels).backward()
        return max(point.total for point in tracker.timeline())

    every = batch.labels.flatten().clamp(min=0)
    nearly = every.index_fill(0, torch.tensor([3]), losses.IGNORED)
    assert peak(nearly) <= peak(every)


def test_tiled_evaluation_needs_memory_for_the_logits_of_one_tile_only(batch):
    model = network("llama", **LARGE)
    ledger = Ledger()
    ledger.own("weights", lambda: list(model.parameters()))
    with StorageTracker(ledger.storages()) as tracker, torch.no_grad():
        value = tiled(model, batch)
    others = max(point.total - point.bytes["weights"] for point in tracker.timeline())
    assert others < 60 * COLUMNS * 4 + 3 * TALL * 4 + 5 * 60 * WIDTH * 4  # 5: with the zeros that probe the head
    assert others < 60 * TALL * 4 / 8
    assert value.item() == pytest.approx(losses.full(model, batch).item(), rel=FP32_REORDERED)


# --- edges ------------------------------------------------------------------------------------------------------------


def test_tiled_loss_gives_no_gradient_to_a_frozen_head_or_a_frozen_body(batch):
    model = network("llama", tie_word_embeddings=False)
    model.lm_head.weight.requires_grad_(False)
    tiled(model, batch).backward()
    assert model.lm_head.weight.grad is None and model.model.embed_tokens.weight.grad is not None
    model.zero_grad()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    tiled(model, batch).backward()
    assert model.lm_head.weight.grad.any() and model.model.embed_tokens.weight.grad is None


def test_tiled_loss_and_gradients_are_zero_if_all_labels_are_ignored(batch):
    batch = replace(batch, labels=torch.full_like(batch.labels, losses.IGNORED))
    value, gradients = value_and_gradients(network(), tiled, batch)
    assert value == 0.0 and not any(g.any() for g in gradients)


@pytest.mark.parametrize("columns", [0, -3, "abc", None, True, 1.5])
def test_invalid_tile_size_of_the_tiled_loss_is_refused(columns):
    with pytest.raises(Refused, match=r"whole number of vocabulary entries.* loss\.columns=4096"):
        Tiled(columns)


class OverTheVocabulary(GPT2LMHeadModel):
    """Subtracts five times the mean over the vocabulary, so each logit depends on the logits of other tiles."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits - 5 * output.logits.mean(dim=-1, keepdim=True)
        return output


@pytest.mark.parametrize(("changed", "instead"), [(OverTheVocabulary, "chunked"), (AcrossTokens, "full")])
def test_tiled_loss_for_logits_that_depend_on_other_tiles_or_tokens_is_refused(changed, instead, batch):
    model = network().eval()
    Tiled(COLUMNS).verify(model, batch)
    model.__class__ = changed
    with pytest.raises(Refused, match=f"a different function. Type loss={instead}."):
        Tiled(COLUMNS).verify(model, batch)


def test_probing_a_model_for_operations_around_the_head_does_not_call_the_head(batch, monkeypatch):
    model = network("llama", tie_word_embeddings=False)
    monkeypatch.setattr(model.lm_head, "forward", None)
    assert enter(model, batch.inputs).finish is None
