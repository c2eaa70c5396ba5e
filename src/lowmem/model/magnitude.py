"""Measures how large a model's numbers are: two computations are compared relative to that, and a dtype of a smaller
range than theirs, which is fp16, must hold them."""

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lowmem.system.errors import Refused

log = logging.getLogger(__name__)

WIDER = "Type precision=bf16, bf16-true or bf16-master, which have the range of fp32."
ROUNDINGS = 8  # in another order a sum is off by one or two roundings of the largest number, another function by more
OTHER_KERNELS = 1e-4  # kernels for other shapes differ by less, another function by a hundred times as much
MANY_ZEROS = 1e-3  # share of the weights; of normally distributed weights, some millionths become zero in fp16


def largest_magnitude(numbers: Tensor) -> float:
    """Returns the largest absolute value of what a model computes before its first step.

    Raises:
        Refused: a number is inf or nan, so that two computations cannot be compared, and no loss would be finite.
    """
    largest = numbers.abs().max().item()
    if not math.isfinite(largest):
        raise Refused(f"The model computes inf or nan before its first step: {_why(numbers.dtype)}")
    return largest


def same(
    one: Tensor, other: Tensor, largest: float, dtypes: Iterable[torch.dtype], least: float = OTHER_KERNELS
) -> bool:
    """Returns whether two computations of the same numbers agree up to rounding. What overflows must do so in both.

    The tolerance is `ROUNDINGS` roundings of the largest number in the coarsest dtype, but not less than `least`, which
    is more than 8 roundings of fp32 and less than 8 of any 16-bit dtype.

    Args:
        largest: the largest absolute value: the rounding of a sum is relative to its largest terms.
        dtypes: those that the computations round to.
        least: the smallest tolerance, relative to `largest`; 0 if both computations use the same kernels.
    """
    tolerance = max(least, ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes)) * largest
    return torch.allclose(one.float(), other.float(), rtol=0.0, atol=tolerance, equal_nan=True)


def check_holds(model: nn.Module, dtype: torch.dtype, advice: str) -> None:
    """Checks that a dtype holds all weights of a model that was just loaded.

    Raises:
        Refused: a number exceeds the dtype's largest one, or became inf when it was read.
    """
    for name, p in model.named_parameters():
        largest = _largest(p.data)
        if largest > torch.finfo(dtype).max:
            raise Refused(f"{_exceeds(name, largest, dtype)} {advice}")


class Rounding:
    """Rounds tensors to a dtype, one at a time, and counts the numbers that become 0."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.zeros, self.all = dtype, 0, 0

    def __call__(self, name: str, numbers: Tensor, device: str | None = None) -> Tensor:
        """Returns the rounded tensor. Args: device: where to; None: where it is.

        Raises:
            OverflowError: a finite number would become inf.
        """
        rounded = numbers.to(device or numbers.device, self.dtype)
        if torch.finfo(self.dtype).max >= torch.finfo(numbers.dtype).max:
            return rounded
        if _largest(rounded) == math.inf and (largest := _largest(numbers)) < math.inf:
            raise OverflowError(_exceeds(name, largest, self.dtype))
        nonzero = int(torch.count_nonzero(numbers))
        self.zeros, self.all = self.zeros + nonzero - int(torch.count_nonzero(rounded)), self.all + nonzero
        return rounded

    def tell(self) -> None:
        """Logs how many numbers have become 0, if that is more than a few."""
        if self.zeros > MANY_ZEROS * self.all:
            name = str(self.dtype).removeprefix("torch.")
            log.warning(
                f"{self.zeros:,} of {self.all:,} nonzero exported numbers became 0 because they are too small for "
                f"{name}. Type export_dtype=bfloat16 to keep them."
            )


def _largest(numbers: Tensor) -> float:
    """Returns the largest absolute value, without a copy; nan if there is one."""
    if not numbers.numel():
        return 0.0
    lowest, highest = (end.item() for end in numbers.aminmax())
    return max(-lowest, highest)


def _exceeds(name: str, largest: float, dtype: torch.dtype) -> str:
    kind, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    number = f"{largest:.6g}, more than" if math.isfinite(largest) else "a number above"
    return f"{name} contains {number} the largest {kind} number, {most:.6g}."


def _why(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return f"weights or activations exceed the largest fp16 number, 65504. {WIDER}"
    return f"{dtype} has the range of fp32, so the weights are probably damaged. Type another model.name."
