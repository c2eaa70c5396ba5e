"""Defines optional interfaces of optimizers, for a step of one parameter whose gradient or weight has 16 bits.

Every torch optimizer works without these interfaces: `offload/host_weight.py` converts gradient and weight to fp32,
calls `step`, and rounds the result. An optimizer that derives from `OnePass` or `InPieces` needs less memory.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from lowmem.step.gradients import AS_STORED, Reading


class Step(NamedTuple):
    """The arguments of one step of one parameter, whose state is `optimizer.state[p]`.

    Args:
        gradient: the stored gradient: p's shape, in fp32, bf16 or fp16.
        group: options of p's parameter group at the time of the request.
        p: the fp32 parameter. Its data is undefined if `narrow` has the weight.
        reading: unscales and clips the gradient before the step.
        narrow: p's shape, in bf16 or fp16; receives the new weight.
    """

    gradient: Tensor
    group: dict
    p: nn.Parameter
    reading: Reading = AS_STORED
    narrow: Tensor | None = None


class OnePass:
    """An optimizer that converts from and to 16 bits within its own pass over memory."""

    def step_from(self, step: Step, rest: Tensor | None = None) -> None:
        """Steps a parameter on the host; `offload/host_weight.py` calls it in place of `step`.

        Args:
            step: the new weight is rounded into `step.narrow`, half up in bf16, and to nearest even in fp16. If
                `step.narrow` is None, only p is stepped.
            rest: int16, p's shape, contiguous: the lower half of the weight. Then the weight is not in p, but in two
                halves: `step.narrow` (bf16, contiguous) and `rest` (`step/fp32_halves.py`). None: the weight is in p.
        """
        raise NotImplementedError


class InPieces:
    """An optimizer that steps a 16-bit weight piece by piece, which avoids a full fp32 copy of the weight."""

    def step_narrow(self, step: Step, round: Callable[[Tensor, Tensor], None]) -> None:
        """Steps a weight without an fp32 master; `offload/host_weight.py` calls it.

        Args:
            step: `step.narrow` (contiguous) is the weight, and is updated in place; p's data is not read.
            round: called with (fp32 piece, the same piece of `step.narrow`), both flat, in the order of the elements;
                rounds the first into the second.
        """
        raise NotImplementedError


@runtime_checkable
class RunsAs(Protocol):
    """An optimizer with several implementations of its step."""

    def runs_as(self) -> str:
        """Returns the implementation in use, such as "one C++ pass", for the run's summary."""
