"""Tests the prediction of attention on a card: the kernel that torch chooses, the tensors that it saves for backward,
and its scratch memory in backward.

src/lowmem/plan/tracing/attend.py has the formulas with their sources. The tests derive the formulas again by hand. With
a card, `pytest -m gpu` also compares the predicted kernels with the kernels that torch chooses.
"""

import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from test_trace import MODELS
from torch import nn

from lowmem.config import cards
from lowmem.config.cards import Card
from lowmem.memory.tracker import StorageTracker, highest
from lowmem.plan import at_start, table
from lowmem.plan.search.candidates import Typed
from lowmem.plan.search.recipes import Plan, Recipe
from lowmem.plan.target import Target
from lowmem.plan.tracing import as_card as card
from lowmem.plan.tracing import attend, attention
from lowmem.plan.tracing.attention import CUDNN, EFFICIENT, FLASH, MATH, AttentionCall, kernel
from lowmem.plan.tracing.operator_cost import work_of
from lowmem.plan.tracing.trace import trace
from lowmem.system import torch_private
from lowmem.system.units import GIB
from lowmem.techniques.gradient_checkpointing import selective
from lowmem.techniques.gradient_checkpointing.policies import Alone

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CARDS = (7.5, 8.0, 8.6, 8.9, 9.0, 12.0)
HEADERS = Path(torch.__file__).parent / "include" / "ATen"
TRANSFORMERS = HEADERS / "native" / "transformers"


# --- which kernel -----------------------------------------------------------------------------------------------------


def call(dtype, head, **more):
    return AttentionCall(dtype, head, more.pop("value", head), **more)


GROUPED, MASK, DROPS = {"grouped": True}, {"mask": True, "causal": False}, {"dropout": 0.1}
# The kernel on each of CARDS, derived by hand from torch's rules.
EXPECTED = (
    (call(FP32, 64), (EFFICIENT,) * 6),
    (call(FP32, 66), (EFFICIENT, *(MATH,) * 5)),  # from 8.0 on, rows must be aligned to four elements
    (call(FP32, 64, **MASK, **DROPS), (EFFICIENT,) * 6),
    (call(FP32, 64, **GROUPED), (MATH,) * 6),  # Llama in fp32 or TF32
    (call(BF16, 64), (MATH, FLASH, FLASH, FLASH, CUDNN, FLASH)),
    (call(BF16, 64, **GROUPED), (MATH, FLASH, FLASH, FLASH, CUDNN, FLASH)),
    (call(BF16, 64, **GROUPED, **DROPS), (MATH, FLASH, FLASH, FLASH, FLASH, FLASH)),
    (call(BF16, 64, dropout=0.125), (MATH, FLASH, FLASH, FLASH, CUDNN, FLASH)),  # a multiple of 1/16
    (call(BF16, 64, **MASK), (MATH, EFFICIENT, EFFICIENT, EFFICIENT, CUDNN, EFFICIENT)),
    (call(BF16, 66), (MATH, *(FLASH,) * 5)),  # padded to 72
    (call(BF16, 66, **MASK), (MATH,) * 6),
    (call(BF16, 208), (MATH, FLASH, EFFICIENT, EFFICIENT, FLASH, EFFICIENT)),
    (call(BF16, 208, trains=False), (MATH, *(FLASH,) * 5)),
    (call(BF16, 208, **GROUPED), (MATH, FLASH, MATH, MATH, FLASH, MATH)),
    (call(BF16, 256, **GROUPED), (MATH, *(FLASH,) * 5)),  # Gemma
    (call(BF16, 256, **DROPS), (MATH, FLASH, EFFICIENT, EFFICIENT, FLASH, EFFICIENT)),
    (call(BF16, 320), (MATH, *(EFFICIENT,) * 5)),
    (call(BF16, 192, value=128), (MATH, *(EFFICIENT,) * 5)),  # DeepSeek
    (call(BF16, 64, square=False), (MATH, EFFICIENT, EFFICIENT, EFFICIENT, CUDNN, EFFICIENT)),
    (call(BF16, 64, plain=False), (MATH,) * 6),
    (call(FP16, 64), (EFFICIENT, FLASH, FLASH, FLASH, CUDNN, FLASH)),
    (call(FP16, 64, **GROUPED), (MATH, FLASH, FLASH, FLASH, CUDNN, FLASH)),
    (call(FP16, 66), (MATH, *(FLASH,) * 5)),
)


