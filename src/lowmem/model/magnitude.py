"""Checks the magnitudes of a model's values: compares two results with a tolerance relative to the largest value, and
detects overflow and underflow when values are rounded to a dtype such as fp16."""

import logging
import math
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from lowmem.model.trainable import Packed
from lowmem.system.errors import Refused

log = logging.getLogger(__name__)

WIDER = "Type precision=bf16, bf16-true or bf16-master, which have the range of fp32."
# Tolerance in multiples of a dtype's rounding error. Another order of summation changes a result by one or two rounding
# errors; another function changes it by many more.
ROUNDINGS = 8
# Minimum tolerance, relative to the largest value. Results of different kernels for the same function differ by less
# than this; results of different functions differ by a hundred times more.
OTHER_KERNELS = 1e-4
# A warning is logged if rounding turns more than this share of the nonzero values into 0. For normally distributed
# weights in fp16, the share is a few millionths.
MANY_ZEROS = 1e-3


def largest_magnitude(numbers: Tensor) -> float:
    """Returns the largest absolute value of a tensor. Only for checks before the first optimizer step, because the
    error message mentions this step.

    Raises:
        Refused: a value is inf or nan.
    """
    largest = numbers.abs().max().item()
    if not math.isfinite(largest):
        raise Refused(f"The model computes inf or nan before its first step: {_why(numbers.dtype)}")
    return largest


def same(
    one: Tensor, other: Tensor, largest: float, dtypes: Iterable[torch.dtype], least: float = OTHER_KERNELS
) -> bool:
    """Returns True if two results agree up to rounding. Values that are inf or nan must be equal in both results.

    The tolerance is relative to `largest`: it is `ROUNDINGS` times the rounding error of the coarsest dtype, but at
    least `least`. The default of `least` matters only if all `dtypes` are fp32 or finer.

    Args:
        one, other: the results.
        largest: the magnitude to which the tolerance is relative, usually the largest absolute value in the results,
            because the rounding error of a sum grows with its largest terms.
        dtypes: the dtypes to which the two computations round.
        least: minimum tolerance, relative to `largest`; 0 if both computations use the same kernels.
    """
    tolerance = max(least, ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes)) * largest
    return torch.allclose(one.float(), other.float(), rtol=0.0, atol=tolerance, equal_nan=True)


def check_holds(model: nn.Module, dtype: torch.dtype, advice: str) -> None:
    """Checks that no weight of a loaded model overflows in a dtype. Args: model: the model; dtype: the dtype; advice:
    advice for the error message.

    Raises:
        Refused: the absolute value of a weight exceeds the dtype's largest number.
    """
    packed = ((name, layer.largest) for name, layer in model.named_modules() if isinstance(layer, Packed))
    for name, largest in chain(((name, _largest(p.data)) for name, p in model.named_parameters()), packed):
        if largest > torch.finfo(dtype).max:
            raise Refused(f"{_exceeds(name, largest, dtype)} {advice}")


class Rounding:
    """Rounds tensors to a dtype, one at a time. If the dtype has a smaller range than the tensor's own dtype (fp16, and
    by a small margin bf16), also counts the nonzero values of the tensor (`all`), and how many of these become 0
    (`zeros`)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.zeros, self.all = dtype, 0, 0

    def __call__(self, name: str, numbers: Tensor, device: str | None = None) -> Tensor:
        """Returns the rounded tensor.

        Args:
            name: name of the tensor, for the error message.
            numbers: the tensor.
            device: device of the result; None: the device of `numbers`.

        Raises:
            OverflowError: all values of `numbers` are finite, and at least one would become inf.
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
        """Logs a warning if the share of nonzero values that have become 0 exceeds `MANY_ZEROS`."""
        if self.zeros > MANY_ZEROS * self.all:
            name = str(self.dtype).removeprefix("torch.")
            log.warning(
                f"{self.zeros:,} of {self.all:,} nonzero exported numbers became 0 because they are too small for "
                f"{name}. Type export_dtype=bfloat16 to keep them."
            )


def _largest(numbers: Tensor) -> float:
    """Returns the largest absolute value, 0 for an empty tensor, or nan if any value is nan. Does not copy the
    tensor."""
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
