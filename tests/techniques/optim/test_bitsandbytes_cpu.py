"""Tests lowmem's compiled CPU step for bitsandbytes' 8-bit optimizers: its bits, error, state and memory."""

from copy import deepcopy

import pytest
import torch
from test_adamw8bit import KINDS, gradients
from torch import nn

from lowmem.plan.tracing.stand_in import unseen
from lowmem.techniques.optim import bitsandbytes_cpu, build, compiled
from lowmem.techniques.optim.bitsandbytes_cpu import EXACTLY, SOURCE
from lowmem.training.build import optimizer

pytestmark = pytest.mark.kernels
BLOCK = 256
OPTIMIZERS = ("adam8bit", "paged_adamw8bit", "lion8bit")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_compiler = pytest.mark.skipif(compiled.library(SOURCE, EXACTLY) is None, reason="no C++ compiler")


@pytest.fixture
def as_bitsandbytes_does(monkeypatch):
    """Returns a function that makes all later optimizers step with bitsandbytes' own operators."""
    return lambda: monkeypatch.setattr(build, "in_one_pass", lambda optimizer: None)


@pytest.fixture
def without_compiler(monkeypatch):
    """Returns a function that makes lowmem behave as if no compiler were installed."""
    return lambda: monkeypatch.setattr(bitsandbytes_cpu, "library", lambda *_: None)


@pytest.fixture
def make(config):
    """Returns a function that takes the name of an optimizer, weights and overrides, and returns a parameter with these
    weights and its optimizer."""

    def made(optim, weights, *overrides):
        model = nn.Linear(*reversed(weights.shape), bias=False, dtype=weights.dtype)
        model.weight.data.copy_(weights)
        return model.weight, optimizer(config(f"optim={optim}", "lr=1e-3", *overrides))(model)

    return made


def widely_spread(dtype, steps=6, rows=73, columns=333):
    """Yields the gradient of each step. Magnitudes within a block differ by factors of up to about 1e12 (less in fp16),
    some rows are zero, and the last block is incomplete."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        noise = torch.randn(rows, columns, generator=draw)
        spread = 10 ** (2 * torch.randn(rows, columns, generator=draw).clamp(-4, 2))
        gradient = 1e-3 * noise * spread
        gradient[5:9] = 0
        yield gradient.to(dtype).clamp(-6e4, 6e4)


def written_out(name, p, state, g, step, config):
    """Makes a step with plain operators: updates `state`, and returns the new fp32 weights (n,). Only the choice of
    codes differs from the step of bitsandbytes. `_fma` emulates fused multiply-adds, because torch's operators fuse
    only on some processors."""
    (beta1, beta2), lr, keep = config["betas"], config["lr"], 1 - config["lr"] * config["weight_decay"]
    g, p = g.float().flatten(), p.float().flatten().mul(keep)
    m = _decoded(state, 1)
    if name == "lion":
        p = _fma((m * beta1 + g * (1 - beta1)).sign(), -lr, p)
        m = _fma(g, 1 - beta2, m * beta2)
    else:
        m = _fma(g, 1 - beta1, m * beta1)
        v = _fma((1 - beta2) * g, g, _decoded(state, 2) * beta2)
        root = v.double().sqrt().float()  # torch's fp32 square roots may be off by one bit
        p.addcdiv_(m, (root / (1 - beta2**step) ** 0.5).add_(config["eps"]), value=-lr / (1 - beta1**step))
        _encode(v, state, 2)
    _encode(m, state, 1)
    return p


def _fma(a, b, c):
    """Returns a * b + c of fp32 numbers, rounded once: the product is exact in fp64."""
    return (a.double() * torch.as_tensor(b, dtype=torch.float32).double() + c.double()).float()


def _decoded(state, i):
    tops = state[f"absmax{i}"].repeat_interleave(BLOCK)[: state[f"state{i}"].numel()]
    return state[f"qmap{i}"][state[f"state{i}"].flatten().long()] * tops


def _encode(x, state, i):
    scale = state[f"qmap{i}"]
    blocks = nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    top = blocks.abs().amax(1)
    y = (blocks / top.where(top > 0, 1.0)[:, None]).flatten()[: len(x)]
    above = torch.searchsorted(scale, y).clamp(max=255)
    below = (above - 1).clamp(min=0)
    codes = torch.where((y - scale[below]).abs() > (scale[above] - y).abs(), above, below)
    state[f"state{i}"].copy_(codes.view_as(state[f"state{i}"]))
    state[f"absmax{i}"].copy_(top)


def deviating(make, optim, dtype, decay):
    """Returns the names of the tensors that differ between the compiled step and `written_out` after some steps."""
    p, ours = make(optim, torch.randn(73, 333).mul(0.02).to(dtype), f"optim.weight_decay={decay}")
    (group,) = ours.param_groups
    plain, state = p.detach().clone(), None
    for step, g in enumerate(widely_spread(dtype), 1):
        p.grad = g.clone()
        if state is None:
            ours.init_state(group, p, 0, 0)
            state = deepcopy(ours.state[p])
        ours.step()
        plain = written_out(ours.optimizer_name, plain, state, g, step, ours.get_config(0, 0, group))
        plain = plain.to(dtype).view_as(p)
    found = {"weights": p} | ours.state[p]
    expected = {"weights": plain} | {key: state[key] for key in state if key.startswith(("state", "absmax"))}
    return {key for key in expected if not torch.equal(expected[key], found[key])}


@needs_compiler
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_compiled_8_bit_cpu_step_has_the_bits_of_a_reference_in_plain_operators(make, optim, dtype, decay):
    assert deviating(make, optim, dtype, decay) == set()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_8_bit_cpu_step_without_a_compiler_equals_the_compiled_step_within_rounding(
    make, without_compiler, optim, dtype
):
    def stepped():
        torch.manual_seed(0)
        p, ours = make(optim, torch.randn(73, 333).mul(0.02).to(dtype))
        p.grad = next(widely_spread(dtype))
        ours.step()
        return p.detach().float(), ours.state[p]

    one_pass, state = stepped()
    without_compiler()
    operators, same = stepped()
    # fused multiply-adds round once where operators round twice; a number halfway between two codes may get either code
    torch.testing.assert_close(operators, one_pass, rtol=2 * torch.finfo(dtype).eps, atol=1e-9)
    for key in (key for key in state if key.startswith(("state", "absmax"))):
        off = (state[key].float() - same[key].float()).abs()
        assert off.max() <= (1 if key.startswith("state") else 1e-6 * state[key].max()), key


@pytest.mark.wrong
@needs_compiler
def test_cpu_operators_of_bitsandbytes_differ_from_the_8_bit_reference_in_plain_operators(make, as_bitsandbytes_does):
    as_bitsandbytes_does()
    assert {"weights", "state1", "state2"} <= deviating(make, "adam8bit", torch.float32, 0.0)


def off(make, kind, *overrides, steps=20):
    """Returns the relative distance of the total update from the total update of torch's fp32 AdamW."""
    start = torch.zeros(256, 256)
    exact = nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    p, ours = make("adam8bit", start, *overrides)
    for g in gradients(kind, start.numel(), steps):
        exact.grad, p.grad = g.view_as(exact), g.clone().view_as(p)
        adamw.step(), ours.step()
    return ((p - exact).norm() / exact.norm()).item()


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_8_bit_cpu_step_error_is_no_larger_than_the_error_of_bitsandbytes(make, as_bitsandbytes_does, kind):
    ours = off(make, kind)
    as_bitsandbytes_does()
    assert ours <= max(off(make, kind), 1e-6)  # 1e-6: for a constant gradient, both errors are fp32 rounding


