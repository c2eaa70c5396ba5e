"""AdamW with block-wise 8-bit state: 2.03 bytes of state per parameter, and on a CPU one pass over memory per step.

The first moment m, and u, the square root of the second moment v, are stored in blocks of 256 elements. For each block,
the largest |m| and the largest u are stored in fp32. Each m and u is divided by this largest value, and stored as an
8-bit code on a square-root scale:

    m              round(127 sign(m) sqrt(|m| / max |m|))    int8
    u = sqrt(v)    round(255 sqrt(u / max u))                uint8

Encoding and decoding are plain arithmetic (no lookup in a table of 256 values), so a CPU can use vector instructions.
The step stores u as a code of at least 2 (`LEAST`), because a second moment that is rounded to zero would turn the next
small gradient into a huge update.

On a CPU, the step with 8-bit state is one C++ function, which is compiled once. The function reads a 16-bit or 32-bit
gradient, unscales and clips it, and updates state and weight. The weight is stored either in fp32, optionally with a
16-bit copy that the function also writes, or in two 16-bit halves (`step/fp32_halves.py`). Without a compiler, and on
CUDA, torch operators compute the step with the same formulas.

Block-wise state: Dettmers et al. 2022, arXiv 2110.02861. Square-root scales: github.com/databricks/flashoptim.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowmem.step.fp32_halves import joined, round_into, split_into
from lowmem.step.gradients import AS_STORED, Reading
from lowmem.step.one_weight import OnePass, Step
from lowmem.techniques.optim.compiled import DTYPES, address, library

SOURCE = Path(__file__).with_suffix(".cpp")
BLOCK = 256
# The smallest code of u: it stands for (2 / 255)^2 times the largest u of the block. The smallest nonzero m is (1 /
# 127)^2 times the largest m of the block, and the two factors are about equal. So m / u is about the same for the
# smallest m and u of a block as for the largest.
LEAST = 2
# A block whose largest magnitude is at most this gets the smallest codes (0 for m, LEAST for u), since 255^2 /
# magnitude might overflow.
NOTHING = 1e-30
SMALL = 4096  # parameters with fewer elements keep fp32 state, as in bitsandbytes
# Elements that torch operators process at once. Intermediate results fit in a CPU's cache, or take 0.2 GiB on a card.
CHUNK, CHUNK_ON_CARD = 1 << 19, 1 << 24


class HostAdamW8bit(Optimizer, OnePass):
    """AdamW with 8-bit state, for parameters on the host or on CUDA.

    Args:
        params: fp32 parameters, or parameter groups. A group may have the key `state_bits`: 8 (default) or 32.
            Parameters with fewer than 4096 elements always have fp32 state.
        lr, betas, eps: see torch.optim.AdamW.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        params,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        torch.optim.AdamW([torch.empty(0)], lr, tuple(betas), eps, weight_decay)  # checks the ranges, raises ValueError
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_from(Step(p.grad, group, p))
        return loss

    @torch.no_grad()
    def step_from(self, step: Step, rest: Tensor | None = None) -> None:
        """Updates a parameter. If torch operators compute the step (with 32-bit state, on CUDA, or without a compiler),
        a weight in two halves is first joined into a temporary fp32 tensor.

        Args: see `OnePass.step_from`.

        Raises:
            ValueError: the C++ function cannot update the weight, because the weight is not stored in contiguous
                tensors, or is neither in fp32 nor in two halves.
        """
        gradient, group, p, reading, rounded = step
        state, like = self.state[p], p if rest is None else rest
        if not state:
            state |= _zeros(like, group.get("state_bits", 8))
        state["step"] += 1
        rule = _rule(group, state["step"])
        if "m_top" in state and like.device.type == "cpu" and (native := library(SOURCE)) is not None:
            _native_step(native, step, rest, state, rule)
            return
        wide = p if rest is None else joined(rounded, rest)
        if "m_top" in state:
            _blocks_step(wide, gradient, state, rule, reading)
        else:
            _full_step(wide, reading(gradient), state, rule)
        if rest is not None:
            split_into(wide, rounded, rest)
        elif rounded is not None:
            round_into(wide, rounded)

    def runs_as(self) -> str:
        """Returns the implementation in use, for the run's summary."""
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        return "one C++ pass" if on_cpu and library(SOURCE) else "torch operators"


class Rule(NamedTuple):
    """The scalars of an update. The C++ struct `Rule` has these fields, followed by the fields of `Reading`."""

    rate: float  # lr / bias correction of the first moment
    keep: float  # 1 - lr * weight_decay
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    eps: float
    widened: float  # factor of the second moment's square root: 1 / sqrt(1 - beta2^step)


def _rule(group: dict, step: int) -> Rule:
    (beta1, beta2), lr = group["betas"], group["lr"]
    rate, widened = lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
    return Rule(rate, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], widened)


