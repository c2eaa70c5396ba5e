"""The link between the device and the host: gradients leave over it; new weights come back, or wait where they stream.

On CUDA everything is asynchronous. A gradient is copied in pieces into pinned staging slots of fixed total size, on a
stream of its own; one host thread takes each piece as soon as it has landed and frees its slot, so a device that is
faster than the host waits for a slot instead of filling the host's memory. The same thread steps the optimizer and
sends the new weights back through other slots; whoever is about to read a weight on the device waits for that weight
alone. Weights that stream it steps in their home, and sends nothing: they are copied from there when their turn comes.
On a CPU the device is the host: the same calls do the same work at once, in place, and nothing travels.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

SLOT_BYTES, SLOTS = 1 << 25, 4  # in each direction; a power of two, to which torch's allocator of pinned memory rounds

Take = Callable[[int, Tensor], None]  # (first element, what follows it), in host memory
Compute = Callable[[Tensor], None]  # writes the new weight into the tensor it is given


class Link:
    """Device and host are one: in place and at once."""

    lends = False  # whether a piece is only lent: overwritten once `take` has returned

    def fetch(self, gradient: Tensor, take: Take) -> None:
        """Bring a gradient to the host: `take` gets it in pieces, in order."""
        take(0, gradient.reshape(-1))

    def update(self, weight: Tensor, compute: Compute) -> None:
        """After all that was asked before: compute the new weight on the host, and bring it to the device."""
        compute(weight.detach())

    def at_home(self, home: "Home", compute: Callable[[], None]) -> None:
        """After all that was asked before: compute on the host what stays there until its turn."""
        home.steps += 1
        compute()

    def wait(self, weight: Tensor) -> None:
        """Before the device reads a weight: it is that of the last update."""

    def finish(self) -> None:
        """Return when the host has done all that it was asked, or raise what went wrong there."""

    def close(self) -> None:
        """Nothing more will be asked."""


class Lane(Protocol):
    """What a device offers for copies that run beside its computation."""

    registers: bool  # whether it reads by itself only what was registered for it

    def staging(self, size: int) -> Tensor:
        """(size,) bytes of host memory that the device can copy to and from by itself."""

    def mark(self) -> "Mark":
        """Reached when the device has computed all that it was asked until now."""

    def copy(self, to: Tensor, source: Tensor, after: "Mark") -> "Mark":
        """Start a copy, not before `after`; the mark is reached when it is complete. Copies in one direction keep their
        order: who waits for the last one has waited for all."""

    def hold(self, until: "Mark") -> None:
        """The device computes nothing that is asked from now on before `until`."""

    def register(self, memory: Tensor) -> str | None:
        """Let the device read host memory where it lies, until it is garbage. Returns: why it cannot; None: it can."""

    def unregister(self, memory: Tensor) -> None:
        """Give back what was registered. No copy from it is under way."""


class Mark(Protocol):
    def synchronize(self) -> None:
        """Wait, on the host, until it is reached."""


class Home(Protocol):
    """Host memory from which weights are copied to the device, and in which the host steps them (`resident.py`)."""

    updates: list[Future[None]]
    read: "Mark | None"
    steps: int


class Staging:
    """The way up for host memory that the device cannot read by itself: in pieces, through slots that it can.

    Args: lane: the device's side; slot_bytes, slots: of the staging memory.
    """

    def __init__(self, lane: Lane, slot_bytes: int, slots: int) -> None:
        self.lane, self.slot_bytes = lane, slot_bytes
        self._slots = deque((lane.staging(slot_bytes), lane.mark()) for _ in range(slots))

    def send(self, source: Tensor, to: Tensor, after: Mark) -> Mark:
        """Copy all of it, waiting for slots. Returns: a mark that is reached when the last piece is there."""
        there = to.detach().view(-1)
        for start, piece in pieces(source, self.slot_bytes):
            slot, free = self._slots.popleft()
            free.synchronize()
            here = slot.view(piece.dtype)[: piece.numel()].copy_(piece)
            after = self.lane.copy(there[start : start + piece.numel()], here, after)
            self._slots.append((slot, after))
        return after


def pieces(tensor: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """(first element, what follows it), each of at most so many bytes."""
    flat, step = tensor.reshape(-1), size // tensor.element_size()
    return ((start, flat[start : start + step]) for start in range(0, flat.numel(), step))


class StagedLink(Link):
    """Through staging slots, with one thread of the host that does everything in the order in which it was asked.

    Args:
        lane: the device's side.
        slot_bytes, slots: of the staging memory, in each direction.
    """

    lends = True

    def __init__(self, lane: Lane, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self.lane, self.slot_bytes = lane, slot_bytes
        self._down: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(slots):
            self._down.put(lane.staging(slot_bytes))
        self._up = Staging(lane, slot_bytes, slots)
        self._coming: dict[int, Future[Mark]] = {}  # weights that are being updated, by id
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None  # from the first job to `close`, and again for a second fit

    def _ask(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="host-step")
            self._thread.start()
        self._jobs.put(job)

    def fetch(self, gradient: Tensor, take: Take) -> None:
        flat = gradient.reshape(-1)  # perhaps a copy, which the mark has to cover
        complete = self.lane.mark()
        for start, piece in pieces(flat, self.slot_bytes):
            slot = self._down.get()
            here = slot.view(piece.dtype)[: piece.numel()]
            landed = self.lane.copy(here, piece, complete)
            self._ask(
                lambda start=start, here=here, landed=landed, slot=slot: self._take(take, start, here, landed, slot)
            )
        self._raise()

    def _take(self, take: Take, start: int, here: Tensor, landed: Mark, slot: Tensor) -> None:
        try:
            landed.synchronize()
            if self._failed is None:
                take(start, here)
        finally:
            self._down.put(slot)

    def update(self, weight: Tensor, compute: Compute) -> None:
        read, coming = self.lane.mark(), Future()  # the device may still be reading the old weight
        self._coming[id(weight)] = coming

        def job() -> None:
            try:
                if self._failed is not None:
                    raise self._failed
                rounded = self._landing(weight)
                compute(rounded)
                coming.set_result(self._up.send(rounded, weight, read))
            except BaseException as error:
                coming.set_exception(error)
                raise

        self._ask(job)

    def at_home(self, home: "Home", compute: Callable[[], None]) -> None:
        done: Future[None] = Future()
        home.steps += 1
        home.updates.append(done)

        def job() -> None:
            try:
                if self._failed is not None:
                    raise self._failed
                if home.read is not None:
                    home.read.synchronize()
                compute()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
                raise

        self._ask(job)

    def _landing(self, weight: Tensor) -> Tensor:
        """One weight's size of host memory, the same for all of them."""
        if self._scratch.numel() < weight.nbytes:
            self._scratch = torch.empty(weight.nbytes, dtype=torch.uint8)
        return self._scratch[: weight.nbytes].view(weight.dtype).view(weight.shape)

    def wait(self, weight: Tensor) -> None:
        coming = self._coming.pop(id(weight), None)
        if coming is not None:
            self.lane.hold(coming.result())

    def finish(self) -> None:
        if self._thread is not None:
            done = threading.Event()
            self._jobs.put(done.set)
            done.wait()
        self._raise()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # told to whoever asks next; what was asked after it is not done
                self._failed = self._failed or error

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        for coming in self._coming.values():
            if coming.exception() is None:
                self.lane.hold(coming.result())  # whoever reads a weight from now on does not ask us first
        self._coming.clear()


