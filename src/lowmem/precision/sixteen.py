"""Weights, gradients and activations in 16 bits: half of their bytes. The update is computed in fp32.

One parameter at a time: it and its gradient are widened to fp32, the optimizer (any optimizer) steps it, and the result
is rounded back. The optimizer's state is that of fp32 weights, so an eps of 1e-8 does not underflow; what the step
needs beside it is one parameter in fp32. RoPE frequencies and other fp32 buffers stay as the model made them.

What it costs: a weight of 16 bits cannot move by less than its spacing. With bf16 that is 0.4 % of the weight: most
updates of a fine-tuning round to nothing. Stochastic rounding moves the weight by a whole spacing with the probability
that makes the mean right. Source: Zamirai et al. 2020, arXiv 2010.06192.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.gradients import norm
from lowmem.precision.plugin import FullPrecision, ScaledLoss, gradients, step_one, with_gradient


def to_nearest(wide: Tensor, narrow: Tensor) -> None:
    """narrow <- wide, rounded to the nearest 16-bit number."""
    narrow.copy_(wide)


def stochastically(wide: Tensor, narrow: Tensor) -> None:
    """narrow (bf16) <- wide (fp32), up or down with the probability of how near each neighbour is.

    bf16 is the upper half of fp32: a random number added to the lower half carries over just that often.
    """
    bits = wide.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = bits.add(noise).bitwise_and_(-1 << 16).view(torch.float32)  # the lower half is 0: exact in bf16
    narrow.copy_(torch.where(wide.isfinite(), rounded, wide))


class BFloat16Weights(FullPrecision):
    """Args: stochastic: round the updated weights up or down at random, right in the mean."""

    dtype = torch.bfloat16

    def __init__(self, stochastic: bool = False, device: str = "cpu") -> None:
        super().__init__(device)
        self.round: Callable[[Tensor, Tensor], None] = stochastically if stochastic else to_nearest

    def optimizer_step(self, optimizer: Optimizer, model, closure, **_) -> None:
        self._wrap_closure(model, optimizer, closure)  # the callbacks look at the gradients, and clipping
        for group, p in with_gradient(optimizer):
            self.update(optimizer, group, p)

    def update(self, optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
        narrow, gradient = p.data, p.grad
        # A parameter cannot have a gradient of another dtype: both are exchanged.
        p.grad = None
        p.data = narrow.float()
        p.grad = gradient.float().div_(self.gradient_scale)
        del gradient
        try:
            step_one(optimizer, group, p)
            self.round(p.data, narrow)
        finally:
            p.grad = None
            p.data = narrow


class Float16Weights(ScaledLoss, BFloat16Weights):
    """fp16 weights, with a loss scale. Gradients stay scaled until each is widened for its update: unscaled in fp16,
    those below 6e-8 would vanish.

    Args, Raises: those of `ScaledLoss`.
    """

    dtype = torch.float16

    def unscale(self, optimizer: Optimizer) -> bool:
        return self.loss_scale.update(bool(norm(gradients(optimizer)).isfinite()))
