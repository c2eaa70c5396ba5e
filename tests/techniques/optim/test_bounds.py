"""Tests that no optimizer moves a weight further than its update rule allows, even if rows with rare gradients share a
block of optimizer state with rows whose gradients are ten million times as large."""

import math

import pytest
import torch
from torch import nn

from lowmem.config.declarations import techniques
from lowmem.offload.host_weight import HostWeight
from lowmem.step.gradients import norm_of_all
from lowmem.step.one_weight import Step
from lowmem.step.optimizer import WindowOptimizer
from lowmem.techniques.optim import adamw8bit, bitsandbytes_cpu, build
from lowmem.techniques.precision.weights_16bit import BFloat16Stochastic
from lowmem.training.build import optimizer

pytestmark = pytest.mark.kernels
SLOW = {"adamw4bit": pytest.mark.matrix}  # torchao's operators, not compiled
BITSANDBYTES = ("adam8bit", "paged_adamw8bit", "lion8bit")
STEPS, LR = 100, 1e-3
# Kinds of rows, by the steps in which a row has a gradient. A row has 16 numbers, so each block of 128 or 256 numbers
# of optimizer state has rows of every kind.
KINDS = ("always", "once", "now and then", "late", "never", "at random", "less and less", "one sign, then the other")
WIDTH, BLOCKS = 16, 32  # 4096 numbers: smaller parameters keep fp32 state
SHAPE = (BLOCKS * len(KINDS), WIDTH)
# (blocks,): gradients of a block's other rows, relative to the gradients of its first row
RATIOS = torch.logspace(-7, 0, BLOCKS)


