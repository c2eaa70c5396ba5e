"""What an optimizer of ours offers besides `step`: it steps one parameter whose gradient or weight has 16 bits.

Any torch optimizer works without: `techniques/precision/host_weight.py` widens the gradient and the weight to fp32 for
it, and rounds the result. Whoever derives from `OnePass` or `InPieces` makes do with less memory.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from lowmem.techniques.arithmetic.gradients import AS_STORED, Reading


class Step(NamedTuple):
    """One parameter, to be stepped once; its state is `optimizer.state[p]`.

    Args:
        gradient: of p's shape, in fp32, bf16 or fp16, as it is stored.
        group: the options of p's group, as they were when the step was asked for.
        p: fp32. Its data may be anything where `narrow` holds the weight.
        reading: scales and limits the gradient before anything else.
        narrow: of p's shape, in bf16 or fp16: receives the new weight.
    """

    gradient: Tensor
    group: dict
    p: nn.Parameter
    reading: Reading = AS_STORED
    narrow: Tensor | None = None


class OnePass:
    """An optimizer that reads 16 bits and writes 16 bits in its own pass over memory."""

    def step_from(self, step: Step, rest: Tensor | None = None) -> None:
        """`techniques/precision/host_weight.py` calls this in the place of `step`, on the host.

        Args:
            step: `narrow` in bf16 is rounded half up, in fp16 to nearest even; None: p alone is stepped.
            rest: int16, of p's shape, contiguous: the weight is not in p but in the halves `step.narrow` (bf16,
                contiguous) and this (`techniques/arithmetic/fp32_halves.py`).
        """
        raise NotImplementedError


class InPieces:
    """An optimizer that steps a weight of 16 bits piece by piece, so that no copy in fp32 is as large as the weight."""

    def step_narrow(self, step: Step, round: Callable[[Tensor, Tensor], None]) -> None:
        """`techniques/precision/host_weight.py` calls this for a weight that has no fp32 master.

        Args:
            step: `narrow`, contiguous, is the weight, and is replaced by the stepped one; p's data is not read.
            round: (piece in fp32, piece of `narrow`), both flat: writes one into the other. Pieces come in the order
                of the elements.
        """
        raise NotImplementedError


@runtime_checkable
class RunsAs(Protocol):
    """An optimizer that steps in one of several ways."""

    def runs_as(self) -> str:
        """Returns the way, such as "one C++ pass", for the run's summary."""
