"""The memory meter of a traced run: records every allocation and release in the traced window and evaluation. For the
window, it also records the places in the model where these events happen.

A place is a phase and a position: "start" (before the first block), "first" (in the first block), "middle", "last", or
"end" (after the last block). For example, backward begins at "backward end", in the head and the loss. With
weights.order=by_layer, the first micro-batch is in backward while the other micro-batches still run the forward pass of
the last block: this place is "backward beside last". The optimizer step is the single place "step start", and an
evaluation is the single place "evaluation".
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lowmem.memory.meter import MemoryMeter
from lowmem.memory.tracker import Point, StorageTracker, ToldTracker
from lowmem.model.blocks import stack_of
from lowmem.system.torch_private import in_backward


class Recording(NamedTuple):
    """The recorded events of a window or of an evaluation."""

    points: list[Point]  # live bytes before the first event and after each event
    events: list[tuple[int, int]]  # allocations and releases on the device: (storage serial, bytes; negative: release)
    existing: int  # number of leading `events` that stand for tensors from before the recording
    pinned: list[int]  # bytes of each activation in host memory


class Recorder(MemoryMeter):
    """A `MemoryMeter` that keeps all events of one window and one evaluation. Args: file: the csv file of the meter;
    before: number of windows before the recorded window; they are not recorded."""

    tracker = ToldTracker

    def __init__(self, file: Path, before: int = 0) -> None:
        super().__init__(file)
        self.before = before
        self.recordings: list[Recording] = []  # of the window, and then of the evaluation
        self.marks: list[tuple[int, str]] = []  # (index of an event in the window, place that begins there)
        self.begins: dict[str, int] = {}  # place -> index in the window's `Recording.events` where it first begins
        # bytes before the first window: of the weights on the device, and of all tensors in host memory
        self.weights = self.host_bytes = 0

    def mark_blocks(self, model: nn.Module) -> None:
        """Registers hooks on the blocks. The hooks mark where the places "first", "middle", "last" and "end" of the
        window begin. A no-op for a model without a stack of blocks."""
        stack = stack_of(model)
        if not stack:
            return
        names = ["middle"] * len(stack)
        names[0], names[-1] = "first", "last"

        def mark(name: str) -> None:
            self._mark(f"forward {name}" if self._phase == "forward" else f"{self._phase} beside {name}")

        def enters(*_, name: str) -> None:
            if not in_backward():  # in backward, the forward pass of a block is a recomputation
                mark(name)

        def leaves(_, __, output: object, name: str) -> None:
            if not in_backward():
                mark("end" if name == "last" else "middle")
                hidden = output[0] if isinstance(output, tuple | list) else output
                if hidden.requires_grad:
                    hidden.register_hook(lambda _: self._mark(f"backward {name}"))

        for block, name in zip(stack, names, strict=True):
            block.register_forward_pre_hook(partial(enters, name=name))
            block.register_forward_hook(partial(leaves, name=name))

    def _mark(self, place: str) -> None:
        if self._tracker is not None and not self.recordings:
            self.marks.append((len(self._tracker.events), place))

    def _track(self) -> None:
        if self._step > self.before:
            super()._track()

    def _enter(self, phase: str) -> None:
        super()._enter(phase)
        self._mark(f"{phase} {'end' if phase == 'backward' else 'start'}")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_train_start(trainer, module)
        self.weights, self.host_bytes = self.ledger.bytes()["weights"], sum(self.ledger.bytes("host").values())

    def _points(self, tracker: StorageTracker) -> list[Point]:
        """Returns all points of the timeline. (The base class thins the timeline, but `marks` are indices of events, so
        no point may be missing.)"""
        return list(tracker.timeline())

    def _untrack(self, phase: str | None = None) -> list[Point]:
        tracker = self._tracker
        points = super()._untrack(phase)
        if tracker is not None:
            if not self.recordings:
                first = {place: at for at, place in reversed(self.marks)}
                self.begins = {place: tracker.device_events_before(at) for place, at in first.items()}
            events, existing = tracker.device_events(), tracker.device_events_before(0)
            self.recordings.append(Recording(points, events, existing, tracker.host_sizes("activations")))
        return points


def by_place(points: list[Point], marks: list[tuple[int, str]], on_card: bool) -> dict[str, Point]:
    """Returns, for each place, the point with the most device bytes. The `host_bytes` of this point are replaced:

    - On a card, by the `host_bytes` of the place's point with the most host bytes.
    - On a CPU, device and host share one memory, and the sum of device and host bytes may be highest at a different
      point. In each category, the new `host_bytes` are the device and host bytes at that other point, minus the device
      bytes of the returned point. So the device and host bytes of the returned point add up to the highest sum.

    Args:
        points: the points of a `Recording`.
        marks: the marks of the `Recorder`. If empty, each phase is one place.
        on_card: True: the run is planned for a card; False: for a CPU.
    """
    starts = [start for start, _ in marks[1:]] + [len(points)]
    places: dict[str, list[Point]] = {}
    at = 0
    for (_, place), end in zip(marks, starts, strict=False):
        places.setdefault(place, []).extend(points[at : end + 1])
        at = end + 1
    for point in points if not marks else ():
        places.setdefault(point.phase, []).append(point)
    return {place: _top(some, on_card) for place, some in places.items() if some}


def of_phases(places: Mapping[str, Point], on_card: bool) -> dict[str, Point]:
    """Returns, for each phase, the point with the most device bytes in any of its places, with `host_bytes` as in
    `by_place`. Args: places: the result of `by_place`."""
    phases: dict[str, list[Point]] = {}
    for place, point in places.items():
        phases.setdefault(place.split()[0], []).append(point)
    return {phase: _top(some, on_card) for phase, some in phases.items()}


def _top(points: list[Point], on_card: bool) -> Point:
    top = max(points, key=attrgetter("total"))
    if on_card:
        return top._replace(host_bytes=max(points, key=attrgetter("host")).host_bytes)
    most = max(points, key=lambda point: point.total + point.host)
    more = {category: size - top.bytes[category] for category, size in most.bytes.items()}
    return top._replace(host_bytes={name: size + more.get(name, 0) for name, size in most.host_bytes.items()})
