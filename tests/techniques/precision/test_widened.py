"""Tests that a CPU without 16-bit units computes 16-bit matrix products in fp32 and rounds them once, in every pass."""

import csv
import platform

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parity
from conftest import ROOT
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import run_of
from lowmem.data.loader import MicroBatch
from lowmem.plan.tracing.operator_cost import work_of
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.techniques.precision import cpu_products as widening
from lowmem.techniques.precision.cpu_products import has_units, widened
from lowmem.techniques.precision.fp32_weights import FullPrecision
from lowmem.training.module import CausalLM
from networks import shaped
from tolerances import ROUNDED_ONCE

pytestmark = pytest.mark.kernels
SHORT = (torch.float16, torch.bfloat16)


def dtypes(arguments):
    return {leaf.dtype for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point()}


# --- rounded once -----------------------------------------------------------------------------------------------------


def draws(dtype, *shapes):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# name -> (function of operands in any dtype, shapes of the operands)
PRODUCTS = {
    "mm": (torch.mm, [(64, 256), (256, 64)]),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0), [(64,), (64, 256), (256, 64)]),
    "bmm": (torch.bmm, [(3, 64, 256), (3, 256, 64)]),
    "baddbmm": (torch.baddbmm, [(3, 64, 64), (3, 64, 256), (3, 256, 64)]),
    "attention": (attention, [(2, 4, 64, 32)] * 3),
    "linear": (F.linear, [(4, 16, 256), (64, 256), (64,)]),
    "mm into a tensor": (lambda a, b: torch.mm(a, b, out=torch.empty(64, 64, dtype=a.dtype)), [(64, 256), (256, 64)]),
}


def agreement(found, exact):
    """Returns the share of elements that equal the exact result after a single rounding to their dtype."""
    return (found == exact.to(found.dtype)).float().mean().item()


@pytest.mark.parametrize("no_gradients", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", PRODUCTS)
def test_16_bit_product_widened_to_fp32_is_the_exact_product_rounded_once(without_units, name, dtype, no_gradients):
    product, shapes = PRODUCTS[name]
    with no_gradients():
        operands = draws(dtype, *shapes)
        with widened(dtype, "cpu"):
            found = product(*operands)
        assert found.dtype == dtype
        assert agreement(found, product(*(x.double() for x in operands))) > ROUNDED_ONCE


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "attention"])
def test_native_16_bit_products_are_within_the_tolerance_of_products_widened_to_fp32(name, dtype):
    """Attention is left out: native kernels also round its probabilities, so only two thirds of its elements agree."""
    product, shapes = PRODUCTS[name]
    operands = draws(dtype, *shapes)
    assert agreement(product(*operands), product(*(x.double() for x in operands))) > ROUNDED_ONCE


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_16_bit_product_rounded_twice_exceeds_the_tolerance_of_products_widened_to_fp32(name, dtype):
    """The deliberately wrong variant rounds the product, and then rounds the sum of product and bias again."""
    product, shapes = PRODUCTS[name]
    bias, x, w = draws(dtype, *shapes)
    beta, alpha = (0.5, 2.0) if name == "addmm" else (1.0, 1.0)
    twice = ((x.float() @ w.float()).to(dtype).float() * alpha + bias.float() * beta).to(dtype)
    assert agreement(twice, product(*(t.double() for t in (bias, x, w)))) < ROUNDED_ONCE - 0.05