def differ(takes):
    return [one for one, names in EXPECTED if tuple(takes(one, card) for card in CARDS) != names]


def test_predicted_attention_kernels_equal_the_table_derived_by_hand(monkeypatch):
    monkeypatch.setattr(attention, "LATER_THAN_2_11", True)
    assert differ(kernel) == []
    assert kernel(call(BF16, 64), 13.0) == MATH and kernel(call(BF16, 64), 10.3) == CUDNN


def test_torch_2_11_is_predicted_to_use_cudnn_attention_for_more_calls(monkeypatch):
    """An H200 with torch 2.11 chose cuDNN for these calls."""
    monkeypatch.setattr(attention, "LATER_THAN_2_11", False)
    taken = [one for one, names in EXPECTED if kernel(one, 9.0) == CUDNN != names[CARDS.index(9.0)]]
    more = [one for one, _ in EXPECTED if one.dtype == BF16 and one.head in (192, 208, 256)]
    assert taken == [call(BF16, 64, **GROUPED, **DROPS), *more]


@pytest.mark.parametrize(
    "forgotten",
    [{"grouped": False}, {"mask": False}, {"dropout": 0.0}, {"dtype": BF16}],
    ids=["grouped", "mask", "dropout", "dtype"],
)
def test_omitting_one_rule_of_the_attention_choice_predicts_a_wrong_kernel(forgotten):
    assert differ(lambda one, capability: kernel(replace(one, **forgotten), capability))


# --- facts that the installed torch states without a card -------------------------------------------------------------


def test_torch_tries_attention_kernels_in_the_assumed_order():
    flash, efficient, math, cudnn = 1, 2, 0, 3  # at::SDPBackend
    assert torch._C._get_sdp_priority_order()[:4] == [flash, efficient, math, cudnn]
    (order,) = re.findall(r"sdp_priority_order = \{(.*?)\}", (HEADERS / "Context.h").read_text(), re.S)
    assert re.findall(r"SDPBackend::([a-z]+)", order)[:3] == ["flash", "efficient", "math"]


def test_compute_capabilities_of_efficient_attention_equal_torchs_header():
    text = (TRANSFORMERS / "cuda/mem_eff_attention/kernels/cutlassB.h").read_text()
    bounds = re.findall(r"is_same_v<DT, (?:cutlass::)?(\w+)> && (\d+) <= cc && cc (<=?) (\d+)", text)
    found = [(name, int(low), int(high) - (sign == "<")) for name, low, sign, high in bounds]  # 2.11: cc < 75
    dtypes = {"half_t": FP16, "bfloat16_t": BF16, "float": FP32}
    assert {name for name, _, _ in found} == {*dtypes}
    for (name, dtype), capability in product(
        dtypes.items(), (3.7, 5.0, 6.1, 7.0, 7.5, 8.0, 8.6, 9.0, 10.3, 12.0, 13.0)
    ):
        has = any(kind == name and low <= round(10 * capability) <= high for kind, low, high in found)
        assert attention._efficient(call(dtype, 64), capability) == has, (name, capability)


def test_efficient_attention_does_not_support_grouped_heads():
    """In torch before 2.15, a header does not mention grouped heads, and backward refuses their shapes. From 2.15 on,
    the kernel may support grouped heads, but `attention._efficient` assumes the math kernel, which needs more memory,
    until torch's choice has been observed on a card."""
    assert not attention._efficient(call(FP32, 64, **GROUPED), 8.0)
    if Version(torch.__version__) >= Version("2.15"):
        return
    assert "supports_mqa" not in (TRANSFORMERS / "sdp_utils_cpp.h").read_text()
    with torch_private.FakeTensorMode():
        q, k, v = made(FP32, 4, 2, 64, 16)
        out = torch_private.ATTENTION_EFFICIENT(q, k, v, None, True)[0]
        with pytest.raises(RuntimeError, match="invalid gradient"):
            out.sum().backward()


