"""Stochastic rounding of fp32 weights to bf16, so that updates smaller than the spacing of bf16 take effect on average.

With `precision=bf16-sr`, `stochastically` rounds weights on the device (`techniques/precision/weights_16bit.py`), or
with weights=streamed on the host (`offload/host_weight.py`). Source: Zamirai et al. 2020, arXiv 2010.06192.
"""

from functools import partial

import torch
from torch import Tensor

CHUNK = 1 << 22  # maximum number of elements that are rounded at once, unless a single row has more
LARGEST = torch.finfo(torch.bfloat16).max


def stochastically(
    wide: Tensor, narrow: Tensor, generator: torch.Generator | None = None, on_host: bool = False
) -> None:
    """Rounds `wide` (fp32) into `narrow` (bf16), up or down at random, with probabilities for which the expected value
    of the result is the exact number.

    bf16 is the upper half of fp32. A uniform 16-bit random number is added to the lower half, which is then cut off; a
    carry from the addition rounds the magnitude up. Finite numbers are clamped to the largest finite bf16 number, since
    rounding up could give inf; inf and nan do not change. Rounding needs 15 bytes of temporary memory per element, so
    pieces of at most CHUNK elements (or of a single longer row) are rounded one after another.

    Args:
        wide: fp32.
        narrow: bf16, equal shape; receives the result.
        generator: random number generator on the device of `wide`; None: torch's default generator.
        on_host: True: check the values of each piece first. If all values of a piece are in the range of bf16, a faster
            path gives the same bits as the general path in less than half of the time and memory. Use False on a card,
            where the host would have to wait for the values.
    """
    draw = partial(torch.randint, 0, 1 << 16, dtype=torch.int32, device=wide.device, generator=generator)
    wide, narrow = torch.atleast_1d(wide, narrow)
    rows = max(1, CHUNK * len(wide) // max(1, wide.numel()))
    pieces = wide.split(rows)
    # A CPU generator gives the same numbers whether they are drawn piece by piece or all at once. A CUDA generator does
    # not, so on a card the numbers of all pieces are drawn at once (4 bytes per element).
    noises = draw(wide.shape).split(rows) if wide.is_cuda else (draw(piece.shape) for piece in pieces)
    for piece, noise, rounded in zip(pieces, noises, narrow.split(rows), strict=True):
        if on_host and piece.numel() and _has_neighbours(piece):
            rounded.view(torch.int16).copy_(noise.add_(piece.view(torch.int32)).bitwise_right_shift_(16))
        else:
            _add_and_cut(piece, noise, rounded)


def _has_neighbours(wide: Tensor) -> bool:
    """Returns True if all numbers are within the finite range of bf16, and False if one of them is inf or nan."""
    low, high = torch.aminmax(wide)
    return bool(low >= -LARGEST) and bool(high <= LARGEST)


def _add_and_cut(wide: Tensor, noise: Tensor, narrow: Tensor) -> None:
    rounded = wide.view(torch.int32).add(noise).bitwise_and_(-1 << 16).view(torch.float32)  # exact in bf16
    narrow.copy_(torch.where(wide.isfinite(), rounded.clamp_(-LARGEST, LARGEST), wide))
