"""What the tracer keeps of a run: every event of the tracker, and where in the model it happened."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lowmem.errors import Refused
from lowmem.gradient_checkpointing import blocks
from lowmem.memory.meter import MemoryMeter
from lowmem.memory.tracker import Point, highest


class Place(NamedTuple):
    """The highest bytes of activations between two marks, by what becomes of gradients meanwhile."""

    kept: int = 0  # they stay: with all that exist by then
    gone: int = 0  # they leave, or are added to earlier ones: with the one that was just made

    def higher(self, other: "Place") -> "Place":
        return Place(*map(max, self, other))


class Recorder(MemoryMeter):
    """The meter of a run, which also keeps what its tracker saw."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.recorded: list[tuple[list[Point], list[tuple[int, int]], list[int]]] = []
        self.marks: list[tuple[int, str]] = []  # (event, the place that begins with it) of the window
        self.weights = 0

    def mark(self, model: nn.Module) -> None:
        """Tell where in the stack of blocks the passes are: the first, the last, or between."""
        stack = stack_of(model)
        if not stack:
            return
        names = ["middle"] * len(stack)
        names[0], names[-1] = "first", "last"

        def enters(*_, name: str) -> None:
            if self._phase == "forward":  # not when it is computed again
                self._at(f"forward {name}")

        def leaves(_, __, output: object, name: str) -> None:
            if self._phase == "forward":
                self._at("forward end" if name == "last" else "forward middle")
                hidden = output[0] if isinstance(output, tuple | list) else output
                if hidden.requires_grad:
                    hidden.register_hook(lambda _: self._at(f"backward {name}"))

        for block, name in zip(stack, names, strict=True):
            block.register_forward_pre_hook(partial(enters, name=name))
            block.register_forward_hook(partial(leaves, name=name))

    def _at(self, place: str) -> None:
        if self._tracker is not None and not self.recorded:
            self.marks.append((len(self._tracker.events), place))

    def _enter(self, phase: str) -> None:
        super()._enter(phase)
        self._at(f"{phase} {'end' if phase == 'backward' else 'start'}")

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_train_start(trainer, module)
        self.weights = self.ledger.bytes()["weights"]

    def _untrack(self, phase: str | None = None) -> list[Point]:
        tracker = self._tracker
        points = super()._untrack(phase)
        if tracker is not None:
            self.recorded.append((points, tracker.device_events(), tracker.host_sizes("activations")))
        return points


def stack_of(model: nn.Module) -> list[nn.Module]:
    """Its blocks; empty where it is not a stack of them."""
    try:
        return list(blocks(model))
    except Refused:
        return []


def highest_of_phases(points: list[Point], on_card: bool) -> dict[str, Point]:
    """The device's highest point of each phase, with the host's own highest; on a CPU, whose memory is the host's, with
    what makes the sum of both highest."""
    found = {}
    for phase, top in highest(points).items():
        mine = [point for point in points if point.phase == phase]
        both = max(point.total + point.host for point in mine) - top.total
        found[phase] = top._replace(host=max(point.host for point in mine) if on_card else both)
    return found


def places(points: list[Point], marks: list[tuple[int, str]]) -> dict[str, Place]:
    """Args: points: after each event, and one before the first."""
    found: dict[str, Place] = {}
    ends = [start for start, _ in marks[1:]] + [len(points) - 1]
    for (start, place), end in zip(marks, ends, strict=True):
        for before, now in pairwise(points[start : end + 1]):
            activations = now.bytes["activations"] + now.bytes["other"]
            made = max(0, now.bytes["gradients"] - before.bytes["gradients"])
            here = Place(activations + now.bytes["gradients"], activations + made)
            found[place] = here.higher(found.get(place, Place()))
    return found
