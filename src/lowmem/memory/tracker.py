"""Records when storages are created and freed, and computes from these events the live bytes by category. The memory
meter tracks some steps of a run, or all steps if memory.limit is set on a CPU. The planner tracks a traced run on fake
tensors, and steps of real optimizers on small parameters.

A `TorchDispatchMode` sees the outputs of each operator in the thread that starts tracking, in autograd's threads and in
the threads of micro-batches. Operators in the link's host thread are not seen; the ledger counts the tensors of this
thread that have an owner. A weak reference reports when a storage is freed. The category of a storage is often known
only later: a gradient is an ordinary tensor until backward stores it in `p.grad`. So each event has the serial number
of its storage, and bytes are summed by category at the end:

    operator output    event (phase, serial, +bytes)       `see`
    storage freed      event (phase, serial, -bytes)       weak reference
    owner known        serial -> category and side         `belongs`, `settle`
    result             live bytes after every event        `timeline`

Temporary memory inside an operator is not seen. Tracking costs 5-15 % of a step's time.
"""

import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, islice
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from lowmem.memory.ledger import OwnedStorage, Owner, Side, plain_tensors
from lowmem.system.torch_private import TorchDispatchMode, storage_key, tree_leaves
from lowmem.system.units import CATEGORIES, HOST_CATEGORIES

MOST = 2000  # approximate number of points in a thinned timeline, enough for a plot


class Point(NamedTuple):
    """Live bytes by category, on the device side and on the host side, at the start of tracking or after one event."""

    phase: str
    bytes: dict[str, int]
    host_bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def host(self) -> int:
        return sum(self.host_bytes.values())


_active: list["StorageTracker"] = []


class _Thread(threading.local):
    """State per thread: `host_side` in the host thread must not affect tensors that another thread creates at the same
    time."""

    on_host = False  # True: tensors that the thread creates count as host memory


_thread = _Thread()


def belongs(tensor: Tensor, category: str, side: Side = "device") -> None:
    """Tells all active trackers the category and the side of a tensor. If a tracker has not seen the tensor's storage
    yet, for example because the host thread created it, the tracker records the storage as created now. Args: side:
    "device" or "host": where the tensor would be in a run on a card."""
    for tracker in _active:
        tracker.own(tensor, Owner(category, side, tuple))


def see(out: object) -> None:
    """Passes the outputs of an operator to every active `ToldTracker`."""
    for tracker in _active:
        if isinstance(tracker, ToldTracker):
            tracker.see(out)


def _begin(tracker: "StorageTracker") -> None:
    """Activates a tracker. If no other tracker is active, also patches `UntypedStorage.resize_`, because fully_shard
    frees gathered weights with this method, which is not an operator."""
    if not _active:
        UntypedStorage.resize_ = _resize
    _active.append(tracker)


def _end(tracker: "StorageTracker") -> None:
    _active.remove(tracker)
    if not _active:
        del UntypedStorage.resize_  # restores the base class's method


def _resize(storage: UntypedStorage, size: int) -> None:
    super(UntypedStorage, storage).resize_(size)
    for tracker in _active:
        tracker.resized(storage)


@contextmanager
def host_side() -> Iterator[None]:
    """Context manager in which tensors that this thread creates count as host memory, even in a run on a CPU."""
    before = _thread.on_host
    _thread.on_host = True
    try:
        yield
    finally:
        _thread.on_host = before


class OverLimit(MemoryError):
    """Raised if the live tensors of the device side exceed memory.limit."""


