"""Unscales and clips stored gradients, and computes gradient norms.

Optimizers (such as `step/optimizer.py` and `offload/host_optimizer.py`) and strategies call these functions. A stored
gradient has 16 or 32 bits, and may still be multiplied by the loss scale.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Reading(NamedTuple):
    """The conversion of a stored gradient g to the gradient that the optimizer reads: clamp(g * unscale, -limit, limit)
    * clip.

    Args:
        unscale: 1 / loss scale.
        limit: largest magnitude of an element; inf: elements are not clipped.
        clip: factor that clips the global norm; 1: the norm is not clipped.
    """

    unscale: float = 1.0
    limit: float = math.inf
    clip: float = 1.0

    def __call__(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the converted gradient, in fp32, in a new tensor or in `out`. Multiplying by factors of 1 does not
        change any bit."""
        wide = gradient.to(torch.float32, copy=True) if out is None else out.copy_(gradient)
        wide = wide.mul_(self.unscale)
        if self.limit < math.inf:
            wide = wide.clamp_(-self.limit, self.limit)
        return wide.mul_(self.clip)


AS_STORED = Reading()


class Gradients(NamedTuple):
    """Properties of a window's gradients that are known before the optimizer step.

    Args:
        norm: (), global L2 norm of the unscaled gradients before clipping; None: there are no gradients, or the norm is
            not known, because the host has applied gradients during backward (early updates).
        finite: True if all gradients and their norms are finite, or if there are no gradients to check.
        loss_is_finite: True if the window's loss is finite. With early updates it is always True, since a callback has
            already checked the loss.
    """

    norm: Tensor | None
    finite: bool
    loss_is_finite: bool


def finite(tensor: Tensor) -> bool:
    """Returns True if all elements are finite, or if the tensor is empty. If an element is nan or inf, the minimum or
    the maximum is nan or inf, too. Computing minimum and maximum needs no copy of the tensor, and on a CPU is over ten
    times as fast as isfinite().all()."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))


def norm_of(gradient: Tensor) -> Tensor:
    """Returns the L2 norm of a gradient, in fp32 or a wider dtype, since the norm of a scaled fp16 gradient may
    overflow fp16."""
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


def norm_of_all(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Returns the L2 norm of the gradients of all parameters together. Every parameter must have a gradient."""
    return norm([p.grad for p in parameters])


def norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of all gradients together, in fp32 or a wider dtype."""
    if all(gradient.dtype.itemsize > 2 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)  # one kernel for many tensors on CUDA
    return torch.linalg.vector_norm(torch.stack([norm_of(gradient) for gradient in gradients]))
