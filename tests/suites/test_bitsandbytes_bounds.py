"""Tests 8-bit optimizers with the bounds that bitsandbytes sets for its own optimizers.

The numbers come from `test_optimizer8bit` in tests/test_optim.py of github.com/bitsandbytes-foundation/bitsandbytes. In
each of 50 steps an optimizer and its fp32 formula start from equal weights and from equal decoded states. So these
bounds find a wrong update, a wrong first moment and a wrong rounding of weights, but not a wrong second moment, because
second moments of these gradients are below STATE's `atol`. The tests in tests/techniques/optim bound errors that
accumulate over steps.
"""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from lowmem.step.one_weight import Step
from lowmem.techniques.optim import adamw8bit, bitsandbytes_cpu
from lowmem.training.build import optimizer

pytestmark = [pytest.mark.matrix, pytest.mark.kernels]
STEPS, BLOCK = 50, 256
WEIGHTS, GRADIENTS = 0.1, 0.01  # standard deviations
SHAPE = (1024, 32)
OPTIMIZERS = ("adam8bit", "paged_adamw8bit", "adamw8bit", "lion8bit")


class Bounds(NamedTuple):
    error: float  # mean absolute error of the weights
    relative: float  # mean relative error of the weights
    atol: float  # for every weight
    rtol: float


BOUNDS = {
    torch.float32: Bounds(6e-5, 6e-4, 1e-5, 1e-3),
    torch.float16: Bounds(6e-5, 6e-4, 1e-5, 1e-3),
    torch.bfloat16: Bounds(1.7e-4, 1.6e-3, 1e-4, 1e-2),
}
STATE = {"atol": 3e-3, "rtol": 1e-3}
STATES_OFF = 20  # fewer than this many elements of a moment may exceed STATE's tolerances
FLIPPED = 15  # at most this many weights of Lion may exceed atol and rtol: the sign of a number near zero may flip


def adam(p, g, state, step):
    """Returns the new weights and state of Adam with bitsandbytes' default arguments."""
    m, v = state[0].lerp(g, 0.1), state[1] * 0.999 + 0.001 * g * g
    return p - 1e-3 / (1 - 0.9**step) * m / ((v / (1 - 0.999**step)).sqrt() + 1e-8), [m, v]


def lion(p, g, state, step):
    """Returns the new weights and state of Lion with bitsandbytes' default arguments."""
    return p - 1e-4 * state[0].lerp(g, 0.1).sign(), [state[0].lerp(g, 0.01)]


def decoded(state):
    """Returns the moments of an 8-bit state in fp32."""
    if "m_top" in state:
        m, u = (state[key].float().unflatten(0, (-1, BLOCK)) for key in ("m", "u"))
        m = m * m.abs() / 127**2 * state["m_top"][:, None]
        u = u.square() / 255**2 * state["u_top"][:, None]
        return [m.view(SHAPE), u.square().view(SHAPE)]
    moments = [(state[f"state{i}"], state[f"qmap{i}"], state[f"absmax{i}"]) for i in (1, 2) if f"state{i}" in state]
    return [(scale[codes.long()].view(-1, BLOCK) * top[:, None]).view(SHAPE) for codes, scale, top in moments]


class Deviations(NamedTuple):
    """The largest deviations in any of the steps."""

    error: float
    relative: float
    weights_off: int
    states_off: int


@pytest.fixture
def deviations(config):
    """Returns a function that takes an optimizer and a dtype, and returns their `Deviations`."""

    def measure(optim, dtype=torch.float32):
        arguments = ("lr=1e-4", "betas=[0.9,0.99]") if optim == "lion8bit" else ("lr=1e-3", "betas=[0.9,0.999]")
        make = optimizer(config(f"optim={optim}", "optim.weight_decay=0", *(f"optim.{one}" for one in arguments)))
        model = nn.Linear(*reversed(SHAPE), bias=False, dtype=dtype)
        nn.init.normal_(model.weight, std=WEIGHTS)
        on_host = optim == "adamw8bit"  # reads 16-bit gradients, updates fp32 masters and writes 16-bit weights
        narrow = model.weight.detach().clone()
        model = model.float() if on_host else model
        ours, p = make(model), model.weight
        rule, bounds, found = lion if optim == "lion8bit" else adam, BOUNDS[dtype], []
        moments = [torch.zeros(SHAPE) for _ in range(1 if rule is lion else 2)]
        for step in range(1, STEPS + 1):
            g = torch.randn(SHAPE).mul(GRADIENTS).to(dtype)
            right, right_moments = rule(p.detach().float(), g.float(), moments, step)
            if on_host:
                ours.step_from(Step(g, ours.param_groups[0], p, narrow=narrow if dtype != torch.float32 else None))
                p.data.copy_(narrow if dtype != torch.float32 else p.data)
            else:
                p.grad = g
                ours.step()
            moments = decoded(ours.state[p])
            off = [~one.isclose(two, **STATE) for one, two in zip(moments, right_moments, strict=True)]
            weights_off = ~p.detach().float().isclose(right, atol=bounds.atol, rtol=bounds.rtol)
            error = (p.detach().float() - right).abs()
            relative = (error / (right.abs() + 1e-9)).mean().item()
            found.append((error.mean().item(), relative, weights_off.sum().item(), max(o.sum().item() for o in off)))
        return Deviations(*map(max, zip(*found, strict=True)))

    return measure


def beyond(found, optim, dtype=torch.float32):
    """Returns the names of the deviations that are beyond their bounds."""
    flipped = FLIPPED if optim == "lion8bit" else 0
    allowed = Deviations(BOUNDS[dtype].error, BOUNDS[dtype].relative, flipped, STATES_OFF - 1)
    return {name for name, one, bound in zip(found._fields, found, allowed, strict=True) if one > bound}


@pytest.mark.parametrize("way", ["one pass", "torch operators"])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_8_bit_optimizers_stay_within_the_bounds_of_bitsandbytes_tests(deviations, request, optim, dtype, way):
    if way == "torch operators":
        request.getfixturevalue("without_compiler")
    found = deviations(optim, dtype)
    assert beyond(found, optim, dtype) == set(), found


@pytest.mark.wrong
@pytest.mark.parametrize("optim", ["adam8bit", "adamw8bit"])
def test_8_bit_step_without_bias_correction_exceeds_the_bounds_of_bitsandbytes_tests(deviations, monkeypatch, optim):
    for module in (adamw8bit, bitsandbytes_cpu):
        monkeypatch.setattr(module, "_rule", lambda *of, rule=module._rule: rule(*of[:-1], 10**6))
    assert {"error", "relative", "weights_off"} <= beyond(deviations(optim), optim)


@pytest.mark.wrong
@pytest.mark.parametrize("optim", ["adam8bit", "lion8bit"])
def test_8_bit_first_moment_stored_too_large_exceeds_the_bounds_of_bitsandbytes_tests(
    deviations, monkeypatch, without_compiler, optim
):
    write = bitsandbytes_cpu._write
    monkeypatch.setattr(bitsandbytes_cpu, "_write", lambda values, *of: write(values * 1.5, *of))
    assert "states_off" in beyond(deviations(optim), optim)
