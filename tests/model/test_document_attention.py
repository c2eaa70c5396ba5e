"""Tests that tokens attend only to their own document, wherever a document of a row starts and whichever kernel
computes attention."""

import inspect
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import varlen
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from lowmem.data.loader import MicroBatch
from lowmem.model import document_attention, packed_attention
from lowmem.model.document_attention import (
    BY_DOCUMENT,
    MASKED,
    attend,
    first_tokens,
    first_tokens_or_mask,
    lengths_of,
    takes_all_at_once,
)
from lowmem.system.torch_private import known_first_tokens
from networks import network

pytestmark = pytest.mark.kernels
CPU, TOKENS = torch.device("cpu"), 12
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]])
FIRST = [0, 3, 8, 9, 12, 23, 24]  # indices of the first tokens of these documents in the concatenated rows, and the end
CLOSE = 1e-6  # fp32 sums of a few products in another order


def mask_function(base=causal_mask_function):
    return and_masks(base, packed_sequence_mask_function(NUMBERS))


def asked(base=causal_mask_function, **more):
    known = {"mask_function": mask_function(base), "device": CPU, "dtype": torch.float32}
    return first_tokens_or_mask(2, TOKENS, TOKENS, **(known | {"allow_is_causal_skip": False} | more))


class Layer(nn.Module):
    is_causal, num_key_value_groups = True, 2


def inputs(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 4, TOKENS, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 8))
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(function, tensors):
    out = function(*tensors)
    (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
    return [out, *(tensor.grad for tensor in tensors)]


def dense(query, key, value):
    mask = sdpa_mask(2, TOKENS, TOKENS, mask_function=mask_function(), allow_is_causal_skip=False)
    return sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)[0]


def by_document(query, key, value):
    return attend(Layer(), query, key, value, torch.tensor(FIRST, dtype=torch.int32), scaling=0.3)[0]


def apart(ours, theirs):
    return max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))


def test_document_starts_found_in_the_mask_function_equal_the_starts_of_the_documents():
    assert first_tokens(mask_function(), 2, TOKENS, CPU).tolist() == FIRST
    assert first_tokens(mask_function(), 2, TOKENS, CPU).dtype == torch.int32
    assert asked().tolist() == FIRST


@pytest.mark.parametrize(
    ("base", "known"),
    [
        (causal_mask_function, FIRST),
        (sliding_window_causal_mask_function(TOKENS), FIRST),
        (sliding_window_causal_mask_function(TOKENS - 1), None),
        (chunked_causal_mask_function(TOKENS, torch.zeros(2, dtype=torch.int64)), None),
        (or_masks(causal_mask_function, lambda *at: at[3] == 0), None),
        (lambda *at: at[3] <= at[2], None),
        (packed_sequence_mask_function(NUMBERS), None),  # not causal: later tokens are visible
    ],
    ids=["causal", "window of a row", "shorter window", "chunked", "first token", "other function", "not causal"],
)
def test_document_starts_counted_on_the_host_are_used_for_full_causal_document_masks_only(base, known):
    numbers = NUMBERS.clone()
    numbers.counted_first = FIRST
    mask = and_masks(base, packed_sequence_mask_function(numbers))
    assert known_first_tokens(mask, TOKENS) == known
    assert known_first_tokens(mask_function(base), TOKENS) is None
    if known:
        first = first_tokens(mask, 2, TOKENS, CPU)
        assert torch.equal(first, first_tokens(mask_function(), 2, TOKENS, CPU)) and first.dtype == torch.int32
        assert lengths_of(first, 2 * TOKENS) == lengths_of(torch.tensor(FIRST), 2 * TOKENS) == [3, 5, 1, 3, 11, 1]


@pytest.mark.parametrize("places", [[[0, 1, 2, 0, 1, 2, 3, 0], [*range(8)]], [[*range(8)], [*range(8)]]])
@pytest.mark.parametrize("attention", [BY_DOCUMENT, MASKED])
def test_logits_have_equal_bits_whether_document_starts_are_counted_on_the_host_or_in_the_model(places, attention):
    model, ids = network("llama").eval(), torch.randint(0, 500, (2, 8))
    model.set_attn_implementation(attention)
    batch = MicroBatch(ids, ids, torch.tensor(places))
    asked = model(**batch.inputs, use_cache=False).logits
    batch = MicroBatch(ids, ids, torch.tensor(places)).counted()
    with patch.object(document_attention, "known_first_tokens", wraps=known_first_tokens) as told:
        assert torch.equal(model(**batch.inputs, use_cache=False).logits, asked)
    assert batch.first_tokens == batch.inputs["position_ids"].counted_first
    assert told.called == (attention == BY_DOCUMENT and len(batch.first_tokens) > 3)


