"""Tests that the full and the chunked loss equal an fp64 reference, within 16-bit tolerance under autocast, and that
the chunked loss never holds all logits."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from lowmem.data.loader import MicroBatch
from lowmem.memory.ledger import Ledger
from lowmem.memory.tracker import StorageTracker
from lowmem.system.errors import Refused
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.techniques.loss.head import Head
from networks import VOCABULARY, WIDTH, network
from tolerances import BF16, FP16, FP32_REORDERED

pytestmark = pytest.mark.kernels
ROWS = 7


@pytest.fixture
def batch():
    ids = torch.randint(0, VOCABULARY, (3, 20))
    labels = torch.randint(0, VOCABULARY, (3, 20))
    labels[0, :5] = labels[2, 17:] = losses.IGNORED
    return MicroBatch(ids, labels)


def value_and_gradients(model, loss, batch, scale=1.0):
    model.zero_grad()
    value = loss(model, batch)
    (value * scale).backward()
    return value.item(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def worst(ours, theirs):
    """Returns the largest difference of any gradient, relative to the largest element of that gradient."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))


def worst_of_shared(ours, theirs):
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True) if a is not None)


def chunked(model, batch):
    return losses.Chunked(ROWS)(model, batch)


# Model types with different operations around the head's matrix product: none, a factor or a cap (each family has its
# own name for it), or layers.
AROUND = {
    "gpt2": {},  # tied head
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"final_logit_softcapping": 0.2, "attn_implementation": "eager"},
    "recurrent_gemma": {"logits_soft_cap": 0.2, "attn_implementation": "eager", "lru_width": WIDTH},
    "cohere": {"logit_scale": 0.5},
    "granite": {"logits_scaling": 2.0},
    "modernbert-decoder": dict.fromkeys([f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")], 0),
}


def oracle(model, batch):  # written out, so that `full` is checked too
    logits, labels = model(**batch.inputs, use_cache=False).logits.double(), batch.labels
    kept = labels != losses.IGNORED
    return -torch.log_softmax(logits[kept], -1)[torch.arange(int(kept.sum())), labels[kept]].sum()


@pytest.mark.parametrize("model_type", AROUND)
def test_full_and_chunked_loss_and_gradients_equal_the_fp64_reference(model_type, batch):
    model = network(model_type, **AROUND[model_type])
    value, gradients = value_and_gradients(model, oracle, batch, 0.37)
    for loss in (losses.full, chunked):
        ours, our_gradients = value_and_gradients(model, loss, batch, 0.37)
        assert ours == pytest.approx(value, rel=FP32_REORDERED)
        assert worst(our_gradients, gradients) < FP32_REORDERED


@pytest.mark.wrong
@pytest.mark.parametrize("model_type", [t for t in AROUND if t not in ("gpt2", "llama")])
def test_chunked_loss_without_the_operations_around_the_head_differs_from_the_reference(model_type, batch, monkeypatch):
    """In the deliberately wrong variant, the logits are the product of the last hidden states and the head's matrix,
    and nothing else."""
    model = network(model_type, **AROUND[model_type])
    value, gradients = value_and_gradients(model, oracle, batch)

    def bare(model, inputs):
        return Head(
            model.get_output_embeddings(),
            model.base_model(**inputs, use_cache=False).last_hidden_state,
            None,
        )

    monkeypatch.setattr(losses, "enter", bare)
    ours, our_gradients = value_and_gradients(model, chunked, batch)
    assert max(abs(ours / value - 1), worst_of_shared(our_gradients, gradients)) > 100 * FP32_REORDERED


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16), (torch.float16, FP16)])
def test_full_and_chunked_loss_under_autocast_have_the_gradients_of_fp32_within_16_bit_tolerance(
    dtype, tolerance, batch
):
    model = network()
    _, exact = value_and_gradients(model, losses.full, batch)
    with torch.autocast("cpu", dtype=dtype):
        for loss in (losses.full, chunked):
            assert worst(value_and_gradients(model, loss, batch)[1], exact) < tolerance


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", ["chunk dropped", "mean of chunks", "ignored counted"])
def test_chunked_loss_with_a_deliberate_fault_differs_from_the_full_loss(wrong, batch):
    model = network()
    value, gradients = value_and_gradients(model, losses.full, batch)

    def broken(model, batch):
        labels = batch.labels
        if wrong == "chunk dropped":
            labels = labels.clone()
            labels[1, 6:13] = losses.IGNORED
        if wrong == "ignored counted":
            labels = labels.clamp(min=0)
        return chunked(model, replace(batch, labels=labels)) / (9 if wrong == "mean of chunks" else 1)

    ours, our_gradients = value_and_gradients(model, broken, batch)
    assert abs(ours / value - 1) > 100 * FP32_REORDERED
    assert worst(our_gradients, gradients) > BF16