class CudaLane:
    """Two copy streams of a CUDA device, one for each direction."""

    registers = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._registered: dict[int, weakref.finalize] = {}  # by address
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        return _recorded(torch.cuda.current_stream(self.device))

    def copy(self, to: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        stream = self._up if to.is_cuda else self._down
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        if source.is_cuda:  # its memory may be used again only when the copy is complete
            source.record_stream(stream)
        return _recorded(stream)

    def hold(self, until: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(until)

    def register(self, memory: Tensor) -> str | None:
        cudart, place = torch.cuda.cudart(), memory.data_ptr()
        with torch.cuda.device(self.device):
            code = cudart.cudaHostRegister(place, memory.nbytes, 0)
        if int(code):
            with suppress(RuntimeError):  # CUDA keeps the error for whoever launches a kernel next: that is us
                torch.ones(1, device=self.device)
            return cudart.cudaGetErrorString(code)
        self._registered[place] = weakref.finalize(memory, cudart.cudaHostUnregister, place)
        return None

    def unregister(self, memory: Tensor) -> None:
        self._registered.pop(memory.data_ptr())()


class AtOnceLane:
    """Of a CPU, where the device is the host: a copy is complete when it was asked for."""

    registers = False

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> "AtOnce":
        return AtOnce()

    def copy(self, to: Tensor, source: Tensor, after: Mark) -> "AtOnce":
        to.copy_(source)
        return AtOnce()

    def hold(self, until: Mark) -> None:
        pass


class AtOnce:
    def synchronize(self) -> None:
        pass


def lane_of(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else AtOnceLane()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def link_to(device: torch.device) -> Link:
    return StagedLink(CudaLane(device)) if device.type == "cuda" else Link()