def schedule(step, draw):
    """Returns the factors (kinds,) that scale the gradients of each kind of row in this step."""
    at_random = torch.randn((), generator=draw).item() * (torch.rand((), generator=draw).item() < 0.1)
    turned = 1 if step < STEPS // 2 else -1
    return torch.tensor(
        [1, step == 0, step % 20 == 0, step == STEPS // 2, 0, at_random, 0.5**step, turned], dtype=torch.float32
    )


def gradients():
    """Yields the gradient of each step, with shape SHAPE. Each element keeps its sign, so that its updates add up,
    except in rows of the kinds "at random" and "one sign, then the other"."""
    draw = torch.Generator().manual_seed(0)
    signs = torch.randn(SHAPE, generator=draw).sign()
    sizes = RATIOS[:, None].repeat(1, len(KINDS))
    sizes[:, 0] = 1
    for step in range(STEPS):
        yield (sizes * schedule(step, draw)).view(-1, 1) * signs


# --- bounds: (gradients of all steps) -> the largest movement of each weight, in units of LR --------------------------


def adams_longest_step(beta1=0.9, beta2=0.95):
    """Returns the largest |m| / sqrt(v) of Adam, with bias-corrected m and v, over all sequences of at most STEPS
    gradients.

    m = sum a_k g_k and v = sum b_k g_k^2 with a_k = (1 - beta1) beta1^k and b_k = (1 - beta2) beta2^k. By the
    Cauchy-Schwarz inequality |m| <= sqrt(sum a_k^2 / b_k) sqrt(v).
    """
    longest, total = 0.0, 0.0
    for k in range(STEPS):
        total += ((1 - beta1) * beta1**k) ** 2 / ((1 - beta2) * beta2**k)
        longest = max(longest, math.sqrt(total * (1 - beta2 ** (k + 1))) / (1 - beta1 ** (k + 1)))
    return longest


def adam(every):
    return torch.full(SHAPE, STEPS * adams_longest_step())


def adam_in_codes(every):
    """Rounding changes a moment by at most half of the distance between two codes, which at most doubles a step."""
    return 2 * adam(every)


def sign(every):
    return torch.full(SHAPE, float(STEPS))


def descent(every):
    return sum(g.abs() for g in every)


def adafactor(every):
    """The RMS of an update is at most `clip_threshold` (1). In the worst case only one weight moves. Adafactor has no
    first moment, so a weight whose gradient is zero does not move."""
    return math.sqrt(math.prod(SHAPE)) * sum((g != 0).float() for g in every)


def muon(every):
    """The update of a matrix is sqrt(its larger side) times a nearly orthogonal matrix. After five iterations its
    singular values are below 1.25, and so are its elements."""
    return torch.full(SHAPE, STEPS * 1.25 * math.sqrt(max(SHAPE)))


BOUNDS = {
    "adafactor": adafactor,
    "adam8bit": adam_in_codes,
    "adamw": adam,
    "adamw4bit": adam_in_codes,
    "adamw8bit": adam_in_codes,
    "lion8bit": sign,
    "muon": muon,  # for matrices; embeddings are updated with AdamW
    "paged_adamw32bit": adam,
    "paged_adamw8bit": adam_in_codes,
    "sgd": descent,
}
# Every optimizer whose state has fewer than 32 bits per element must be in BOUNDS. Optimizers with fp32 state need not
# be there, because elements of fp32 state do not share scales.
OPTIMIZERS = [name for name, technique in techniques("optim").items() if name in BOUNDS or technique.state_bits < 32]
EACH = [pytest.param(optim, marks=SLOW.get(optim, ())) for optim in OPTIMIZERS]


# --- the same gradients, stepped in each precision --------------------------------------------------------------------


def in_fp32(model, make):
    p, made = model.weight, make(model)
    for g in gradients():
        p.grad = g
        made.step()
    return p.detach()


def in_bf16_sr(model, make):
    """The precision widens one weight at a time to fp32, steps it, and rounds the result stochastically to bf16."""
    p = model.weight
    narrow = BFloat16Stochastic().optimizer(make(model), model, norm_of_all)
    p.data = p.data.bfloat16()
    for g in gradients():
        p.grad = g.bfloat16()
        narrow.step()
    return p.detach().float()


def in_bf16_master(model, make):
    """The precision updates fp32 masters in host memory from 16-bit gradients."""
    made = None

    def master(p):
        nonlocal made
        made = HostWeight("weight", p, torch.bfloat16)
        return made.wide

    stepped = WindowOptimizer(make(model, master))
    for g in gradients():
        made.step(stepped, Step(g.bfloat16(), stepped.param_groups[0], made.wide, narrow=made.narrow))
    return made.wide.detach()


PRECISIONS = {"32": in_fp32, "bf16-sr": in_bf16_sr, "bf16-master": in_bf16_master}
# Factors by which rounding may exceed the bounds. 32: sums of STEPS fp32 terms. bf16-master: a bf16 gradient has a
# relative error of up to 2^-8. bf16-sr: each of STEPS stochastic roundings moves a weight up or down by up to 2^-7 of
# its value, together by about sqrt(STEPS) times as much.
ROUNDING = {"32": 1 + 1e-5, "bf16-master": 1 + 2**-8, "bf16-sr": 1 + 2**-7 * math.sqrt(STEPS)}


def embedding():
    return nn.Embedding(*SHAPE)


def matrix():
    return nn.Linear(WIDTH, SHAPE[0], bias=False)


@pytest.fixture
def moved(config, monkeypatch):
    """Returns a function that takes an optimizer, a precision and a module, trains weights that are initially zero, and
    returns two results: the largest movement of a weight as a fraction of its bound, and the final values of the
    weights that never had a gradient."""
    # torchao compiles its step, which takes seconds; without compilation it runs the same operators
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def moves(optim, precision="32", module=embedding):
        torch.manual_seed(0)
        model = module()
        nn.init.zeros_(model.weight)
        weights = PRECISIONS[precision](model, optimizer(config(f"optim={optim}", f"lr={LR}", "optim.weight_decay=0")))
        bound = adam if optim == "muon" and module is embedding else BOUNDS[optim]
        limit = LR * bound(list(gradients())) * ROUNDING[precision]
        never = weights.view(BLOCKS, len(KINDS), WIDTH)[:, KINDS.index("never")]
        assert weights.abs().max() > LR  # it trains
        return (weights.abs() / limit.clamp(min=1e-30)).max().item(), never

    return moves


@pytest.fixture
def without_compiler(monkeypatch):
    """Returns a function that makes optimizers on a CPU step with torch operators instead of compiled code."""

    def remove():
        monkeypatch.setattr(bitsandbytes_cpu, "library", lambda *_: None)
        monkeypatch.setattr(adamw8bit, "library", lambda *_: None)

    return remove


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optim", EACH)
def test_no_weight_with_rare_gradients_moves_further_than_the_optimizer_rule_allows(moved, optim, precision):
    part, never = moved(optim, precision)
    assert part <= 1 and not never.any()


@pytest.mark.parametrize("optim", ["muon", "adafactor"])
def test_no_weight_of_a_matrix_moves_further_than_the_optimizer_rule_allows(moved, optim):
    part, never = moved(optim, module=matrix)
    assert part <= 1 and not never.any()


@pytest.mark.parametrize("optim", [*BITSANDBYTES, "adamw8bit"])
def test_no_weight_moves_further_than_the_optimizer_rule_allows_without_a_compiler(moved, without_compiler, optim):
    without_compiler()
    part, never = moved(optim)
    assert part <= 1 and not never.any()


@pytest.mark.wrong
@pytest.mark.parametrize("optim", ["adam8bit", "paged_adamw8bit"])
def test_adam8bit_with_second_moments_rounded_to_zero_exceeds_the_update_bound_by_a_factor_of_100(
    moved, without_compiler, monkeypatch, optim
):
    """The deliberately wrong variant is bitsandbytes' own code map, which rounds a tiny second moment to zero. The
    torch operators that step here compute what bitsandbytes' CUDA kernels compute."""
    without_compiler()
    monkeypatch.setattr(build, "_hold_no_second_moment_of_zero", lambda optimizer: None)
    assert moved(optim)[0] > 100


@pytest.mark.wrong
def test_adamw_with_float8_second_moments_exceeds_the_update_bound_by_a_factor_of_100(moved, monkeypatch):
    """The deliberately wrong variant is torchao's AdamWFp8. Its dtype, float8, rounds numbers below about 2e-6 times
    the largest number of a block to zero. Second moments are squares, so they become zero before first moments do."""
    import torchao.optim

    monkeypatch.setattr(torchao.optim, "AdamW4bit", torchao.optim.AdamWFp8)
    assert moved("adamw4bit")[0] > 100


@pytest.mark.wrong
@pytest.mark.parametrize("optim", ["adam8bit", "lion8bit"])
def test_cpu_operators_of_bitsandbytes_move_weights_that_have_no_gradient(moved, monkeypatch, optim):
    """The deliberately wrong variant is bitsandbytes' own CPU operators, which store zero as the code of another
    number."""
    monkeypatch.setattr(build, "in_one_pass", lambda optimizer: None)
    assert moved(optim)[1].any()
