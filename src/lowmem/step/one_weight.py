"""Defines what an optimizer may offer besides `step`: to step one parameter whose gradient or weight has 16 bits.

Any torch optimizer works without it: `offload/host_weight.py` widens the gradient and the weight to fp32,
and rounds the result. An optimizer that derives from `OnePass` or `InPieces` needs less memory.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from lowmem.step.gradients import AS_STORED, Reading


class Step(NamedTuple):
    """One step of one parameter, whose state is `optimizer.state[p]`.

    Args:
        gradient: of p's shape, in fp32, bf16 or fp16, as it is stored.
        group: the options of p's group when the step was requested.
        p: fp32. Its data has no meaning if `narrow` holds the weight.
        reading: scales and limits the gradient before anything else.
        narrow: of p's shape, in bf16 or fp16; receives the new weight.
    """

    gradient: Tensor
    group: dict
    p: nn.Parameter
    reading: Reading = AS_STORED
    narrow: Tensor | None = None


class OnePass:
    """An optimizer that reads and writes 16 bits in its own pass over memory."""

    def step_from(self, step: Step, rest: Tensor | None = None) -> None:
        """Steps a parameter on the host; `offload/host_weight.py` calls it in place of `step`.

        Args:
            step: `narrow` is rounded half up in bf16, and to nearest even in fp16; None: only p is stepped.
            rest: int16, of p's shape, contiguous, if the weight is not in p but in two halves: `step.narrow` (bf16,
                contiguous) and this one (`step/fp32_halves.py`).
        """
        raise NotImplementedError


class InPieces:
    """An optimizer that steps a 16-bit weight piece by piece, so that no fp32 copy is as large as the weight."""

    def step_narrow(self, step: Step, round: Callable[[Tensor, Tensor], None]) -> None:
        """Steps a weight that has no fp32 master; `offload/host_weight.py` calls it.

        Args:
            step: `narrow`, contiguous, is the weight, and is replaced by the stepped one; p's data is not read.
            round: (piece in fp32, piece of `narrow`), both flat: writes the first into the second. Pieces come in the
                order of the elements.
        """
        raise NotImplementedError


@runtime_checkable
class RunsAs(Protocol):
    """An optimizer that can step in several ways."""

    def runs_as(self) -> str:
        """Returns the way, such as "one C++ pass", for the run's summary."""
