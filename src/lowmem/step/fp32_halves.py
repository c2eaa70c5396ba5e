"""Splits an fp32 number into two halves of 16 bits: the upper is the number in bf16, the lower what bf16 has lost of
it.

A weight in bf16 and its fp32 master nearly share their upper 16 bits. So a host that holds both can store the master in
two more bytes instead of four. Rounded half up (to the next bf16 if the lower 16 bits are 0x8000 or more; a tie goes
away from zero, since the sign is a bit of its own), the upper half is u = (bits + 0x8000) >> 16 and the rest r = bits -
(u << 16), which always fits a signed 16-bit integer: it is the lower half itself, read with a sign. Then bits = (u <<
16) + r, modulo 2^32, for each of the 2^32 patterns. Rounded to nearest even it would not be: 65,537 fp32 numbers share
one even bf16. fp16 has other exponents, and cannot be split exactly. It costs one more addition per weight and step.
Source: github.com/tascj/offload_adam.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements: 4 MiB of scratch, which stay in a CPU's cache
HALF = 1 << 15


def rounded(wide: Tensor, out: Tensor) -> None:
    """Rounds wide (fp32) half up into out (bf16), which has the same shape. If one of them is not contiguous, the
    scratch is as large as it.

    A NaN's bits are rounded like any others: the NaN that arithmetic makes stays NaN; one whose upper half is 0x7fff or
    0xffff may become 0, and one whose upper half is that of infinity may become infinite.
    """
    _round(_bits(wide, torch.float32), _bits(out, torch.bfloat16))


def narrow(wide: Tensor, out: Tensor) -> None:
    """Rounds wide (fp32) into out as masters are rounded: bf16 half up, split or not; fp16 to nearest even."""
    if out.dtype == torch.bfloat16:
        rounded(wide, out)
    else:
        out.copy_(wide)


def halves(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Splits wide (fp32). Returns: (upper, bf16; rest, int16), of its shape, contiguous. A NaN's upper half: see
    `rounded`."""
    upper, rest = (
        torch.empty_like(wide, dtype=dtype, memory_format=torch.contiguous_format)
        for dtype in (torch.bfloat16, torch.int16)
    )
    split_into(wide, upper, rest)
    return upper, rest


def split_into(wide: Tensor, upper: Tensor, rest: Tensor) -> None:
    """Writes the halves of wide (fp32) into upper (bf16) and rest (int16)."""
    rounded(wide, upper)
    rest.copy_(_bits(wide, torch.float32))  # an integer that is too long loses its upper bits


def joined(upper: Tensor, rest: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the fp32 numbers of two halves, to the bit. Args: out: fp32, of their shape."""
    out = torch.empty_like(upper, dtype=torch.float32) if out is None else out
    _join(_bits(upper, torch.bfloat16), rest, _bits(out, torch.float32))
    return out


# Trackers see one operator in each of these two: chunk by chunk, 70B parameters would be 200,000 operators.


@torch.library.custom_op("lowmem::round_half_up", mutates_args=("upper",))
def _round(wide: Tensor, upper: Tensor) -> None:
    for bits, high in _chunks(wide, upper):
        high.copy_(bits.add(HALF).bitwise_right_shift_(16))


@torch.library.custom_op("lowmem::join_halves", mutates_args=("wide",))
def _join(upper: Tensor, rest: Tensor, wide: Tensor) -> None:
    for high, low, bits in _chunks(upper, rest, wide):
        bits.copy_(high).bitwise_left_shift_(16).add_(low)


for _operator in (_round, _join):
    _operator.register_fake(lambda *_: None)  # on tensors without memory it does nothing


def _bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        raise TypeError(f"expected a {dtype} tensor, got {tensor.dtype}")
    return tensor.detach().view(torch.int32 if dtype == torch.float32 else torch.int16)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    if not all(tensor.is_contiguous() for tensor in tensors):
        return iter([tensors])
    return zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True)
