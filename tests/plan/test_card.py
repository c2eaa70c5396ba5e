"""Tests differences between CUDA and a CPU that a trace imitates; as_card.py names the sources."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowmem.memory.ledger import Ledger, optimizer_state
from lowmem.memory.tracker import StorageTracker
from lowmem.plan.tracing import as_card
from lowmem.plan.tracing.trace import trace
from lowmem.system.torch_private import FakeTensorMode
from lowmem.techniques.optim.build import MakeOptimizer

GPT2 = ["model.architecture.n_embd=64", "model.architecture.n_layer=3", "model.architecture.vocab_size=300"]
DROPS = [f"model.architecture.{name}_pdrop=0.1" for name in ("resid", "embd", "attn")]
SHAPE = 4, 8, 32, 16  # batch, heads, tokens, width of a head


def traced(cfg, on_card):
    return trace(cfg.resolved(), on_card).phases["backward"]


def kept(compute, *inputs):
    """Returns the bytes of tensors that are saved for backward, without the inputs."""
    ids = {t.untyped_storage()._cdata for t in inputs}
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in ids:
            saved[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compute(*inputs)
    return sum(saved.values())


def test_traced_dropout_saves_a_byte_mask_on_a_card_and_noise_on_a_cpu():
    x = torch.randn(SHAPE, requires_grad=True)
    assert kept(lambda x: F.dropout(x, 0.1), x) == x.nbytes
    with as_card.kernels(True):
        assert kept(lambda x: F.dropout(x, 0.1), x) == x.numel()


def test_traced_attention_redraws_its_dropout_mask_on_a_card_and_saves_scores_on_a_cpu():
    q, k, v = (torch.randn(SHAPE, requires_grad=True) for _ in range(3))
    batch, heads, tokens, _ = SHAPE

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)

    scores = batch * heads * tokens * tokens * 4
    assert kept(attend, q, k, v) > 2 * scores
    with FakeTensorMode() as fake, as_card.kernels(True):  # the result, a sum per row, and the random state
        assert kept(attend, *map(fake.from_tensor, (q, k, v))) == v.nbytes + batch * heads * tokens * 4 + 2 * 8


@pytest.mark.parametrize("name", [*as_card.IN_FP32, *as_card.SUMS_IN_FP32])
def test_imitated_cuda_autocast_runs_operators_in_fp32_that_cpu_autocast_does_not(name):
    """In torch's registry, CUDA's autocast has a kernel for the operator, and the CPU's autocast does not."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    full = f"aten::{name}"
    on_card = has(full, "AutocastCUDA")
    assert (on_card or name == "rms_norm") and not has(full, "AutocastCPU")  # torch 2.11 lacks the kernel of rms_norm
    with as_card.kernels(True):
        assert has(full, "AutocastCPU") == on_card
    assert not has(full, "AutocastCPU")


def test_imitated_cuda_autocast_returns_fp32_from_fp32_operators_and_bf16_from_matmuls():
    x = torch.rand(4, 8, dtype=torch.bfloat16, requires_grad=True)
    ways = (lambda x: x**3, torch.exp, lambda x: x.softmax(-1), torch.sum, lambda x: F.layer_norm(x, (8,)), torch.rsqrt)
    for way in ways:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert way(x).dtype == torch.bfloat16
            with as_card.kernels(True):
                assert way(x).dtype == torch.float32
                assert (way(x).reshape(-1, 1) @ x.reshape(1, -1)).dtype == torch.bfloat16
        with as_card.kernels(True):
            assert way(x).dtype == torch.bfloat16  # without autocast the result stays in bf16
    assert torch.equal(torch.autograd.grad((x.float() ** 3).sum(), x)[0], cubed_on_card(x))


def cubed_on_card(x):
    with as_card.kernels(True), torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.autograd.grad((x**3).sum(), x)[0]


@pytest.mark.parametrize("name", as_card.SUMS_IN_FP32)
def test_imitated_cuda_autocast_computes_sums_without_an_fp32_copy_of_their_input(monkeypatch, name):
    copied, widened = [], as_card._widened
    monkeypatch.setattr(as_card, "_widened", lambda value: copied.append(value) or widened(value))
    with as_card.kernels(True), torch.autocast("cpu", dtype=torch.bfloat16):
        op = getattr(torch.ops.aten, name.partition(".")[0])
        arguments = () if name == "sum" else (0,)
        op(torch.ones(4, 4, dtype=torch.bfloat16), *arguments)
    assert not copied


def test_traced_gelu_of_gpt2_under_autocast_saves_fp32_tensors_on_a_card(config):
    """GELU's tanh approximation computes a third power, which CUDA's autocast runs in fp32. So the power, the sum and
    the tanh are fp32: 4 x 64 elements each per token."""
    cfg = config(*GPT2, "precision=bf16", "batch_size=8", "seq_len=64")
    beyond = traced(cfg, True).bytes["activations"] - traced(cfg, False).bytes["activations"]
    inner = 8 * 64 * 4 * 64
    # per block: the input of the power, tanh, and 1 + tanh are saved in 4 bytes instead of 2, besides the 16-bit input
    assert 3 * 6 * inner <= beyond <= 3 * 10 * inner


def test_gpt2_with_dropout_is_predicted_to_need_less_memory_on_a_card_than_on_a_cpu(config):
    typed = [*GPT2, "batch_size=8", "seq_len=64"]
    plain = traced(config(*typed), False).total
    elements = 8 * 64 * 64  # of a hidden state; the embedding has one dropout, and each of three blocks has two
    assert traced(config(*typed, *DROPS), True).total - plain == pytest.approx(7 * elements * 1, rel=0.35)
    assert traced(config(*typed, *DROPS), False).total - plain > 3 * 8 * 2 * 64 * 64 * 4 + 7 * elements * 4


@pytest.mark.parametrize("precision", ["bf16", "bf16-master"])
def test_trace_for_a_card_is_equal_for_device_cpu_and_device_cuda(config, precision):
    """device=cuda selects autocast for CUDA. The traced tensors are not on CUDA, so this autocast would cast
    nothing."""
    phases = [
        trace(cfg.resolved(), True).phases
        for cfg in (config(*GPT2, f"precision={precision}", f"device={device}") for device in ("cpu", "cuda"))
    ]
    assert phases[0] == phases[1]


def test_imitated_foreach_optimizer_step_takes_temporary_memory_of_a_copy_of_all_weights():
    def beside(wrap):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        optimizer = wrap(MakeOptimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3)))(model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        ledger = Ledger()
        ledger.own("weights", lambda: [t for p in model.parameters() for t in (p, p.grad)])
        ledger.own("optimizer", lambda: optimizer_state(optimizer))
        with StorageTracker(ledger.storages()) as tracker:
            optimizer.step()
        return max(point.total for point in tracker.timeline()) - sum(ledger.bytes().values())

    every = 8 * 64 * 64 * 4
    assert beside(lambda make: make) < every <= beside(as_card.foreach)