@pytest.mark.parametrize("window", [3, 20])
def test_sliding_window_shorter_than_the_row_needs_the_dense_mask(window):
    sliding = sliding_window_causal_mask_function(window)
    found = asked(sliding, local_size=window)
    assert (found.shape == (2, 1, TOKENS, TOKENS)) == (window < TOKENS)
    # without local_size, the mask shows the window: late tokens do not see the start of their document
    assert (first_tokens(mask_function(sliding), 2, TOKENS, CPU) is None) == (window < TOKENS)


def test_non_causal_mask_gives_a_dense_mask_instead_of_document_starts():
    both_ways = packed_sequence_mask_function(NUMBERS)
    assert first_tokens(both_ways, 2, TOKENS, CPU) is None
    assert asked(lambda *at: at[2] >= 0).shape == (2, 1, TOKENS, TOKENS)


def test_single_document_rows_and_decoding_have_no_document_starts():
    assert asked(mask_function=causal_mask_function) is None
    assert asked(mask_function=causal_mask_function, allow_is_causal_skip=True) is None
    one = first_tokens_or_mask(
        2, 1, TOKENS, q_offset=TOKENS - 1, mask_function=causal_mask_function, device=CPU, dtype=torch.float32
    )
    assert one is None or one.dim() == 4
    padded = asked(attention_mask=torch.ones(2, TOKENS, dtype=torch.bool))
    assert padded.dim() == 4


def test_attention_by_document_has_the_outputs_and_gradients_of_attention_with_a_dense_mask():
    assert apart(with_gradients(by_document, inputs()), with_gradients(dense, inputs())) < CLOSE


def test_attention_by_document_equals_attention_of_separate_documents_bit_for_bit():
    query, key, value = inputs()
    ours = by_document(query, key, value).flatten(0, 1)
    for start, end in pairwise(FIRST):
        row, at = start // TOKENS, slice(start % TOKENS, (end - 1) % TOKENS + 1)
        alone = [tensor[row : row + 1, :, at] for tensor in (query, key, value)]
        assert torch.equal(ours[start:end], sdpa_attention_forward(Layer(), *alone, None, scaling=0.3)[0][0])


@pytest.mark.wrong
@pytest.mark.parametrize(
    "wrong",
    [FIRST[:1] + FIRST[2:], [0, 4, *FIRST[2:]], [0, 12, 24]],
    ids=["start left out", "start shifted", "one document per row"],
)
def test_wrong_document_boundaries_change_the_outputs_or_gradients(wrong):
    def shifted(query, key, value):
        return attend(Layer(), query, key, value, torch.tensor(wrong, dtype=torch.int32), scaling=0.3)[0]

    assert apart(with_gradients(shifted, inputs()), with_gradients(dense, inputs())) > 1000 * CLOSE


def reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """Checks the arguments, and computes the result of torch's varlen kernel on a CPU. Args: query: of shape (tokens,
    heads, D)."""
    inspect.signature(varlen.varlen_attn).bind(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)
    assert options["window_size"] == (-1, 0) and query.dim() == 3
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    assert max(cu_seq_q.diff()) <= max_q == max_k
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or options.get("enable_gqa", True)
    document = torch.bucketize(torch.arange(len(query)), cu_seq_q, right=True)
    sees = (document[:, None] == document) & torch.ones(len(query), len(query), dtype=torch.bool).tril()
    heads = [t.repeat_interleave(n, 1).transpose(0, 1) for t, n in ((query, 1), (key, groups), (value, groups))]
    scores = (heads[0] @ heads[1].mT * options["scale"]).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ heads[2]).transpose(0, 1)


@pytest.fixture
def at_once(monkeypatch):
    """Replaces torch's varlen kernel by `reference` on a CPU, and returns the list of its calls."""
    called = []
    monkeypatch.setattr(document_attention, "has_kernel", lambda dtype, device: True)
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **how: called.append(how) or reference(*args, **how))
    return called


