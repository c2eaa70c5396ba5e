"""The meter of a traced run records every event of the tracker and where in the model it happened."""

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
    """Holds the record of a window or of an evaluation."""

    points: list[Point]  # one before the first event, and one after each
    events: list[tuple[int, int]]  # of the device, (serial, bytes): + born, - died
    existing: int  # so many of them stand for what existed before
    pinned: list[int]  # bytes of each activation in host memory


class Recorder(MemoryMeter):
    """Extends a run's meter: it also stores what the tracker saw. Args: before: windows to ignore at the start."""

    tracker = ToldTracker

    def __init__(self, file: Path, before: int = 0) -> None:
        super().__init__(file)
        self.before = before
        self.recordings: list[Recording] = []  # the window, then the evaluation
        self.marks: list[tuple[int, str]] = []  # (index of an event, the place that begins there), in the window
        self.begins: dict[str, int] = {}  # place -> the first event of the window's recording that is there
        self.weights = self.host_bytes = 0  # bytes of weights on the device; of weights and masters on the host

    def mark_blocks(self, model: nn.Module) -> None:
        """Adds hooks that mark where a pass is: at the first block, at the last, or between them. By layer the
        first micro-batch of a window is in backward while the others still have to pass through the last block."""
        stack = stack_of(model)
        if not stack:
            return
        names = ["middle"] * len(stack)
        names[0], names[-1] = "first", "last"

        def mark(name: str) -> None:
            self._mark(f"forward {name}" if self._phase == "forward" else f"{self._phase} beside {name}")

        def enters(*_, name: str) -> None:
            if not in_backward():  # there a checkpoint recomputes the block
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
        """Returns a point for every event: the places of a pass are counted in events."""
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
    """Returns the device's highest point at each place of a pass, with the host's highest bytes there.

    On a CPU both sides are in one memory, and their sum may be highest at another point than the device's: in each
    category, `host_bytes` is then the difference between the point of the highest sum and the device's highest point.

    Args:
        points: of a `Recording`; marks: of its `Recorder`; without marks each phase is a place.
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
    """Returns the highest place of each phase, with the host's highest bytes in that phase as in `by_place`."""
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
