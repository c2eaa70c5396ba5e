"""Returns the size of a model's numbers, relative to which two computations of them are compared."""

import math

import torch
from torch import Tensor

from lowmem.system.errors import Refused


def largest_magnitude(numbers: Tensor) -> float:
    """Returns the largest absolute value of what a model computes before its first step.

    Raises:
        Refused: a number is inf or nan, so that two computations cannot be compared, and no loss would be finite.
    """
    largest = numbers.abs().max().item()
    if not math.isfinite(largest):
        raise Refused(f"The model's numbers are not finite before its first step: {_why(numbers.dtype)}")
    return largest


def _why(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return (
            "weights or activations exceed the largest fp16 number, 65504. Type precision=bf16, bf16-true or "
            "bf16-master, which have fp32's range."
        )
    return f"{dtype} has fp32's range, so the weights are probably damaged. Type another model.name."