def test_chunked_loss_under_no_grad_equals_the_full_loss(batch):
    model = network().eval()
    with torch.no_grad():
        assert chunked(model, batch).item() == pytest.approx(losses.full(model, batch).item(), rel=FP32_REORDERED)


def test_chunked_loss_gives_no_gradient_to_a_frozen_head(batch):
    model = network("llama", tie_word_embeddings=False)
    model.lm_head.weight.requires_grad_(False)
    chunked(model, batch).backward()
    assert model.lm_head.weight.grad is None and model.model.embed_tokens.weight.grad is not None


def largest_tensor(loss, batch):
    with StorageTracker({}) as tracker:
        loss(network(), batch).backward()
    return max(size for _, _, size in tracker.events)


def test_chunked_loss_allocates_no_tensor_of_the_size_of_all_logits(batch):
    logits = 3 * 20 * VOCABULARY * 4
    assert largest_tensor(losses.full, batch) == logits
    # the largest tensor is then the gradient of the head's weight: V x H instead of V x (batch x tokens)
    assert largest_tensor(chunked, batch) == VOCABULARY * WIDTH * 4 < logits


def peak(batch, loss=chunked):
    model = network()
    ledger = Ledger()
    ledger.own("weights", lambda: list(model.parameters()))
    with StorageTracker(ledger.storages()) as tracker:
        loss(model, batch).backward()
    return max(point.total for point in tracker.timeline())


def test_chunked_loss_needs_no_more_memory_when_labels_are_ignored(batch, monkeypatch):
    """The planner does not know the labels, and assumes that none is ignored."""
    every = replace(batch, labels=batch.labels.clamp(min=0))
    few = replace(batch, labels=batch.labels.where(torch.arange(20) % 2 == 0, losses.IGNORED))
    assert peak(few) <= peak(every)

    def at_once(model, batch):
        """In the deliberately wrong variant, all hidden states whose label is not ignored are copied before the first
        chunk."""
        chosen, enter = batch.labels.flatten() != losses.IGNORED, losses.enter
        copied = lambda *of: (head := enter(*of))._replace(hidden=head.hidden.flatten(0, 1)[chosen][None])  # noqa: E731
        monkeypatch.setattr(losses, "enter", copied)
        return chunked(model, replace(batch, labels=batch.labels.flatten()[chosen][None]))

    nearly = replace(batch, labels=every.labels.index_fill(1, torch.tensor([3]), losses.IGNORED))
    assert peak(nearly) <= peak(every) < peak(nearly, at_once)


def test_chunked_evaluation_holds_one_chunk_at_a_time(batch):
    """The head is frozen, as with an adapter, so the logits of a chunk determine the peak of training and of
    evaluation."""

    def largest(evaluates, rows):
        model = network()
        model.requires_grad_(False)
        model.transformer.wte.weight.data = torch.randn(2000, WIDTH)
        model.transformer.h[0].mlp.c_fc.weight.requires_grad_(not evaluates)
        with StorageTracker({}) as tracker:
            losses.Chunked(rows)(model, batch)
        return max(point.total for point in tracker.timeline())

    assert largest(True, 15) <= largest(False, 15)
    head, chunk = 2000 * WIDTH * 4, 15 * 2000 * 4
    # 2.5: logits and log-softmax of one chunk; it would be 4 if the previous chunk were kept
    assert largest(True, 15) < head + 2.5 * chunk


