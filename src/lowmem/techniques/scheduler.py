"""Learning-rate schedules. Each multiplies `lr` by a function of the number of completed optimizer steps.

Skipped steps, such as steps with overflowed gradients, do not count. A yaml in conf/scheduler sets all arguments of a
schedule except the optimizer. If `warmup` is not None, the warm-up takes this fraction of `total_steps`, and
`warmup_steps` is ignored. A resumed run takes the number of completed steps from the checkpoint, and `lr` and all other
arguments from its own settings.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


class Schedule(LambdaLR):
    """Multiplies the `lr` of each parameter group by a factor that depends on the number of completed steps.

    Args:
        optimizer: the optimizer whose learning rates are set.
        factor: function of the number of completed steps.
        warm_up: number of warm-up steps, read by `report/hints.py`.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], warm_up: int) -> None:
        self.warm_up = warm_up
        super().__init__(optimizer, factor)

    def at(self, step: int) -> float:
        """Returns the learning rate of the first parameter group in a step. Args: step: index of the step, from 0."""
        return float(self.base_lrs[0]) * self.lr_lambdas[0](step)

    def load_state_dict(self, state_dict: dict) -> None:
        """Continues at the saved step, with this run's `lr`. torch's own method would restore the saved `lr`."""
        step = state_dict["last_epoch"]
        rates = [lr * factor(step) for lr, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        own = {"base_lrs": self.base_lrs, "warm_up": self.warm_up}
        super().load_state_dict(state_dict | own | {"_last_lr": rates})
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # torchao's optimizers
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def constant(optimizer: Optimizer, warmup_steps: int, total_steps: int = 0, warmup: float | None = None) -> Schedule:
    return _schedule(optimizer, _rising(warmup_steps, total_steps, warmup), lambda step: 1.0)


def linear(optimizer: Optimizer, warmup_steps: int, total_steps: int, warmup: float | None = None) -> Schedule:
    rising = _rising(warmup_steps, total_steps, warmup)
    return _schedule(optimizer, rising, lambda step: 1.0 - _progress(step, rising, total_steps))


def cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int, warmup: float | None = None) -> Schedule:
    rising = _rising(warmup_steps, total_steps, warmup)

    def factor(step: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * _progress(step, rising, total_steps)))

    return _schedule(optimizer, rising, factor)


def _rising(warmup_steps: int, total_steps: int, warmup: float | None) -> int:
    """Returns the number of warm-up steps."""
    return warmup_steps if warmup is None else round(warmup * total_steps)


def _schedule(optimizer: Optimizer, warmup_steps: int, after: Callable[[int], float]) -> Schedule:
    # the first step of a warm-up has the factor 1 / warmup_steps and not 0, because a step with lr = 0 has no effect
    def factor(step: int) -> float:
        return (step + 1) / warmup_steps if step < warmup_steps else after(step)

    return Schedule(optimizer, factor, warmup_steps)


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """Returns the progress of the decay: 0 at the end of the warm-up, 1 from `total_steps` on."""
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


def preview(schedule: Callable[[Optimizer], LRScheduler], lr: float) -> Schedule | None:
    """Returns the schedule of a run before its optimizer exists. Returns None if `schedule` creates an object that is
    not a `Schedule`. Args: schedule: creates the schedule of an optimizer; lr: the learning rate."""
    made = schedule(SGD([nn.Parameter(torch.zeros(()))], lr))
    return made if isinstance(made, Schedule) else None
