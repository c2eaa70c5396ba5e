"""Tests 16-bit weights: bytes, updates in fp32, and updates that are smaller than the spacing of 16-bit numbers."""

import logging

import pytest
import torch
from torch import nn

import parity
from lowmem.memory.ledger import Ledger
from lowmem.memory.tracker import StorageTracker
from lowmem.model import loading as models
from lowmem.step import stochastic
from lowmem.step.gradients import norm, norm_of_all
from lowmem.step.stochastic import stochastically
from lowmem.techniques.precision import fp32_weights
from lowmem.techniques.precision.loss_scale import SMALLEST, LossScale
from lowmem.techniques.precision.weights_16bit import (
    BFloat16Stochastic,
    BFloat16Weights,
    Float16Weights,
    NarrowOptimizer,
)
from lowmem.training import build
from lowmem.training.module import CausalLM

pytestmark = pytest.mark.kernels
DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "bf16-sr": torch.bfloat16}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("model_type", ["llama-3.2-1b", "qwen3-0.6b"])
def test_weights_of_16_bit_precisions_have_16_bits_and_rope_frequencies_32_bits(config, precision, model_type):

    small = ("vocab_size=300", "hidden_size=64", "num_hidden_layers=2", "intermediate_size=64")
    architecture = [f"model.architecture.{line}" for line in small]
    cfg = config(f"model={model_type}", "model.pretrained=false", *architecture, f"precision={precision}")
    module = build.causal_lm(cfg, models.describe(cfg))
    assert {p.dtype for p in module.parameters()} == {DTYPES[precision]}
    frequencies = dict(module.named_buffers())
    assert frequencies and {b.dtype for b in frequencies.values()} == {torch.float32}


@pytest.mark.parametrize("precision", DTYPES)
def test_gradients_of_16_bit_weights_have_16_bits_and_optimizer_state_32_bits(config, precision, monkeypatch):
    seen = set()
    step_one = NarrowOptimizer.step_one

    def spying(self, group, p):
        seen.add(("gradient", p.grad.dtype))
        step_one(self, group, p)
        seen.update(("state", value.dtype) for value in self.state[p].values())

    monkeypatch.setattr(NarrowOptimizer, "step_one", spying)
    parity.run(config(*parity.overrides(f"precision={precision}"), base=()))
    assert seen == {("gradient", DTYPES[precision]), ("state", torch.float32)}


@pytest.mark.parametrize("precision", ["32", *DTYPES])
def test_weights_and_gradients_take_4_bytes_per_parameter_in_fp32_and_2_in_16_bits(config, precision, monkeypatch):
    """The bytes of the live tensors are added up after backward."""
    held = []
    usable = CausalLM._usable

    def counting(self, *done):
        parameters = list(self.model.parameters())
        held.append((sum(p.nbytes for p in parameters), sum(p.grad.nbytes for p in parameters)))
        return usable(self, *done)

    monkeypatch.setattr(CausalLM, "_usable", counting)
    _, weights = parity.run(config(*parity.overrides(f"precision={precision}"), base=()))
    each = 4 if precision == "32" else 2
    assert held[0] == (each * sum(p.numel() for p in weights.values()),) * 2


def one_weight(value, dtype):
    p = nn.Parameter(torch.full((4096,), value, dtype=dtype))
    return p, torch.optim.AdamW([p], lr=1e-5, eps=1e-8, weight_decay=0.0)


def step_narrow(precision, optimizer, scale=1.0, lr=1e-5):
    """Steps the optimizer's 16-bit weights once, as a run does."""
    narrow = precision.optimizer(optimizer, nn.Module(), norm_of_all)
    narrow.scale, narrow.param_groups[0]["lr"] = scale, lr
    narrow.step()
    optimizer.param_groups = narrow.param_groups


def test_fp16_step_with_a_zero_gradient_gives_no_nan():
    """Plain fp16 AdamW divides 0 by 0, because its eps is 0 in fp16."""
    for plain in (True, False):
        p, optimizer = one_weight(1.0, torch.float16)
        p.grad = torch.zeros_like(p)
        if plain:
            optimizer.step()
        else:
            step_narrow(Float16Weights(), optimizer)
        assert bool(p.isnan().any()) == plain