@needs_compiler
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_bitsandbytes_continues_from_the_state_of_the_compiled_8_bit_cpu_step(make, as_bitsandbytes_does, optim):
    """The state has the names and dtypes of bitsandbytes, and the next step of bitsandbytes is close to the next
    compiled step. A run that resumes on a card relies on this."""

    def stepped(p, ours, seed):
        p.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))
        ours.step()

    start = torch.randn(64, 256)
    (p, pass_), (q, theirs) = make(optim, start), make(optim, start)
    stepped(p, pass_, 1)
    kept = deepcopy(pass_.state_dict()), p.detach().clone()
    stepped(p, pass_, 2)
    as_bitsandbytes_does()
    q.data.copy_(kept[1])
    theirs.load_state_dict(kept[0])
    stepped(q, theirs, 2)
    assert (q - p).norm() < 0.1 * (p - kept[1]).norm()
    assert {key: getattr(v, "dtype", None) for key, v in theirs.state[q].items()} == {
        key: getattr(v, "dtype", None) for key, v in pass_.state[p].items()
    }


def test_zero_in_a_saved_8_bit_code_map_of_second_moments_is_replaced_when_state_is_restored(make):
    p, ours = make("adam8bit", torch.randn(64, 256))
    p.grad = torch.randn(64, 256)
    ours.step()
    saved = deepcopy(ours.state_dict())
    wrapped = [of_fsdp for of_fsdp in saved["state"][0].values() if isinstance(of_fsdp, dict)]
    for state in wrapped or saved["state"].values():
        state["qmap2"][0] = 0
    ours.load_state_dict(saved)
    assert ours.state[p]["qmap2"][0] > 0


@needs_compiler
def test_compiled_8_bit_cpu_step_has_equal_bits_with_one_and_two_threads(make):
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        p, ours = make("adam8bit", torch.randn(73, 333))
        for g in widely_spread(torch.float32):
            p.grad = g
            ours.step()
        torch.set_num_threads(before)
        found.append((p.detach(), ours.state[p]["state1"], ours.state[p]["state2"]))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@needs_compiler
def test_compiled_8_bit_cpu_step_needs_less_than_1_byte_of_temporary_memory_per_element(config, as_bitsandbytes_does):
    """The planner adds this temporary memory to the state. bitsandbytes' operators need more than 1 byte per
    element."""
    freed = [torch.ones(1 << 18) for _ in range(200)]  # 200 MB that malloc keeps, as after many tests
    with_adam8bit = optimizer(config("optim=adam8bit"))
    del freed
    ours = unseen(with_adam8bit)
    as_bitsandbytes_does()
    assert ours < 1 < unseen(with_adam8bit)


def test_summary_names_the_optimizer_and_its_8_bit_implementation(fit, without_compiler):
    name = "bitsandbytes.optim.adam.Adam8bit"
    ways = [f"{name} (one C++ pass)", f"{name} (torch operators)"]
    if compiled.library(SOURCE, EXACTLY) is not None:
        assert fit("optim=adam8bit", folder="first")[0]["optimizer"] == ways[0]
    without_compiler()
    assert fit("optim=adam8bit", folder="second")[0]["optimizer"] == ways[1]
    assert fit("optim=adamw", folder="third")[0]["optimizer"] == "torch.optim.adamw.AdamW"
