"""bitsandbytes' block-wise 8-bit Adam and Lion on a CPU, in one pass over memory.

There bitsandbytes steps in torch operators, 30 times as long as a fused step, and takes a neighbour of the nearest code
for many an element that is small in its block (0.50: for 12 % of a signed scale and 18 % of the other one, where
magnitudes are log-normal). This is its step as one C++ function, over its own state and its own dynamic scales. So
nothing else changes: the class, the checkpoint, and that a card goes on where a CPU stopped.

Codes are the nearest, as its kernels for cards take them, but for one: a second moment that is not zero never gets the
code of zero, for then the next small gradient would be divided by next to nothing. The error of 20 steps against AdamW
is a half of what bitsandbytes' is here, and a step stays bounded.
Block-wise dynamic state: Dettmers et al. 2022, arXiv 2110.02861.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.techniques.optim.compiled import DTYPES, address, library

SOURCE = Path(__file__).with_suffix(".cpp")
EXACTLY = "-ffp-contract=off"  # no fused multiply-add where torch's operators have none
RULES = ("adam", "lion")  # bitsandbytes' names; its other optimizers step as they do


def in_one_pass(optimizer: Optimizer) -> None:
    """Let an optimizer of bitsandbytes step so where parameters lie in host memory and there is a compiler."""
    if optimizer.optimizer_name not in RULES:
        return
    theirs = optimizer.update_step

    def update_step(group: dict, p: nn.Parameter, gindex: int, pindex: int) -> None:
        state, native = optimizer.state[p], _native(p)
        if native is None or state["state1"].dtype != torch.uint8:
            return theirs(group, p, gindex, pindex)
        p.data, p.grad = p.data.contiguous(), p.grad.contiguous()
        state["step"] += 1
        rule = _rule(optimizer.optimizer_name, optimizer.get_config(gindex, pindex, group), state["step"])
        moments = [state.get(f"{part}{i}") for i in (1, 2) for part in ("state", "absmax", "qmap")]
        native.blockwise(
            *(address(p), address(p.grad), DTYPES[p.dtype]),
            *map(address, moments),
            *(ctypes.c_long(p.numel()), (ctypes.c_float * len(rule))(*rule), torch.get_num_threads()),
        )

    optimizer.update_step = update_step
    optimizer.runs_as = lambda: "one C++ pass" if _native(optimizer.param_groups[0]["params"][0]) else "torch operators"


def _native(p: Tensor) -> ctypes.CDLL | None:
    return library(SOURCE, EXACTLY) if p.device.type == "cpu" else None


def _rule(name: str, config: dict, step: int) -> tuple[float, ...]:
    """In the order of the C++ `Rule`: computed in fp64 and rounded once, as torch does with a number."""
    (beta1, beta2, *_), lr = config["betas"], config["lr"]
    rate, widened = (lr / (1 - beta1**step), (1 - beta2**step) ** 0.5) if name == "adam" else (lr, 1.0)
    return beta1, 1 - beta1, beta2, 1 - beta2, config["eps"], rate, widened, 1 - lr * config["weight_decay"]
