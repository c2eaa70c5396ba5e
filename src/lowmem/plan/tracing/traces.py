"""The results of a trace: sizes of the model, memory, and work.

A field that does not apply to a run is 0. No field has a default, so `trace` cannot forget a field.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from lowmem.memory.tracker import Point
from lowmem.offload.drive import Sizes
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.traffic import Collective


@dataclass
class ModelSizes:
    """Sizes of a rank's share of the model, and where its tensors are."""

    steps_on_host: bool  # host masters: the optimizer runs on the host
    waits_on_host: bool  # CPU offload of a strategy: weights, gradients and state are in host memory
    trained_parameters: int  # elements of parameters that require a gradient
    largest_trained: int  # elements of the largest trained parameter
    trained_in_blocks: int  # elements of trained parameters in blocks
    gradients: int  # bytes of all gradients, as backward computes them
    blocks: tuple[int, int]  # (number of blocks, bytes of the largest block on the device)
    streamed: int  # bytes of the blocks' weights that are copied from the host for each pass
    outside: int  # bytes of streamed weights outside the blocks
    head: int  # the part of `outside` that is copied for each pass, in tiles
    paged: int  # bytes of optimizer state that CUDA pages; not in `phases`, because torch does not allocate it
    offloaded: int  # bytes of activations in host memory
    drive: Sizes  # sizes of masters and state of streamed weights on a drive, also if no drive is used


@dataclass
class MemoryTrace(ModelSizes):
    """Memory of one window and one evaluation."""

    parameters: int
    largest: int  # elements of the largest parameter
    weights: int  # bytes of weights on the device
    slots: int  # bytes of these into which streamed blocks are copied
    host_bytes: int  # bytes of weights and masters in host memory
    unseen: int  # bytes of temporary memory inside the optimizer's operators, which the tracker does not see
    generated: bool  # the step is compiled by torch.compile
    workspace: int  # bytes of cuBLAS workspaces on a card, which the tracker does not see
    leaves: int  # bytes of the largest gradient that is sent to the host at once
    ahead: int  # bytes of gradients that may queue on the device, see `Link.ahead`
    rounding: int  # bytes that rounding to powers of two adds to `offloaded` in pinned memory
    places: dict[str, Point]  # the highest point at each place of a pass, see `recorder.py`
    phases: dict[str, Point]  # the highest point of each phase
    # Device events (serial, bytes), > 0 allocated, < 0 freed. They begin with the tensors that exist before the window;
    # for a card they begin with the run's first window, see `from_the_start`. Empty: not known.
    events: list[tuple[Hashable, int]]


@dataclass
class WorkTrace(ModelSizes):
    """Work of one window."""

    # (phase, an operator's work) -> number of calls. Phases of a micro-batch: forward, backward, sum (the host sums its
    # gradients) and travel (weights are copied for it). Phases of a window: step (gradient norm and other work before
    # the update) and update. The prefix EARLIER marks a micro-batch that is not the last of its window.
    work: Counter[tuple[str, Work]]
    sent: Counter[tuple[str, Collective]]  # (phase, kind of collective) -> bytes


@dataclass
class Trace(MemoryTrace, WorkTrace):
    """Memory and work of a traced run."""

    advice: str | None  # set if attention uses the math kernel
    estimate: str | None  # the reason if the trace is only an estimate
    neediest: tuple[int, ...]  # ranks to trace: one of these has the highest peak
