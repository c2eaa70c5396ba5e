"""Rounds fp32 weights to bf16 at random, so that the mean is right: updates below bf16's spacing are kept on average.

Source: Zamirai et al. 2020, arXiv 2010.06192.
"""

from functools import partial

import torch
from torch import Tensor

CHUNK = 1 << 22  # elements that are rounded at once
LARGEST = torch.finfo(torch.bfloat16).max


def stochastically(
    wide: Tensor, narrow: Tensor, generator: torch.Generator | None = None, on_host: bool = False
) -> None:
    """Rounds wide (fp32) into narrow (bf16), up or down with the probability that makes the mean right.

    bf16 is the upper half of fp32: a random number that is added to the lower half carries over with just that
    probability. Above the largest finite bf16 the only neighbour is inf, so finite numbers become the largest finite
    bf16. A few rows are rounded at a time, since it takes 15 bytes per element.

    Args:
        generator: of the random numbers, on wide's device; None: torch's own.
        on_host: values are inspected first, for which a card would have to wait. The bits are the same, in less than
            half of the time and memory.
    """
    draw = partial(torch.randint, 0, 1 << 16, dtype=torch.int32, device=wide.device, generator=generator)
    wide, narrow = torch.atleast_1d(wide, narrow)
    rows = max(1, CHUNK * len(wide) // max(1, wide.numel()))
    pieces = wide.split(rows)
    # a CPU draws the same numbers in pieces as at once; a card would not
    noises = draw(wide.shape).split(rows) if wide.is_cuda else (draw(piece.shape) for piece in pieces)
    for piece, noise, rounded in zip(pieces, noises, narrow.split(rows), strict=True):
        if on_host and piece.numel() and _has_neighbours(piece):
            rounded.view(torch.int16).copy_(noise.add_(piece.view(torch.int32)).bitwise_right_shift_(16))
        else:
            _add_and_cut(piece, noise, rounded)


def _has_neighbours(wide: Tensor) -> bool:
    """Returns True if every number lies between two finite bf16 numbers; nan does not."""
    low, high = torch.aminmax(wide)
    return bool(low >= -LARGEST) and bool(high <= LARGEST)


def _add_and_cut(wide: Tensor, noise: Tensor, narrow: Tensor) -> None:
    rounded = wide.view(torch.int32).add(noise).bitwise_and_(-1 << 16).view(torch.float32)  # exact in bf16
    narrow.copy_(torch.where(wide.isfinite(), rounded.clamp_(-LARGEST, LARGEST), wide))
