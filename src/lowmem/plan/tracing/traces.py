"""Defines the result of a trace: sizes of the model, memory, and work.

A field that does not apply to a run is 0, False, None or empty. No field has a default, so `trace` cannot forget a
field.
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
    """Sizes of the traced rank's shard of the model, and where its tensors are."""

    steps_on_host: bool  # whether the optimizer runs on the host, and updates masters (or streamed weights) there
    waits_on_host: bool  # whether the strategy uses CPU offload: weights, gradients and state are in host memory
    trained_parameters: int  # elements of all trained parameters
    largest_trained: int  # elements of the largest trained parameter
    trained_in_blocks: int  # elements of trained parameters in the rank's blocks; sharded parameters count in full
    gradients: int  # bytes of the gradients of all trained parameters, in the dtype in which backward computes them
    blocks: tuple[int, int]  # (number of blocks, bytes that the weights of the largest block take on the device)
    streamed: int  # bytes of the streamed weights of blocks, which are copied to the device for each pass
    outside: int  # bytes of streamed weights outside the blocks (embedding and head)
    head: int  # part of `outside`: bytes of the head, which is copied to the device for each pass, tile by tile
    paged: int  # bytes of optimizer state that CUDA pages, which torch's allocator and `phases` do not count
    offloaded: int  # bytes of activations that the traced window offloads to host memory
    drive: Sizes  # sizes of files on a drive, and of their buffers; computed for streamed weights even without a drive


@dataclass
class MemoryTrace(ModelSizes):
    """Memory of one window and one evaluation."""

    parameters: int  # elements of all parameters of the full model
    largest: int  # elements of the largest parameter of the full model
    weights: int  # bytes of weights on the device
    slots: int  # part of `weights`: bytes of the slots for streamed blocks
    host_bytes: int  # bytes of all tensors in host memory before the first step (weights and masters)
    unseen: int  # bytes that the tracker does not see: memory inside the optimizer's operators, for `largest_trained`
    generated: bool  # whether torch.compile compiles the optimizer step
    workspace: int  # bytes of cuBLAS workspaces on a card, which the tracker does not see
    leaves: int  # largest number of bytes of gradients that are freed on the device by a single event
    ahead: int  # bytes of gradients that may wait on the device until they are copied to the host (`Link.ahead`)
    rounding: int  # bytes that pinned memory adds to `offloaded`, because it rounds sizes up to powers of two
    places: dict[str, Point]  # place in a pass (`recorder.py`) -> point with the most device bytes (see `by_place`)
    phases: dict[str, Point]  # phase -> point with the most device bytes
    # Allocations and releases on the device: (serial number of a storage, bytes; negative for a release). The list
    # begins with allocations of the tensors that exist before the window. On a card, `from_the_start` inserts the
    # events of the run's first window. Empty if the trace was extrapolated.
    events: list[tuple[Hashable, int]]


@dataclass
class WorkTrace(ModelSizes):
    """Work of one window."""

    # (phase, work of an operator) -> number of calls. Phases of each micro-batch: forward, backward, sum (the host sums
    # gradients) and travel (copies between host and device, for example of weights or block inputs). Phases of a
    # window: step (gradient norm and other work before the update) and update. Unless micro-batches overlap
    # (`Run.overlaps`), forward and backward have the prefix EARLIER in all micro-batches except the last of a window.
    work: Counter[tuple[str, Work]]
    sent: Counter[tuple[str, Collective]]  # (phase, collective) -> bytes of the full tensors


@dataclass
class Trace(MemoryTrace, WorkTrace):
    """Memory and work of a traced run."""

    advice: str | None  # why training uses the math kernel of attention, and which override helps; None: it does not
    estimate: str | None  # why the trace is only an estimate; None: it is not an estimate
    neediest: tuple[int, ...]  # ranks that must be traced: one of them has the highest peak of all ranks