def gradient(model, batch, dtype):
    """Returns the gradients of all weights as one vector (n,), computed under autocast to `dtype`, or in fp32 if
    `dtype` is None."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=False):
        loss = losses.full(model, batch)
    (loss / batch.labels.numel() * 2.0**10).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / 2.0**10


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_gradient_of_products_widened_to_fp32_is_as_exact_as_the_native_16_bit_gradient(
    monkeypatch, model_type, dropout, dtype
):
    model = shaped(model_type, layers=2, dropout=dropout).train()
    batch = MicroBatch(torch.randint(0, 500, (2, 32)), torch.randint(0, 500, (2, 32)))
    exact, native = gradient(model, batch, None), gradient(model, batch, dtype)
    monkeypatch.setattr(widening, "has_units", lambda dtype: False)
    with widened(dtype, "cpu"):
        found = gradient(model, batch, dtype)
    error, theirs = ((g - exact).norm() / exact.norm() for g in (found, native))
    assert 0 < error < 1.1 * theirs, (error, theirs)  # two series of roundings differ by some per cent


# --- in every pass of a run -------------------------------------------------------------------------------------------


class Above(TorchDispatchMode):
    """Records (operator, list of the operand dtypes of each kernel that computed it) for each product with 16-bit
    operands."""

    def __init__(self, below):
        super().__init__()
        self.below, self.seen = below, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode, composite operators such as linear arrive here
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        self.below.clear()
        out = func(*args, **kwargs)
        work = work_of(func, args, kwargs, out)
        if work is not None and work.flops and dtypes((args, kwargs)) & {*SHORT}:
            self.seen.append((func.overloadpacket, list(self.below)))
        return out


@pytest.fixture
def below(monkeypatch):
    """Returns a list that grows by a set of operand dtypes whenever a replacement kernel calls torch's own kernel."""
    calls, native = [], widening._native

    def recorded(product):
        own = native(product)  # look up now: a later lookup would return the replacement

        def kernel(keys, *args, **kwargs):
            calls.append(dtypes((args, kwargs)))
            return own(keys, *args, **kwargs)

        return kernel

    monkeypatch.setattr(widening, "_native", recorded)
    return calls


DROPOUT = [f"model.architecture.{name}_pdrop=0.1" for name in ("resid", "embd", "attn")]
aten = torch.ops.aten
RUNS = {
    "gpt2": (["precision=16"], {aten.addmm, aten.mm, aten._scaled_dot_product_flash_attention_for_cpu_backward}),
    "gpt2, dropout in attention": (["precision=16", *DROPOUT], {aten.addmm, aten.mm}),
    "gpt2, eager attention": (["precision=16-true", "model.attention=eager"], {aten.addmm, aten.mm, aten.bmm}),
    "llama": ([*parity.MODEL, "precision=16-true"], {aten.mm, aten._scaled_dot_product_flash_attention_for_cpu}),
    "computed again": (["precision=16-master", "gradient_checkpointing=every_layer"], {aten.addmm, aten.mm}),
    "kept in part": (["precision=bf16", "gradient_checkpointing=selective", "loss=chunked", "loss.rows=7"], {aten.mm}),
    "bf16 weights": (["precision=bf16-sr"], {aten.addmm, aten.mm}),
}


def multiplied(fit, below, *overrides):
    with Above(below) as above:
        fit(*overrides, "sample_tokens=4", "max_steps=2")
    return above.seen


@pytest.mark.rows("gpt2", "llama")
@pytest.mark.parametrize("name", RUNS)
def test_run_on_a_cpu_without_16_bit_units_multiplies_only_fp32_numbers_in_every_pass(fit, without_units, below, name):
    """The passes are forward, backward, recomputation, evaluation and generation."""
    overrides, expected = RUNS[name]
    seen = multiplied(fit, below, *overrides)
    assert expected <= {operator for operator, _ in seen}
    assert all(found == [{torch.float32}] for _, found in seen)


@pytest.mark.wrong
def test_widening_only_the_forward_pass_leaves_16_bit_products_in_backward(fit, without_units, below, monkeypatch):
    backward = CausalLM.manual_backward

    def wrong(self, loss):
        self.trainer.precision_plugin.teardown()
        backward(self, loss)
        self.trainer.precision_plugin.convert_module(self)

    monkeypatch.setattr(CausalLM, "manual_backward", wrong)
    seen = multiplied(fit, below, "precision=16")
    slow = {operator for operator, found in seen if found != [{torch.float32}]}
    assert aten.mm in slow and aten._scaled_dot_product_flash_attention_for_cpu_backward in slow
    assert aten._scaled_dot_product_flash_attention_for_cpu not in slow