@pytest.mark.gpu
def test_present_card_uses_the_predicted_attention_kernel():
    capability, names = cards.here().capability, {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
    wrong = []
    heads = (64, 66, 80, 128, 208, 256, 320)
    for dtype, head, kv, mask, dropout in product((FP32, BF16, FP16), heads, (4, 2), (False, True), (0.0, 0.1)):
        if mask and kv == 2:
            continue  # transformers repeats heads under a mask
        q, k, v = made(dtype, 4, kv, 64, head, device="cuda")
        written = torch.ones(1, 1, 64, 64, dtype=torch.bool, device="cuda").tril() if mask else None
        takes = torch._fused_sdp_choice(q, k, v, written, dropout, not mask, enable_gqa=kv != 4)
        one = call(dtype, head, grouped=kv != 4, mask=mask, causal=not mask, dropout=dropout)
        wrong += [(one, names[int(takes)])] * (kernel(one, capability) != names[int(takes)])
    assert wrong == [], "\n".join(map(str, wrong))


# --- saved tensors and scratch of each kernel -------------------------------------------------------------------------


def made(dtype, heads, groups, tokens, size, batch=1, device=None):
    """Returns query, key and value as models make them: of shape (B, heads, T, D), stored as (B, T, heads, D)."""
    shapes = ((batch, tokens, n, size) for n in (heads, groups, groups))
    return [torch.empty(s, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for s in shapes]


def measured(capability, tensors, **more):
    """Returns two sizes in bytes: the tensors saved for backward, including the result; and the further memory that
    backward takes at its peak, not counting the gradient of the result. Args: tensors: arguments of `made`."""
    with torch_private.FakeTensorMode(), card.kernels(True, capability), StorageTracker({}) as tracker:
        q, k, v = made(*tensors)
        given = tracker.now
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape != q.shape, **more)
        saved, gradient = tracker.now - given, torch.empty_like(out)
        before, tracker.phase = tracker.now, "backward"
        out.backward(gradient)
    return saved, highest(tracker.timeline())["backward"].total - before


def flash_by_hand(batch=2, heads=4, groups=2, tokens=160, size=80):
    """Returns the two sizes of `measured` for flash attention. For scratch, the kernel rounds 160 tokens up to 256 and
    the head size of 80 up to 96."""
    out, numbers = 2 * batch * heads * tokens * size, 3 * 8
    gradients = 2 * batch * tokens * size * (heads + 2 * groups)
    scratch = 4 * batch * heads * 256 * 96 + 4 * batch * heads * 256 + 2 * out
    return out + 4 * batch * heads * tokens + numbers, gradients + scratch


def efficient_by_hand(batch=2, heads=4, tokens=72, size=24):
    """Returns the two sizes of `measured` for memory-efficient attention. Forward pads the row sums of softmax from 72
    to 96 tokens, and backward pads scratch to tiles of 64 x 64."""
    out, numbers = 4 * batch * heads * tokens * size, 2 * 8
    return out + 4 * batch * heads * 96 + numbers, 3 * out + 4 * batch * heads * tokens + 4 * batch * heads * 128 * 64


def math_by_hand(batch=2, heads=4, groups=2, tokens=96, size=8):
    """Returns the two sizes of `measured` for the math kernel. Forward saves the softmax, the scaled query, the scaled
    key and the value (both repeated for every head), and the result. Backward adds the gradients of softmax and scores;
    the gradient of the value takes the memory of the value."""
    scores, out = 4 * batch * heads * tokens**2, 4 * batch * heads * tokens * size
    return scores + 3 * out + out, 2 * scores


BY_HAND = {
    FLASH: ((BF16, 4, 2, 160, 80, 2), flash_by_hand),
    EFFICIENT: ((FP32, 4, 4, 72, 24, 2), efficient_by_hand),
    MATH: ((FP32, 4, 2, 96, 8, 2), math_by_hand),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_traced_memory_of_attention_forward_and_backward_equals_the_formulas_of_the_sources(name):
    tensors, by_hand = BY_HAND[name]
    assert measured(8.6, tensors) == by_hand()


@pytest.mark.wrong
@pytest.mark.parametrize("name", BY_HAND)
def test_memory_of_another_attention_kernel_differs_from_the_formulas(name, monkeypatch):
    other = {FLASH: EFFICIENT, EFFICIENT: FLASH, MATH: FLASH}[name]
    monkeypatch.setattr(attend, "kernel", lambda *_: other)
    tensors, by_hand = BY_HAND[name]
    if name == FLASH:  # the other kernel does not support grouped heads
        tensors, by_hand = tensors[:2] + tensors[1:2] + tensors[3:], partial(by_hand, groups=4)
    saved, taken = measured(8.6, tensors)
    assert saved != by_hand()[0] and taken != by_hand()[1]


@pytest.mark.parametrize("name", [FLASH, EFFICIENT])
def test_omitting_scratch_memory_predicts_too_little_for_attention_backward(name, monkeypatch):
    monkeypatch.setattr(attend, "_while_backward", lambda *_: None)
    tensors, by_hand = BY_HAND[name]
    saved, taken = measured(8.6, tensors)
    assert saved == by_hand()[0] and taken < by_hand()[1]


def test_traced_math_attention_with_dropout_saves_the_dropped_scores_and_a_byte_mask():
    tensors, _ = BY_HAND[MATH]
    scores = 4 * 2 * 4 * 96**2
    assert measured(8.6, tensors, dropout_p=0.1)[0] - measured(8.6, tensors)[0] == scores + scores // 4


def test_predicted_attention_scratch_of_known_models_equals_hand_computed_bytes():
    """The calls are flash attention of GPT-2 XL and Llama 3.1 8B, cuDNN attention of Llama 3.1 8B, and memory-efficient
    attention with 32 heads of five sizes."""
    mib = 2**20
    with torch_private.FakeTensorMode():
        gpt2, llama = made(BF16, 25, 25, 1024, 64, 4), made(BF16, 32, 8, 4096, 128)
        assert attend.flash_scratch(*gpt2[:2]) == [25 * mib, 25 * mib // 64]
        assert attend.flash_scratch(*llama[:2]) == [64 * mib, mib // 2, 32 * mib, 32 * mib]
        assert attend.cudnn_scratch(*llama[:2]) == [64 * mib, mib // 2, 32 * mib, 32 * mib]
        for size, wide, short in ((64, 32, 32), (80, 64, 76), (128, 64, 76), (192, 96, 120), (256, 128, 152)):
            for dtype, expected in ((FP32, wide), (BF16, short)):
                query = made(dtype, 32, 32, 4096, size)[0]
                assert attend.efficient_scratch(query) == [mib // 2, expected * mib], (size, dtype)


def test_traced_attention_mask_is_saved_in_the_query_dtype_and_padded():
    """Each layer saves its own copy of the mask, with rows padded from 20 to 24 tokens."""
    with torch_private.FakeTensorMode(), card.kernels(True, 8.6), StorageTracker({}) as tracker:
        q, k, v = made(BF16, 4, 4, 20, 16)
        mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
        given = tracker.now
        kept = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        saved = tracker.now - given
    assert kept.shape == q.shape
    assert saved == q.nbytes + 4 * 4 * 32 + 2 * 8 + 2 * 20 * 24  # result, sums of rows, random state, mask


def test_traced_attention_head_sizes_not_divisible_by_8_are_padded_to_a_multiple_of_8():
    saved, _ = measured(8.6, (BF16, 4, 2, 160, 66, 2))
    queries = 2 * 2 * 4 * 160 * 72  # bytes; keys and values have half of the heads each
    assert saved == queries + 2 * queries + 4 * 2 * 4 * 160 + 3 * 8


def test_traced_attention_computes_in_bf16_under_autocast_and_in_fp32_without():
    with torch_private.FakeTensorMode(), card.kernels(True, 8.6) as attention:
        q, k, v = made(FP32, 4, 2, 64, 16)
        with torch.autocast("cpu", dtype=BF16):
            assert F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).dtype == BF16
        assert attention.advice is None
        assert F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).dtype == FP32
        assert "float32" in attention.advice


@pytest.mark.parametrize("capability, dropout, mask", [(8.6, 0.1, False), (8.6, 0.0, True), (9.0, 0.0, False)])
def test_traced_attention_flops_equal_the_result_of_torchs_flop_counter(capability, dropout, mask):
    from torch.utils.flop_counter import FlopCounterMode

    flops = []

    class Counts(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            flops.append(getattr(work_of(func, args, kwargs, out), "flops", 0))
            return out

    with torch_private.FakeTensorMode(), card.kernels(True, capability), Counts():
        q, k, v = made(BF16, 4, 4, 64, 16)
        masks = torch.ones(64, 64, dtype=torch.bool) if mask else None
        with FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(q, k, v, masks, dropout, is_causal=not mask).sum().backward()
    assert sum(flops) == counter.get_total_flops() == 7 * 2 * 4 * 64 * 64 * 16


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability, mask", [(8.6, False), (8.6, True), (9.0, False)])
@pytest.mark.parametrize("contexts, times", [(selective.contexts, 1), (None, 2)])
def test_traced_attention_runs_once_with_selective_checkpointing_and_twice_with_full_recomputation(
    capability, mask, contexts, times
):
    """The trace runs on a CPU, but has the attention operators of a card. With dropout, these operators draw random
    numbers."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            heads = self.linear(x).unflatten(-1, (4, 16)).transpose(1, 2)
            written = torch.ones(32, 32, dtype=torch.bool) if mask else None
            out = F.scaled_dot_product_attention(heads, heads, heads, written, 0.125, is_causal=not mask)
            return F.gelu(self.linear(out.transpose(1, 2).flatten(2)))

    seen = []

    class See(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch_private.FakeTensorMode(), card.kernels(True, capability), See():
        block = Block()
        Alone(block, **({"contexts": contexts} if contexts else {}))
        block(torch.empty(2, 32, 64, requires_grad=True)).sum().backward()
    assert sum(func in torch_private.ATTENTION for func in seen) == times
    assert sum(func in torch_private.ATTENTION_BACKWARD for func in seen) == 1


def traced(config, *typed, capability=8.6, on_card=True):
    cfg = config(*typed).resolved()
    return trace(cfg, on_card, capability=capability)


LLAMA = [*MODELS["llama"], "seq_len=128", "batch_size=2", "optim=sgd", "loss=chunked"]


@pytest.mark.parametrize("checkpointing, layers", [("none", 2), ("offload", 1)])
def test_grouped_heads_in_fp32_are_predicted_to_keep_full_attention_scores_in_memory(config, checkpointing, layers):
    """In bf16, the kernel never stores the scores. In fp32, each layer saves its scores for backward; with
    gradient_checkpointing=offload, only the layer that backward has reached has scores in memory."""
    typed = [*LLAMA, f"gradient_checkpointing={checkpointing}"]
    wide, short = (traced(config, *typed, f"precision={precision}") for precision in ("tf32", "bf16"))
    assert wide.advice and short.advice is None
    heads = config(*LLAMA).model.architecture["num_attention_heads"]
    scores = 4 * 2 * heads * 128**2
    attention, sizes = layers * scores + 2 * scores, {}
    for name, one in (("wide", wide), ("short", short)):
        sizes[name] = max(point.total for point in one.phases.values())
    assert sizes["wide"] - sizes["short"] > 0.9 * attention
    assert "a mask" not in wide.advice and "share" in wide.advice


def test_eager_attention_traces_equally_on_two_capabilities_and_neither_it_nor_cpu_attention_gets_advice(config):
    eager = [traced(config, *LLAMA, "model.attention=eager", capability=c) for c in (7.5, 8.6)]
    assert eager[0].phases == eager[1].phases and eager[0].advice is None
    assert traced(config, *LLAMA, on_card=False).advice is None


def test_attention_advice_names_a_precision_that_has_a_fused_kernel_on_the_card():
    cures = {
        (FP32, 64, True, 8.6): "type precision=bf16.",
        (BF16, 64, False, 7.5): "type precision=16.",
        (FP16, 66, False, 7.5): "type precision=32.",
        (FP32, 64, True, 7.5): "no precision helps.",
    }
    for (dtype, head, grouped, capability), cure in cures.items():
        said = attention.advice(call(dtype, head, grouped=grouped), capability)
        assert said.endswith(cure) and said.count(". ") == 0, said
    assert attention.advice(call(BF16, 64, grouped=True), 8.6) is None


def test_attention_advice_is_printed_once_by_run_and_plan(config, monkeypatch, caplog):
    monkeypatch.setattr(cards, "here", lambda: Card(8 * GIB, "a card in mind", capability=8.6))
    said = {}
    for precision in ("tf32", "bf16"):
        caplog.clear()
        cfg = config(*LLAMA, "device=cuda", "plan=check", f"precision={precision}")
        cfg = cfg.resolved()
        with caplog.at_level("INFO"):
            prediction = at_start.checked(cfg, [])
        said[precision] = [line for line in caplog.messages if "math kernel" in line]
        plan = Plan(Typed(cfg, [], None), [Recipe((), prediction, 1.0)] * 2, Target(on_card=True), 1)
        for shown in (table.of_plan(plan, 9), table.of_prediction(prediction, Target(on_card=True))):
            assert [line for line in shown.splitlines() if "math kernel" in line] == said[precision]
    assert len(said["tf32"]) == 1 and "type precision=bf16" in said["tf32"][0] and said["bf16"] == []