def test_gradients_below_the_fp16_range_update_weights_with_a_loss_scale():
    """A gradient of 1e-8 is stored as 1e-8 * 65536. The deliberately wrong variant unscales it in fp16, to 0."""
    for unscaled_first in (False, True):
        p, optimizer = one_weight(0.01, torch.float16)
        p.grad = torch.full_like(p, 1e-8 * 2**16)
        if unscaled_first:  # the deliberately wrong variant
            p.grad.div_(2**16)
        step_narrow(Float16Weights(), optimizer, 1.0 if unscaled_first else 2.0**16, lr=1e-3)
        moved = 0.01 - p.detach().float().mean().item()
        assert (abs(moved) < 1e-5) if unscaled_first else moved == pytest.approx(1e-3 / 2, rel=0.1)  # g / (g + eps)


@pytest.mark.parametrize(("precision", "moves"), [(BFloat16Stochastic, True), (BFloat16Weights, False)])
def test_updates_below_the_spacing_of_bf16_change_weights_only_with_stochastic_rounding(precision, moves):
    """20 steps of 1e-5 add up to 2e-4. The weights are 0.01, where bf16 numbers are 6e-5 apart."""
    torch.manual_seed(0)
    p, optimizer = one_weight(0.01, torch.bfloat16)
    start = p.detach().float().mean().item()
    for _ in range(20):
        p.grad = torch.ones_like(p)
        step_narrow(precision(), optimizer)
    moved = start - p.detach().float().mean().item()
    # the mean of 4096 sums of 20 roundings, each off by at most 6e-5: standard error 20**0.5 * 3e-5 / 64 = 2e-6
    assert (moved == pytest.approx(2e-4, abs=1e-5)) if moves else moved == 0.0


def test_stochastic_rounding_is_unbiased_and_exact_for_representable_numbers():
    torch.manual_seed(0)
    low, high = torch.tensor([1.0, -1.0]), torch.tensor([1.0078125, -1.0078125])  # neighbours in bf16
    for share in (0.0, 0.25, 0.9):
        wide = (low + share * (high - low))[:, None].expand(2, 20_000).contiguous()
        for precision in (BFloat16Stochastic(), BFloat16Weights()):
            p = nn.Parameter(torch.empty_like(wide, dtype=torch.bfloat16))
            precision.round(wide, p)
            narrow = p.detach()
            up = (narrow.float() == high[:, None]).float().mean(1)
            assert ((narrow.float() == high[:, None]) | (narrow.float() == low[:, None])).all()
            # four standard errors of 20 000 draws: 4 * (0.25 / 20000) ** 0.5 = 0.014
            right = bool(((up - share).abs() < 0.014).all())
            assert right == (isinstance(precision, BFloat16Stochastic) or share == 0.0)


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_stochastic_rounding_keeps_inf_and_nan(on_host):
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()  # a carry would change its sign
    wide = torch.tensor([float("inf"), -float("inf"), nan, 0.0])
    assert wide.view(torch.int32)[2] == 0x7FFFFFFF
    narrow = torch.empty(4, dtype=torch.bfloat16)
    stochastically(wide, narrow, on_host=on_host)
    assert narrow[0] == float("inf") and narrow[1] == -float("inf") and narrow[2].isnan() and narrow[3] == 0


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_stochastic_rounding_keeps_finite_numbers_finite(on_host, monkeypatch):
    largest, above = torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max
    wide = torch.tensor([above, -above] * 500)
    narrow = torch.empty(1000, dtype=torch.bfloat16)
    stochastically(wide, narrow, on_host=on_host)
    assert torch.equal(narrow.float(), wide.clamp(-largest, largest))
    monkeypatch.setattr(stochastic, "LARGEST", float("inf"))  # wrong: the carry turns nearly all numbers into inf
    stochastically(wide, narrow, on_host=on_host)
    assert narrow.isinf().sum() > 900


def at_once(wide):
    """Returns `wide`, stochastically rounded to bf16 at once: the reference for rounding in pieces."""
    noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)
    rounded = wide.view(torch.int32).add(noise).bitwise_and_(-1 << 16).view(torch.float32)
    return torch.where(wide.isfinite(), rounded, wide).bfloat16()