def _zeros(p: Tensor, bits: int) -> dict:
    """Returns the initial state of a parameter, on its device.

    Args:
        p: the parameter, or the lower half of a weight in two halves; only shape and device are read.
        bits: 8 or 32. A parameter with fewer than SMALL elements gets 32-bit state in both cases.
    """
    if bits == 32 or p.numel() < SMALL:
        return {"step": 0, **{key: torch.zeros_like(p, dtype=torch.float32) for key in ("m", "v")}}
    blocks = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
    return {
        "step": 0,
        "m": torch.zeros(p.numel(), dtype=torch.int8, device=p.device),
        "u": torch.zeros(p.numel(), dtype=torch.uint8, device=p.device),
        "m_top": blocks,
        "u_top": blocks.clone(),
    }


def _full_step(p: Tensor, g: Tensor, state: dict, rule: Rule) -> None:
    m, v = state["m"].lerp_(g, rule.rest1), state["v"].mul_(rule.beta2).addcmul_(g, g, value=rule.rest2)
    p.mul_(rule.keep).addcdiv_(m, v.sqrt().mul_(rule.widened).add_(rule.eps), value=-rule.rate)


def _native_step(native: ctypes.CDLL, step: Step, rest: Tensor | None, state: dict, rule: Rule) -> None:
    g, _, p, reading, rounded = step
    if (
        rounded is not None and rounded.dtype == torch.float32
    ):  # an adapter's weight; the C++ function can write only 16-bit copies
        _native_step(native, step._replace(narrow=None), rest, state, rule)
        rounded.copy_(p)
        return
    wide = p if rest is None else None
    tensors = [tensor for tensor in (wide, rounded, rest) if tensor is not None]
    if (wide is not None and p.dtype != torch.float32) or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("HostAdamW8bit needs contiguous fp32 parameters: call .float().contiguous() on them first.")
    g = g.contiguous()
    native.adamw8bit(
        *(address(wide), address(g), DTYPES[g.dtype]),
        *(address(state[key]) for key in ("m", "u", "m_top", "u_top")),
        *(address(rounded), DTYPES[rounded.dtype if rounded is not None else torch.bfloat16], address(rest)),
        *(ctypes.c_long(p.numel()), (ctypes.c_float * 11)(*rule, *reading), torch.get_num_threads()),
    )


def _blocks_step(p: Tensor, g: Tensor, state: dict, rule: Rule, reading: Reading) -> None:
    chunks = list(_chunks(p, g, state))
    scratch = torch.empty(3, max(chunk.p.numel() for chunk in chunks), device=p.device)
    for chunk in chunks:
        _chunk_step(chunk, scratch, rule, reading)


class Chunk(NamedTuple):
    """Tensors of a parameter's complete blocks, of shape (blocks, 256) unless noted, or of its incomplete last block,
    of shape (1, n)."""

    p: Tensor
    gradient: Tensor
    m: Tensor  # int8
    u: Tensor  # uint8
    m_top: Tensor  # (blocks,)
    u_top: Tensor  # (blocks,)


def _chunks(p: Tensor, g: Tensor, state: dict) -> Iterator[Chunk]:
    flat = (p.view(-1), g.reshape(-1), state["m"], state["u"])
    complete = p.numel() // BLOCK * BLOCK  # number of elements in complete blocks
    chunk = CHUNK if p.device.type == "cpu" else CHUNK_ON_CARD
    for start in range(0, complete, chunk):
        stop = min(start + chunk, complete)
        tops = slice(start // BLOCK, stop // BLOCK)
        yield Chunk(*(x[start:stop].view(-1, BLOCK) for x in flat), state["m_top"][tops], state["u_top"][tops])
    if complete < p.numel():
        yield Chunk(*(x[None, complete:] for x in flat), state["m_top"][-1:], state["u_top"][-1:])


def _chunk_step(chunk: Chunk, scratch: Tensor, rule: Rule, reading: Reading) -> None:
    """Updates a chunk with torch operators. Args: scratch: memory for intermediate results, (3, n) in fp32, where n is
    at least the number of elements of the chunk."""
    p, g, m8, u8, m_top, u_top = chunk
    m, u, x = (buffer[: p.numel()].view(p.shape) for buffer in scratch)
    g = g if g.dtype == torch.float32 and reading == AS_STORED else reading(g)
    m.copy_(m8)
    m.mul_(torch.abs(m, out=x)).mul_((m_top * (rule.beta1 / 127**2))[:, None]).add_(g, alpha=rule.rest1)
    u.copy_(u8).square_().square_().mul_((u_top / 255**2).square_().mul_(rule.beta2)[:, None])
    u.addcmul_(g, g, value=rule.rest2).sqrt_()
    p.mul_(rule.keep).addcdiv_(m, torch.mul(u, rule.widened, out=x).add_(rule.eps), value=-rule.rate)
    torch.amax(torch.abs(m, out=x), 1, out=m_top)
    torch.amax(u, 1, out=u_top)
    # divide by 1 instead of a magnitude of at most NOTHING
    m8.copy_(x.mul_((127**2 / m_top.where(m_top > NOTHING, 1.0))[:, None]).sqrt_().copysign_(m).round_())
    u8.copy_(u.mul_((255**2 / u_top.where(u_top > NOTHING, 1.0))[:, None]).sqrt_().round_().clamp_(min=LEAST))
