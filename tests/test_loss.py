"""The chunked loss is the full loss, in every precision, and never holds all logits."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem import loss as losses
from lowmem.errors import Refused
from lowmem.memory.tracker import StorageTracker
from tolerances import BF16, FP16, FP32_REORDERED

VOCABULARY, WIDTH, ROWS = 500, 32, 7


def network(model_type="gpt2", **changes):
    torch.manual_seed(0)
    if model_type == "gpt2":
        shape = {
            "n_positions": 32,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 2,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        }
    else:
        shape = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape |= {"num_key_value_heads": 1, "head_dim": 16}
    config = AutoConfig.for_model(model_type, **({"vocab_size": VOCABULARY} | shape | changes))
    return AutoModelForCausalLM.from_config(config).train()


@pytest.fixture
def batch():
    ids = torch.randint(0, VOCABULARY, (3, 20))
    labels = torch.randint(0, VOCABULARY, (3, 20))
    labels[0, :5] = labels[2, 17:] = losses.IGNORED
    return ids, labels


def value_and_gradients(model, loss, batch, scale=1.0):
    model.zero_grad()
    value = loss(model, *batch)
    (value * scale).backward()
    return value.item(), [p.grad.clone() for p in model.parameters()]


def worst(ours, theirs):
    """Largest difference of any gradient, relative to that gradient's largest element."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))


def chunked(model, input_ids, labels):
    return losses.chunked(model, input_ids, labels, rows=ROWS)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt2", {}),  # tied head
        ("llama", {"tie_word_embeddings": False}),
        ("gemma2", {"final_logit_softcapping": 3.0, "attn_implementation": "eager"}),
    ],
)
def test_chunked_is_full(model_type, changes, batch):
    model = network(model_type, **changes)

    def oracle(model, input_ids, labels):  # written out, so that `full` is checked too
        logits = model(input_ids=input_ids, use_cache=False).logits.double()
        kept = labels != losses.IGNORED
        return -torch.log_softmax(logits[kept], -1)[torch.arange(int(kept.sum())), labels[kept]].sum()

    value, gradients = value_and_gradients(model, oracle, batch, 0.37)
    for loss in (losses.full, chunked):
        ours, our_gradients = value_and_gradients(model, loss, batch, 0.37)
        assert ours == pytest.approx(value, rel=FP32_REORDERED)
        assert worst(our_gradients, gradients) < FP32_REORDERED


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16), (torch.float16, FP16)])
def test_under_autocast_chunked_is_as_close_to_fp32_as_full_is(dtype, tolerance, batch):
    model = network()
    _, exact = value_and_gradients(model, losses.full, batch)
    with torch.autocast("cpu", dtype=dtype):
        for loss in (losses.full, chunked):
            assert worst(value_and_gradients(model, loss, batch)[1], exact) < tolerance


@pytest.mark.parametrize("wrong", ["chunk dropped", "mean of chunks", "ignored counted"])
def test_a_wrong_loss_is_caught(wrong, batch):
    model = network()
    value, gradients = value_and_gradients(model, losses.full, batch)

    def broken(model, input_ids, labels):
        if wrong == "chunk dropped":
            labels = labels.clone()
            labels[1, 6:13] = losses.IGNORED
        if wrong == "ignored counted":
            labels = labels.clamp(min=0)
        return chunked(model, input_ids, labels) / (9 if wrong == "mean of chunks" else 1)

    ours, our_gradients = value_and_gradients(model, broken, batch)
    assert abs(ours / value - 1) > 100 * FP32_REORDERED
    assert worst(our_gradients, gradients) > BF16


def test_evaluation_needs_no_gradient(batch):
    model = network().eval()
    with torch.no_grad():
        assert chunked(model, *batch).item() == pytest.approx(losses.full(model, *batch).item(), rel=FP32_REORDERED)


def test_a_frozen_head_gets_no_gradient(batch):
    model = network("llama", tie_word_embeddings=False)
    model.lm_head.weight.requires_grad_(False)
    chunked(model, *batch).backward()
    assert model.lm_head.weight.grad is None and model.model.embed_tokens.weight.grad is not None


def largest_tensor(loss, batch):
    with StorageTracker({}) as tracker:
        loss(network(), *batch).backward()
    return max(size for _, _, size in tracker.events)


def test_chunked_never_holds_all_logits(batch):
    logits = 3 * 20 * VOCABULARY * 4
    assert largest_tensor(losses.full, batch) == logits
    # what is left is the gradient of the head's weight, V x H, against V x (batch x tokens)
    assert largest_tensor(chunked, batch) == VOCABULARY * WIDTH * 4 < logits


def test_models_whose_logits_are_not_the_head_alone_are_refused(batch):
    scaled = network()
    scaled.config.logits_scaling = 8.0
    with pytest.raises(Refused, match="logits_scaling"):
        chunked(scaled, *batch)
    headless = network()
    headless.set_output_embeddings(nn.Identity())
    with pytest.raises(Refused, match="loss=full"):
        chunked(headless, *batch)
