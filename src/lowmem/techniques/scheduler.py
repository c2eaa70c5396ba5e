"""Learning-rate schedules, per optimizer step: each multiplies `lr` by a function of the number of steps done.

A step that the loss scaler skips does not count. The optimizer is the only argument that a yaml leaves open. `warmup`
is a share of `total_steps`, and replaces `warmup_steps` if it is set.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def constant(optimizer: Optimizer, warmup_steps: int, total_steps: int = 0, warmup: float | None = None) -> LambdaLR:
    return _schedule(optimizer, _rising(warmup_steps, total_steps, warmup), lambda step: 1.0)


def linear(optimizer: Optimizer, warmup_steps: int, total_steps: int, warmup: float | None = None) -> LambdaLR:
    rising = _rising(warmup_steps, total_steps, warmup)
    return _schedule(optimizer, rising, lambda step: 1.0 - _progress(step, rising, total_steps))


def cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int, warmup: float | None = None) -> LambdaLR:
    rising = _rising(warmup_steps, total_steps, warmup)

    def factor(step: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * _progress(step, rising, total_steps)))

    return _schedule(optimizer, rising, factor)


def _rising(warmup_steps: int, total_steps: int, warmup: float | None) -> int:
    """Returns the number of warm-up steps."""
    return warmup_steps if warmup is None else round(warmup * total_steps)


def _schedule(optimizer: Optimizer, warmup_steps: int, after: Callable[[int], float]) -> LambdaLR:
    # The first step already moves (1 / warmup_steps): a step at lr 0 would be computed for nothing.
    def factor(step: int) -> float:
        return (step + 1) / warmup_steps if step < warmup_steps else after(step)

    return LambdaLR(optimizer, factor)


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """Returns the progress of the decay: 0 at the end of the warm-up, 1 from `total_steps` on."""
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