class StorageTracker(TorchDispatchMode):
    """Records events of storages while active.

    Args:
        known: the ledger's storages when tracking starts.
        limit: maximum bytes of the device side; None: no limit.
        device: the device type, such as "cuda", if the device has its own memory; new storages on other devices then
            count as host memory. None: the CPU computes, and new storages count as device memory, except those created
            in `host_side`.

    Raises:
        OverLimit: raised by the operator whose output makes the live bytes of the device side exceed the limit.
    """

    def __init__(self, known: Mapping[int, OwnedStorage], limit: int | None = None, device: str | None = None) -> None:
        super().__init__()
        self.limit, self.device = limit, device
        self.base, self.host_base = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(HOST_CATEGORIES, 0)
        self.phase = "forward"
        self.events: list[tuple[str, int, int]] = []  # (phase, serial, bytes: > 0 created, < 0 freed)
        self._live: dict[int, int] = {}  # storage key -> serial
        self._sizes: list[int] = []  # serial -> bytes
        self._references: list[weakref.ref] = []  # kept, because the callback of a deleted weak reference never runs
        self._owner: dict[int, Owner] = {}  # serial -> owner
        self._before: list[tuple[int, int]] = []  # (serial, bytes) of storages that existed before tracking
        for owned in known.values():
            serial = self._follow(owned.storage)
            self._owner[serial] = owned.owner
            self._before.append((serial, owned.bytes))
            if owned.owner.side == "device":
                self.base[owned.owner.category] += owned.bytes
            elif owned.owner.side == "host":
                self.host_base[owned.owner.category] += owned.bytes
        self.now = sum(self.base.values())  # live bytes of the device side

    def __enter__(self):
        _begin(self)
        return super().__enter__()

    def __exit__(self, *exception):
        _end(self)
        return super().__exit__(*exception)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # other dispatch modes silently disable torch.compile

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out

    def see(self, out: object) -> None:
        """Records the outputs of an operator."""
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                for inner in plain_tensors(leaf):
                    self._see(inner.untyped_storage())

    def _see(self, storage: UntypedStorage) -> None:
        if storage_key(storage) in self._live:
            return
        serial = self._follow(storage)
        if _thread.on_host or self.device not in (None, storage.device.type):
            self._owner[serial] = Owner("other", "host", tuple)
        self._takes(serial, storage.nbytes())

    def _takes(self, serial: int, size: int) -> None:
        self._sizes[serial] = size
        if size:
            self.events.append((self.phase, serial, size))
            self.now += size if self._side(serial) == "device" else 0
        if self.limit is not None and self.now > self.limit:
            raise OverLimit(
                f"The device is out of memory: live tensors take {self.now} bytes, and memory.limit allows {self.limit}"
            )

    def _follow(self, storage: UntypedStorage) -> int:
        """Assigns a serial number to a storage and returns the number. When the storage is freed, an event is recorded.
        Serial numbers are unique, whereas a new storage may have the key of a freed storage."""
        key, serial, size = storage_key(storage), len(self._references), storage.nbytes()
        self._live[key] = serial
        self._sizes.append(size)

        def died(_: weakref.ref) -> None:
            self._live.pop(key, None)
            self._gives_back(serial)

        self._references.append(weakref.ref(storage, died))
        return serial

    def _gives_back(self, serial: int) -> None:
        size, self._sizes[serial] = self._sizes[serial], 0
        if size:
            self.events.append((self.phase, serial, -size))
            self.now -= size if self._side(serial) == "device" else 0

    def resized(self, storage: UntypedStorage) -> None:
        """Records that a storage was resized, as two events: the old memory was freed, and new memory was created."""
        serial = self._live.get(storage_key(storage))
        if serial is None:
            self._see(storage)
        elif storage.nbytes() != self._sizes[serial]:
            self._gives_back(serial)
            self._takes(serial, storage.nbytes())

    def _side(self, serial: int) -> str:
        owner = self._owner.get(serial)
        return owner.side if owner else "device"

    def own(self, tensor: Tensor, owner: Owner) -> None:
        self._see(tensor.untyped_storage())
        self._own(self._live[storage_key(tensor)], tensor.untyped_storage().nbytes(), owner)

    def _own(self, serial: int, size: int, owner: Owner) -> None:
        if owner.side != "device" and self._side(serial) == "device":
            self.now -= size
        self._owner[serial] = owner

    def settle(self, known: Mapping[int, OwnedStorage]) -> None:
        """Assigns the ledger's categories and sides to storages that exist now. The memory meter calls this method
        after backward, when gradients exist, and after the step, when optimizer state exists. Args: known: the ledger's
        storages."""
        for key, owned in known.items():
            if key in self._live:
                self._own(self._live[key], owned.bytes, owned.owner)

    def timeline(self) -> Iterator[Point]:
        """Yields the live bytes at the start of tracking and after every event. They include storages that existed
        before tracking. A storage without an owner counts as "other" if it was created in the phase "step", otherwise
        as "activations"."""
        now, host, unowned = dict(self.base), self.host_base, {}  # unowned: serial -> category
        yield Point(self.events[0][0] if self.events else self.phase, dict(now), host)
        for phase, serial, size in self.events:
            owner = self._owner.get(serial)
            if self._side(serial) == "host":
                host = host | {owner.category: host[owner.category] + size}  # a copy: earlier points share the old one
            elif self._side(serial) == "device":
                assumed = unowned.setdefault(serial, "other" if phase == "step" else "activations")
                now[owner.category if owner else assumed] += size
            yield Point(phase, dict(now), host)

    def device_events(self) -> list[tuple[int, int]]:
        """Returns (serial, bytes) of all allocations (> 0) and frees (< 0) on the device side, in order. The list
        begins with the storages that existed before tracking."""
        later = ((serial, size) for _, serial, size in self.events)
        return [(serial, size) for serial, size in (*self._before, *later) if self._side(serial) == "device"]

    def device_events_before(self, event: int) -> int:
        """Returns the number of `device_events` before `events[event]`. Storages that existed before tracking are
        counted, too."""
        earlier = ((serial, size) for _, serial, size in self.events[:event])
        return sum(self._side(serial) == "device" for serial, _ in (*self._before, *earlier))

    def host_sizes(self, category: str) -> list[int]:
        """Returns the sizes in bytes of all storages of a category that were created on the host side during
        tracking."""
        mine = {s for s, owner in self._owner.items() if owner.side == "host" and owner.category == category}
        return [size for _, serial, size in self.events if serial in mine and size > 0]


class ToldTracker(StorageTracker):
    """A tracker that does not act as a dispatch mode. Instead, the fake tensor mode of a trace passes the outputs of
    each operator to the function `see`. This takes half the time of two nested modes."""

    def __enter__(self):
        _begin(self)
        return self

    def __exit__(self, *exception):
        _end(self)


def highest(points: Iterable[Point]) -> dict[str, Point]:
    """Returns a mapping from each phase to its point with the most device bytes."""
    best: dict[str, Point] = {}
    for point in points:
        if point.phase not in best or point.total > best[point.phase].total:
            best[point.phase] = point
    return best


def thinned(points: Iterable[Point], count: int) -> Iterator[Point]:
    """Thins a timeline to about `MOST` points. Consecutive points of a phase form groups of `count / MOST` points
    (rounded up), and of each group only the point with the most device bytes is kept, so the peak of each phase stays
    exact.

    Args:
        points: the timeline.
        count: number of points in the timeline.
    """
    stretch = max(1, math.ceil(count / MOST))
    for _, of_phase in groupby(points, key=attrgetter("phase")):
        while some := list(islice(of_phase, stretch)):
            yield max(some, key=attrgetter("total"))