def test_attention_with_one_varlen_kernel_call_equals_attention_with_the_dense_mask(at_once):
    assert apart(with_gradients(by_document, inputs()), with_gradients(dense, inputs())) < CLOSE
    assert len(at_once) == 1


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen3", "gemma"])
def test_model_that_calls_the_varlen_kernel_keeps_documents_apart(at_once, model_type):
    model = network(model_type, **({"n_positions": 64} if model_type == "gpt2" else {})).eval()
    packed_attention.separate(model)
    assert packed_attention.keeps_apart(model, torch.randint(0, 500, (2, 40)))
    assert len(at_once) > 0


def test_model_whose_varlen_kernel_mixes_documents_fails_the_separation_check(at_once, monkeypatch):
    """In the deliberately wrong kernel, tokens attend to all earlier tokens of their row."""

    def mixes(query, key, value, first, *args, **how):
        rows = torch.tensor([0, len(query) // 2, len(query)], dtype=torch.int32)
        return reference(query, key, value, rows, rows, *args[1:], **how)

    monkeypatch.setattr(varlen, "varlen_attn", mixes)
    model = network("llama").eval()
    packed_attention.separate(model)
    assert not packed_attention.keeps_apart(model, torch.randint(0, 500, (2, 40)))


@pytest.mark.parametrize(
    ("dtype", "head", "value", "dropout", "capability", "taken"),
    [
        (torch.bfloat16, 64, 64, 0.0, (8, 0), True),
        (torch.float16, 256, 256, 0.0, (9, 0), True),
        (torch.float32, 64, 64, 0.0, (9, 0), False),
        (torch.float16, 64, 64, 0.0, (7, 5), False),
        (torch.bfloat16, 64, 64, 0.1, (8, 0), False),
        (torch.bfloat16, 60, 60, 0.0, (8, 0), False),
        (torch.bfloat16, 288, 288, 0.0, (8, 0), False),
        (torch.bfloat16, 192, 128, 0.0, (8, 0), False),
    ],
)
def test_varlen_kernel_is_used_only_in_16_bits_for_equal_head_sizes_up_to_256_without_dropout_from_capability_8_0(
    monkeypatch, dtype, head, value, dropout, capability, taken
):
    class OnCard:
        def __init__(self, size):
            self.shape, self.dtype, self.device = (5, 2, size), dtype, torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    document_attention.has_kernel.cache_clear()
    try:
        assert takes_all_at_once(OnCard(head), OnCard(value), dropout) == taken
    finally:
        document_attention.has_kernel.cache_clear()
    assert not takes_all_at_once(*inputs(torch.bfloat16)[::2], 0.0)  # a CPU


def test_attention_by_document_under_bf16_autocast_returns_bfloat16_as_sdpa():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert by_document(*inputs()).dtype == dense(*inputs()).dtype == torch.bfloat16


def test_model_that_slices_its_mask_gets_a_dense_mask(monkeypatch, caplog):
    model, ids = network("llama").eval(), torch.randint(0, 500, (2, 40))
    for block in model.model.layers:
        forward = block.self_attn.forward

        def cuts(*args, forward=forward, attention_mask=None, **kwargs):
            mask = attention_mask if attention_mask is None else attention_mask[:, :, :, :40]
            return forward(*args, attention_mask=mask, **kwargs)

        block.self_attn.forward = cuts
    packed_attention.separate(model)
    with caplog.at_level("INFO", logger="lowmem"):
        packed_attention.verify(model, ids)
    assert packed_attention.attention_taken(model) == document_attention.MASKED
    assert "needs a (tokens, tokens) mask" in caplog.text


def test_packed_documents_save_no_tensor_of_tokens_by_tokens_for_backward():
    model, sizes = network("llama", num_hidden_layers=2), []
    packed_attention.separate(model)
    places = torch.arange(64).repeat(2, 4)  # (2, 256): four documents in each row

    def pack(tensor):
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(input_ids=torch.randint(0, 500, (2, 256)), position_ids=places, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), torch.zeros(512, dtype=torch.int64)).backward()
    assert max(sizes) < 2 * 256 * 256 * 4
