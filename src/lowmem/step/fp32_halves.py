"""Splits fp32 numbers into two 16-bit halves: the upper half is the number rounded to bf16, the lower half is the
remainder.

A bf16 weight and its fp32 master have nearly equal upper 16 bits. If the host stores the bf16 weight anyway, the master
needs only 2 additional bytes per parameter instead of 4. With precision=bf16-master, `offload/host_weight.py` stores
streamed weights and their masters in this form. The upper half is rounded to nearest: it increases by 1 if the lower 16
bits are 0x8000 or more. Since the sign is a separate bit, the increase makes the magnitude larger, so ties are rounded
away from zero.

    upper half    u = (bits + 0x8000) >> 16     a bf16 number
    remainder     r = bits - (u << 16)          always fits int16: the lower 16 bits, read as a signed integer
    joined        bits = (u << 16) + r          modulo 2^32, exact for all 2^32 bit patterns

Rounding to nearest even could not be inverted: 65,537 fp32 numbers round to each even bf16 number, and a 16-bit
remainder distinguishes only 65,536. An fp16 weight cannot be the upper half of its master, because fp16 has fewer
exponent bits than fp32. Joining the halves costs a shift and an addition per element. Source:
github.com/tascj/offload_adam.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements converted at once: the 4 MiB of temporary memory fit in a CPU's cache
HALF = 1 << 15


def rounded(wide: Tensor, out: Tensor) -> None:
    """Rounds `wide` (fp32) to nearest, ties away from zero, into `out` (bf16, equal shape). If one of the two tensors
    is not contiguous, rounding needs a temporary tensor of 4 bytes per element.

    The bits of a NaN are rounded like the bits of a number. The NaN that a CPU produces in arithmetic (0x7fc00000 or
    0xffc00000) stays NaN. But a NaN whose upper half is 0x7fff or 0xffff may become zero, for example the NaN that a
    CUDA device produces (0x7fffffff). A NaN whose upper half equals the upper half of infinity may become infinite.
    """
    _round(_bits(wide, torch.float32), _bits(out, torch.bfloat16))


def round_into(wide: Tensor, out: Tensor) -> None:
    """Rounds an fp32 master `wide` into its weight `out`. A bf16 weight is rounded by `rounded`, even if the master is
    not stored in two halves. An fp16 weight is rounded to nearest, ties to even. An fp32 weight is copied from the
    master."""
    if out.dtype == torch.bfloat16:
        rounded(wide, out)
    else:
        out.copy_(wide)


def halves(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Splits `wide` (fp32). Returns: (upper half in bf16, lower half in int16), both contiguous and in the shape of
    `wide`. For NaNs, see `rounded`."""
    upper, rest = (
        torch.empty_like(wide, dtype=dtype, memory_format=torch.contiguous_format)
        for dtype in (torch.bfloat16, torch.int16)
    )
    split_into(wide, upper, rest)
    return upper, rest


def split_into(wide: Tensor, upper: Tensor, rest: Tensor) -> None:
    """Writes the halves of `wide` (fp32) into `upper` (bf16) and `rest` (int16)."""
    rounded(wide, upper)
    rest.copy_(_bits(wide, torch.float32))  # the conversion to int16 drops the upper 16 bits


def joined(upper: Tensor, rest: Tensor, out: Tensor | None = None) -> Tensor:
    """Joins an upper half (bf16) and a lower half (int16), and returns the fp32 numbers that were split, bit for bit.
    Args: out: fp32 tensor for the result; None: a new tensor."""
    out = torch.empty_like(upper, dtype=torch.float32) if out is None else out
    _join(_bits(upper, torch.bfloat16), rest, _bits(out, torch.float32))
    return out


# `_round` and `_join` are custom operators, so that memory trackers see one operator per tensor. Otherwise trackers
# would see up to three torch operators per chunk, and 70B parameters are 67,000 chunks.


@torch.library.custom_op("lowmem::round_half_up", mutates_args=("upper",))
def _round(wide: Tensor, upper: Tensor) -> None:
    for bits, high in _chunks(wide, upper):
        high.copy_(bits.add(HALF).bitwise_right_shift_(16))


@torch.library.custom_op("lowmem::join_halves", mutates_args=("wide",))
def _join(upper: Tensor, rest: Tensor, wide: Tensor) -> None:
    for high, low, bits in _chunks(upper, rest, wide):
        bits.copy_(high).bitwise_left_shift_(16).add_(low)


for _operator in (_round, _join):
    _operator.register_fake(lambda *_: None)  # a no-op on fake tensors


def _bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        raise TypeError(f"expected a {dtype} tensor, got {tensor.dtype}")
    return tensor.detach().view(torch.int32 if dtype == torch.float32 else torch.int16)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    if not all(tensor.is_contiguous() for tensor in tensors):
        return iter([tensors])
    return zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True)
