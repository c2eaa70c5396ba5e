"""Holds what a traced run shows: the sizes of its model, its memory, and its work.

A field that a run has nothing of is 0. No field has a default, so none can be forgotten: `trace` fills all of them.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from lowmem.memory.tracker import Point
from lowmem.offload.drive import Sizes
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.traffic import Sent


@dataclass
class ModelSizes:
    """Holds the sizes of a rank's share of the model, and where its tensors are."""

    steps_on_host: bool  # the optimizer steps on the host, while the weights are on the device
    waits_on_host: bool  # weights, gradients and state wait on the host
    trained_parameters: int  # parameters that require a gradient
    largest_trained: int  # elements of the largest of these
    trained_in_blocks: int  # elements of the trained parameters of blocks
    gradients: int  # bytes of all gradients, as backward computes them
    blocks: tuple[int, int]  # (number of blocks, bytes of the largest on the device)
    streamed: int  # bytes of the blocks' weights that come from the host for each pass
    outside: int  # bytes of weights outside the blocks that wait on the host too
    head: int  # bytes of `outside` that come for each pass, in tiles
    paged: int  # bytes of state that CUDA pages: in no phase, since torch allocates none of it
    offloaded: int  # bytes of activations in host memory
    drive: Sizes  # of masters and state, if weights stream: what weights.drive would have them take


@dataclass
class MemoryTrace(ModelSizes):
    """Holds the memory of one window and one evaluation."""

    parameters: int
    largest: int  # elements of the largest parameter
    weights: int  # bytes on the device
    host_bytes: int  # bytes of weights and masters in host memory
    unseen: int  # bytes of scratch inside the operators of a step, which the tracker does not see
    generated: bool  # torch.compile generates the step
    workspace: int  # bytes of cuBLAS on a card, which the tracker does not see
    leaves: int  # bytes of the largest gradient that leaves at once
    ahead: int  # bytes of gradients that may wait on the device for the link
    rounding: int  # bytes by which `offloaded` grows in pinned memory, which is allocated in powers of two
    places: dict[str, Point]  # the highest point at each place of a pass
    phases: dict[str, Point]  # the highest point of each phase
    # Device events, (serial, bytes): + born, - died. Events of a window begin with the tensors that exist before it;
    # for a card they begin with the run's first window, see `from_the_start`. Empty: not known.
    events: list[tuple[Hashable, int]]


@dataclass
class WorkTrace(ModelSizes):
    """Holds the work of one window."""

    # (phase, an operator's work) -> how often. Phases of a micro-batch: forward, backward, sum (the host sums its
    # gradients) and travel (weights are copied for it). Phases of a window: step (all work on gradients before they are
    # used) and update. The prefix EARLIER marks a micro-batch that is not its window's last.
    work: Counter[tuple[str, Work]]
    sent: Counter[tuple[str, Sent]]  # (phase, exchange between devices) -> bytes


@dataclass
class Trace(MemoryTrace, WorkTrace):
    """Holds the memory and the work of a traced run."""

    advice: str | None  # set if attention takes the math kernel
    estimate: str | None  # why the trace is only an estimate
    neediest: tuple[int, ...]  # ranks worth tracing: one of them has the highest peak