@pytest.mark.matrix
def test_compiled_blocks_on_a_cpu_without_16_bit_units_stay_compiled_and_multiply_in_fp32(fit, without_units, below):
    from torch._dynamo.utils import counters

    fit("precision=16", folder="eager")
    eager = len(below)
    below.clear()
    counters.clear()
    fit("precision=16", *parity.BUDGET)
    assert counters["stats"]["unique_graphs"] and counters["aot_autograd"]["ok"]
    assert len(below) >= eager and all(found == {torch.float32} for found in below)


@pytest.mark.parametrize("precision", ["16", "16-true"])
def test_run_with_products_widened_to_fp32_has_the_peak_memory_of_a_native_16_bit_run(fit, monkeypatch, precision):
    """The fp32 copies exist only inside the kernels, and tensors saved for backward have 16 bits."""
    held = []
    for units in (True, False):
        monkeypatch.setattr(widening, "has_units", lambda dtype, units=units: units or dtype == torch.float32)
        _, folder = fit(f"precision={precision}", "loss=chunked", folder=str(units))
        rows = list(csv.DictReader((folder / "memory.csv").open()))
        held.append([(row["step"], row["phase"], row["live_peak_bytes"]) for row in rows])
    phases = {phase for _, phase, _ in held[0]}
    assert held[0] == held[1] and phases == {"load", "forward", "backward", "step", "evaluation", "save"}


# --- only where it is needed, only during the run ---------------------------------------------------------------------


def replaced(below):
    """Returns True if a matrix product runs in a replaced kernel."""
    below.clear()
    torch.mm(torch.eye(2), torch.eye(2))
    return bool(below)


def test_widening_of_16_bit_products_ends_with_the_run_also_after_an_error(fit, without_units, below, monkeypatch):
    during = []
    step = CausalLM.training_step

    def failing(self, window, index):
        during.append(replaced(below))
        if len(during) == 3:
            raise KeyError("a run that fails")
        return step(self, window, index)

    monkeypatch.setattr(CausalLM, "training_step", failing)
    with pytest.raises(KeyError):
        fit("precision=16")
    assert during == [True] * 3 and not replaced(below)
    fit("precision=32", folder="next")
    assert during[3:] == [False] * 4


def test_missing_fp16_units_of_the_cpu_are_logged_once_and_not_for_bf16(command, without_units, tmp_path):
    said = command("precision=16", "plan=check")[1]
    assert said.count("This CPU has no fp16 matrix products") == 1
    assert "no fp16 matrix products" not in command("precision=bf16", f"hydra.run.dir={tmp_path}/second")[1]


@pytest.mark.parametrize("dtype", [torch.float32, *SHORT])
def test_native_16_bit_kernels_are_kept_on_cpus_with_16_bit_units_and_on_cards(monkeypatch, below, dtype):
    monkeypatch.setattr(widening, "has_units", lambda dtype: False)
    with widened(dtype, "cuda"):
        assert not replaced(below)
    monkeypatch.setattr(widening, "has_units", lambda dtype: True)
    with widened(dtype, "cpu"):
        assert not replaced(below)


@pytest.mark.parametrize("precision", sorted(file.stem for file in (ROOT / "conf" / "precision").glob("*.yaml")))
def test_every_precision_creates_a_plugin_with_its_dtype_and_the_typed_device(precision):
    cfg = run_of([f"precision={precision}", "device=meta"])
    plugin: FullPrecision = instantiate(cfg.precision)
    assert plugin.dtype == {"b": torch.bfloat16, "1": torch.float16}.get(precision[0], torch.float32)
    assert plugin.dtype == torch.float32 or plugin.device == "meta"


def test_queries_for_16_bit_cpu_units_exist_in_torch_and_missing_queries_disable_widening(monkeypatch):
    """The names of the queries are private. If torch drops them, nothing is widened, and a CPU without fp16 units takes
    40 times as long for fp16 products."""
    if platform.machine() == "x86_64":
        assert all(isinstance(getattr(torch.ops.mkldnn, f"_is_mkldnn_{n}_supported")(), bool) for n in ("fp16", "bf16"))
    monkeypatch.setattr(widening, "NAMES", {torch.float16: "no_such_dtype"})
    assert has_units(torch.float16) and has_units(torch.bfloat16)