@pytest.mark.parametrize("shape", [(), (5,), (1000,), (50, 40), (3, 300), (7, 3, 20), (0, 3)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_stochastic_rounding_in_pieces_has_the_bits_of_rounding_at_once(shape, transposed, on_host, monkeypatch):
    monkeypatch.setattr(stochastic, "CHUNK", 128)
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wide = wide.mT.contiguous().mT if transposed and len(shape) > 1 else wide
    torch.manual_seed(1)
    right, after = at_once(wide), torch.get_rng_state()
    torch.manual_seed(1)
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    stochastically(wide, narrow, on_host=on_host)
    assert torch.equal(narrow, right) and torch.equal(torch.get_rng_state(), after)
    before, own = torch.get_rng_state(), torch.Generator().manual_seed(1)
    stochastically(wide, narrow, own, on_host)
    assert torch.equal(narrow, right) and torch.equal(torch.get_rng_state(), before)
    stochastically(wide, narrow, own, on_host)  # wrong: the generator continues with other numbers
    assert wide.numel() < 100 or not torch.equal(narrow, right)


def test_stochastic_rounding_needs_15_bytes_of_temporary_memory_per_element_of_a_piece(monkeypatch):
    """The 15 bytes, which tests/plan/test_by_hand.py also expects, are the noise, the sum of noise and weights, and
    temporary tensors of isfinite."""
    wide, narrow = torch.randn(256, 128), torch.empty(256, 128, dtype=torch.bfloat16)
    ledger = Ledger()
    ledger.own("weights", lambda: [wide, narrow])
    taken = {}
    for some in (1024, 256 * 128):
        monkeypatch.setattr(stochastic, "CHUNK", some)
        with StorageTracker(ledger.storages()) as tracker:
            stochastically(wide, narrow)
        taken[some] = max(point.total for point in tracker.timeline()) - wide.nbytes - narrow.nbytes
    assert all(15 * some == most for some, most in taken.items())


def test_norm_of_scaled_fp16_gradients_does_not_overflow():
    gradient = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert gradient.norm().isinf()
    assert norm([gradient, gradient]).item() == pytest.approx(60000.0 * 2000**0.5, rel=1e-3)
    assert norm([gradient]).isfinite() and not norm([gradient * 2]).isfinite()


def test_loss_scale_halves_to_its_minimum_and_then_reports_no_halving():
    scale, halved = LossScale(1.0, 10), []
    for _ in range(12):
        scale.update(False)
        halved.append(scale.halved)
    assert halved == [True] * 10 + [False] * 2 and scale.value == SMALLEST
    scale.update(True)
    assert not scale.halved


def test_tf32_on_a_device_without_tf32_is_reported_and_runs_in_fp32(caplog):
    before = torch.get_float32_matmul_precision()
    with caplog.at_level(logging.INFO, logger="lowmem"):
        fp32_weights.TensorFloat32("cpu").convert_module(torch.nn.Identity())
    assert "run in fp32" in caplog.text and torch.get_float32_matmul_precision() == before


def test_tf32_is_enabled_during_a_run_and_disabled_after_it(monkeypatch):
    """Creating the precision must not enable TF32, because a run may still be refused before its first step."""
    monkeypatch.setattr(fp32_weights, "has_tf32", lambda device: True)
    before = torch.get_float32_matmul_precision()
    precision = fp32_weights.TensorFloat32("cuda")
    assert torch.get_float32_matmul_precision() == before
    precision.convert_module(torch.nn.Identity())
    assert torch.get_float32_matmul_precision() == "high" != before
    precision.teardown()
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_tf32_on_a_card_rounds_matmul_inputs_and_is_disabled_after_teardown():
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()

    def off() -> float:
        return ((a @ b - exact).norm() / exact.norm()).item()

    before = off()
    precision = fp32_weights.TensorFloat32("cuda")
    precision.convert_module(torch.nn.Identity())
    within = off()
    precision.teardown()
    assert off() == before < 1e-6
    assert (1e-4 < within < 1e-3) == fp32_weights.has_tf32("cuda")  # TF32 rounds inputs by up to 2**-11 = 0.0005