def test_full_and_chunked_loss_and_gradients_are_zero_if_all_labels_are_ignored(batch):
    batch = replace(batch, labels=torch.full_like(batch.labels, losses.IGNORED))
    for loss in (losses.full, chunked):
        value, gradients = value_and_gradients(network(), loss, batch)
        assert value == 0.0 and not any(g.any() for g in gradients)


def test_full_and_chunked_loss_call_the_model_with_all_inputs_of_the_micro_batch(batch):
    """The tested calls include those that compute, for one chunk, only the operations around the head."""
    model, seen = network("gemma2", **AROUND["gemma2"]), []
    batch = replace(batch, position_ids=torch.arange(20).remainder(7).expand(3, -1))
    model.forward = lambda _forward=model.forward, **inputs: seen.append(inputs) or _forward(**inputs)
    for loss in (losses.full, chunked):
        loss(model, batch)
    losses.Chunked(ROWS).verify(model.eval(), batch)
    assert len(seen) > 60 / ROWS
    for inputs in seen:
        assert inputs == {**batch.inputs, "use_cache": False}


def test_chunked_loss_with_a_non_linear_head_is_refused(batch):
    headless = network()
    headless.set_output_embeddings(nn.Identity())
    with pytest.raises(Refused, match="loss=full"):
        chunked(headless, batch)


def test_chunked_loss_with_a_head_applied_twice_is_refused(batch):
    class Twice(type(network())):
        def forward(self, **inputs):
            super().forward(**inputs)
            return super().forward(**inputs)

    twice = network()
    twice.__class__ = Twice
    with pytest.raises(Refused, match="once to every token"):
        chunked(twice, batch)


class AcrossTokens(GPT2LMHeadModel):
    """Subtracts the mean logits of the sequence, so the logits of a token depend on other tokens."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits - output.logits.mean(dim=1, keepdim=True)
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_refuses_chunked_loss_for_logits_that_depend_on_other_tokens(dtype, batch):
    model = network().to(dtype).eval()
    loss = losses.Chunked(ROWS)
    loss.verify(model, batch)
    model.__class__ = AcrossTokens
    with pytest.raises(Refused, match="a different function"):
        loss.verify(model, batch)


def test_run_with_chunked_loss_is_refused_if_chunked_logits_disagree_with_the_model(fit, monkeypatch):
    fit("loss=chunked")
    monkeypatch.setattr(losses, "agrees", lambda *_: False)
    fit("loss=full")
    with pytest.raises(Refused, match="loss=chunked"):
        fit("loss=chunked", folder="other")


@pytest.mark.parametrize("rows", [0, -3, "abc", None, True, 1.5])
def test_invalid_chunk_size_of_the_chunked_loss_is_refused(rows):
    with pytest.raises(Refused, match="whole number of tokens"):
        losses.Chunked(rows)


class ByPlace(GPT2LMHeadModel):
    """Computes logits that depend on the position of a token."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        places = torch.arange(output.logits.shape[1], dtype=output.logits.dtype)[:, None]
        output.logits = output.logits * (1 + places / 10)
        return output


class Masked(GPT2LMHeadModel):
    """Sets one logit to the most negative number of its dtype, and multiplies the others by `factor`."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = output.logits * self.factor
        output.logits[..., 0] = torch.finfo(output.logits.dtype).min
        return output


class Readout(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) / 4


def test_verify_refuses_chunked_loss_for_position_dependent_logits_head_hooks_and_custom_heads(batch):
    loss = losses.Chunked(ROWS)
    model = network().eval()
    model.__class__ = ByPlace
    with pytest.raises(Refused, match="a different function"):
        loss.verify(model, batch)
    model.__class__ = Masked
    model.factor = 3.0
    loss.verify(model, batch)
    model = network("llama", tie_word_embeddings=False).eval()
    model.lm_head.register_forward_hook(lambda _, __, product: product * 3)
    with pytest.raises(Refused, match="a different function"):
        loss.verify(model, batch)
    model = network("llama", tie_word_embeddings=False).eval()
    model.lm_head.__class__ = Readout
    with pytest.raises(Refused, match="linear head"):
        loss.verify(model, batch)
