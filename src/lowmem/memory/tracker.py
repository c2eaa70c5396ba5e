"""The tracker: every storage that is born and dies while it is active, as a list of events.

A dispatch mode sees each operator's outputs; a weak reference tells when a storage dies. Which category a storage
belongs to is often known only later (a gradient is just a tensor until backward hands it over), so events are kept and
categories are settled at the end. Scratch inside an operator is not seen. Costs 5-15 % of a step while active, so it is
sampled.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowmem.memory.ledger import CATEGORIES, Owner, Side, parts


class Point(NamedTuple):
    """Live bytes of the device side by category, at one event of a phase."""

    phase: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


_active: list["StorageTracker"] = []


def belongs(tensor: Tensor, category: str, side: Side = "device") -> None:
    """Tell whoever is tracking what a tensor is, and on which side it would be beside a card."""
    for tracker in _active:
        tracker.own(tensor, Owner(category, side, tuple))


@contextmanager
def host_side() -> Iterator[None]:
    """Whatever is born within stands for host memory, also where the device is the CPU."""
    trackers = list(_active)
    for tracker in trackers:
        tracker.working_on_host += 1
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.working_on_host -= 1


class OverLimit(MemoryError):
    """The live tensors of the device side exceed what they may."""


class StorageTracker(TorchDispatchMode):
    """Args: known: the ledger's storages when tracking starts, the base line; limit: bytes of the device side.

    Raises:
        OverLimit: from the operator whose output exceeds the limit.
    """

    def __init__(self, known: dict[int, tuple[Owner, int]], limit: int | None = None) -> None:
        super().__init__()
        self.limit, self.working_on_host = limit, 0
        self.base = dict.fromkeys(CATEGORIES, 0)
        for owner, size in known.values():
            if owner.side == "device":
                self.base[owner.category] += size
        self.phase = "forward"
        self.events: list[tuple[str, int, int]] = []  # (phase, serial of the storage, bytes: + born, - died)
        self._live: dict[int, int] = dict.fromkeys(known, -1)  # storage key -> serial; -1: in the base line
        self._references: list[weakref.ref] = []  # a weak reference that is itself dropped never calls back
        self._owner: dict[int, Owner] = {}  # by serial
        self.now = sum(self.base.values())  # live bytes of the device side

    def __enter__(self):
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *exception):
        _active.remove(self)
        return super().__exit__(*exception)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # an ordinary dispatch mode turns torch.compile off without a word

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                for held in parts(leaf):
                    self._see(held.untyped_storage())
        return out

    def _see(self, storage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        serial, size = len(self._references), storage.nbytes()
        self._live[key] = serial
        self.events.append((self.phase, serial, size))
        self.now += size

        def died(_: weakref.ref) -> None:
            self._live.pop(key, None)
            self.events.append((self.phase, serial, -size))
            self.now -= size if self._side(serial) == "device" else 0

        self._references.append(weakref.ref(storage, died))
        if self.working_on_host:
            self._own(serial, size, Owner("other", "host", tuple))
        if self.limit is not None and self.now > self.limit:
            raise OverLimit(f"{self.now} bytes of live tensors, {self.limit} allowed")

    def _side(self, serial: int) -> str:
        owner = self._owner.get(serial)
        return owner.side if owner else "device"

    def own(self, tensor: Tensor, owner: Owner) -> None:
        self._see(tensor.untyped_storage())
        self._own(self._live[tensor.untyped_storage()._cdata], tensor.untyped_storage().nbytes(), owner)

    def _own(self, serial: int, size: int, owner: Owner) -> None:
        if serial >= 0:
            if owner.side == "host" and self._side(serial) == "device":
                self.now -= size
            self._owner[serial] = owner

    def settle(self, known: dict[int, tuple[Owner, int]]) -> None:
        """Tell who owns what now exists: gradients after backward, optimizer state after the step."""
        for key, (owner, size) in known.items():
            self._own(self._live.get(key, -1), size, owner)

    def timeline(self) -> Iterator[Point]:
        """Live bytes after every event, the base line included. Born unowned: an activation, or `other` in the step."""
        now, unowned = dict(self.base), {}
        yield Point(self.events[0][0] if self.events else self.phase, dict(now))
        for phase, serial, size in self.events:
            owner = self._owner.get(serial)
            if owner is not None and owner.side == "host":
                continue
            default = unowned.setdefault(serial, "other" if phase == "step" else "activations")
            now[owner.category if owner else default] += size
            yield Point(phase, dict(now))


def highest(points: Iterable[Point]) -> dict[str, Point]:
    """The highest point of each phase."""
    best: dict[str, Point] = {}
    for point in points:
        if point.phase not in best or point.total > best[point.phase].total:
            best[point.phase] = point
    return best
