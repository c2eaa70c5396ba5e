"""Defines optional interfaces of optimizers, for the update of a single parameter on the host and for the run's
summary.

    OnePass     `step_from`: updates an fp32 weight (in one tensor or in two halves) from a 16- or 32-bit gradient
    InPieces    `step_narrow`: updates a 16-bit weight that has no fp32 weight on the host
    RunsAs      `runs_as`: names the implementation in use

`HostWeight.step` calls `step_from`, and `StochasticHostWeight.step` calls `step_narrow` (`offload/host_weight.py`). If
the model runs on a card, these two callers run in the host thread. If the optimizer lacks the method that a caller
needs, the caller converts gradient and weight to fp32, calls the optimizer's `step`, and rounds the result. `OnePass`
and `InPieces` avoid these fp32 copies of the full weight and gradient.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from lowmem.step.gradients import AS_STORED, Reading


class Step(NamedTuple):
    """The arguments of one update of one parameter, whose optimizer state is `optimizer.state[p]`.

    Args:
        gradient: the stored gradient, with p's shape, in fp32, bf16 or fp16.
        group: options of p's parameter group, as they were when the update was queued.
        p: the fp32 parameter. Its data is a placeholder that takes no memory if there is no fp32 master, or if the
            master is stored in two halves.
        reading: unscales and clips the gradient before the update.
        narrow: receives the new weight; has p's shape, in bf16 or fp16, or in fp32 if an adapter keeps the weight in
            fp32. Before an update by `step_narrow` it contains the old weight, and before an update by `step_from` with
            `rest` the upper half of the old fp32 weight. None: only p is updated.
    """

    gradient: Tensor
    group: dict
    p: nn.Parameter
    reading: Reading = AS_STORED
    narrow: Tensor | None = None


class OnePass:
    """An optimizer that converts 16-bit gradients and weights within its own pass over memory."""

    def step_from(self, step: Step, rest: Tensor | None = None) -> None:
        """Updates a parameter on the host. `HostWeight.step` calls this method instead of `step`.

        Args:
            step: the update. Unless `step.narrow` is None, the new weight is also written to `step.narrow`, rounded as
                in `fp32_halves.round_into`.
            rest: int16, p's shape, contiguous: the lower half of the fp32 weight, whose upper half is `step.narrow`
                (bf16, contiguous; see `step/fp32_halves.py`). Both halves are read and updated, and p's data is not
                read. None: the fp32 weight is p's data.
        """
        raise NotImplementedError


class InPieces:
    """An optimizer that updates a 16-bit weight piece by piece, to avoid a full fp32 copy of the weight."""

    def step_narrow(self, step: Step, round: Callable[[Tensor, Tensor], None]) -> None:
        """Updates a weight that has no fp32 master. `StochasticHostWeight.step` calls this method instead of the
        optimizer's `step`.

        Args:
            step: `step.narrow` (contiguous) is the weight, which is updated in place. p's data is not read.
            round: called with (fp32 piece, corresponding piece of `step.narrow`), both flat; rounds the first into the
                second. Must be called in the order of the elements, because it draws random numbers.
        """
        raise NotImplementedError


@runtime_checkable
class RunsAs(Protocol):
    """An optimizer whose step has several implementations."""

    def runs_as(self) -> str:
        """Returns the implementation in use, such as "one C++ pass", for the run's summary."""
