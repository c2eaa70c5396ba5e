"""Moves gradients from the device to the host, and new weights back; weights that stream stay on the host.

On CUDA everything is asynchronous. A gradient is copied in pieces into pinned staging slots of fixed total size, on a
stream of its own. One host thread takes each piece as soon as it has arrived and frees its slot; so a device that is
faster than the host waits for a slot, and does not fill the host's memory. If gradients come in bursts (`by_layer.py`),
some bytes of them may wait on the device instead, for a second thread that sends them. The host thread also steps the
optimizer and sends the new weights back through other slots; before the device reads a weight, it waits for that weight
alone. Weights that stream are stepped where they are, in their host block, and copied from there before their block
computes.

On a CPU the device is the host: the same calls do the same work at once and in place, and nothing is copied.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lowmem.offload.copy_lanes import CARDS, CardLane, Lane, Mark
from lowmem.offload.host_block import HostBlock
from lowmem.system.scratch_file import PAGE
from lowmem.system.scratch_file import pages as full_pages

# in each direction; a power of two, to which torch's allocator of pinned memory rounds up
SLOT_BYTES, SLOTS = 1 << 25, 4

Take = Callable[[int, Tensor], None]  # (first element, the elements from there on), in host memory
Compute = Callable[[Tensor], None]  # writes the new weight into its argument
Job = Callable[[], None]  # of the host thread


class Link:
    """The link where device and host are one: everything happens in place and at once."""

    lends = False  # True if a piece is overwritten once `take` has returned
    # bytes of gradients that may wait on the device for a slot, while it computes; set before the first gradient leaves
    ahead = 0

    def fetch(self, gradient: Tensor, take: Take) -> None:
        """Brings a gradient to the host; `take` gets it in pieces, in order."""
        take(0, gradient.reshape(-1))

    def update(self, weight: Tensor, compute: Compute) -> None:
        """Computes a new weight on the host, after all work queued before it, and brings it to the device."""
        compute(weight.detach())

    def update_block(self, host_block: HostBlock, compute: Callable[[], None]) -> None:
        """Computes new weights in their host block, after all work queued before it. They stay there for now."""
        host_block.steps += 1
        if host_block.last_copy is not None:
            host_block.last_copy.synchronize()
        compute()

    def wait(self, weight: Tensor) -> None:
        """Waits, before the device reads a weight, until its last update has arrived."""

    def finish(self) -> None:
        """Returns when the host has done all its work, or raises the error that it met."""

    def close(self) -> None:
        """Ends the link: no more work follows."""


class Gradient(NamedTuple):
    """A gradient that leaves. Args: flat: on the device; complete: reached when it is computed."""

    flat: Tensor
    take: Take
    complete: Mark


class Source(Protocol):
    """Bytes that are not in memory."""

    nbytes: int

    def read(self, start: int, into: Tensor) -> None:
        """Reads bytes from `start` on. Args: into: (bytes,), beginning at a page and ending with one."""


class Staging:
    """Copies what the device cannot read by itself: in pieces, through slots that it can read.

    Args: lane: the device's side; slot_bytes, slots: of the staging memory.
    """

    def __init__(self, lane: Lane, slot_bytes: int, slots: int) -> None:
        self.lane, self.slot_bytes = lane, slot_bytes
        self._slots = deque((_from_a_page(lane, slot_bytes), lane.mark()) for _ in range(slots))

    def send(self, source: Tensor, to: Tensor, after: Mark) -> Mark:
        """Copies a tensor, and waits for free slots. Returns: a mark that is reached when the last piece has
        arrived."""
        target = to.detach().view(-1)
        for start, piece in pieces(source, self.slot_bytes):
            slot, free = self._slots.popleft()
            free.synchronize()
            staged = slot.view(piece.dtype)[: piece.numel()].copy_(piece)
            after = self.lane.copy(target[start : start + piece.numel()], staged, after)
            self._slots.append((slot, after))
        return after

    def read(self, source: Source, to: Tensor, after: Mark) -> Mark:
        """Copies what a source reads to `to`, (bytes,), as `send` copies a tensor."""
        for start, piece in pieces(to, self.slot_bytes):
            slot, free = self._slots.popleft()
            free.synchronize()
            source.read(start, slot[: full_pages(piece.numel())])
            after = self.lane.copy(piece, slot[: piece.numel()], after)
            self._slots.append((slot, after))
        return after


def _from_a_page(lane: Lane, size: int) -> Tensor:
    """Returns staging memory that begins at a page. A card's does so by itself."""
    memory = lane.staging(size)
    if memory.data_ptr() % PAGE == 0:
        return memory
    memory = lane.staging(size + PAGE)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def pieces(tensor: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (first element, the elements from there on), in pieces of at most `size` bytes."""
    flat, step = tensor.reshape(-1), size // tensor.element_size()
    return ((start, flat[start : start + step]) for start in range(0, flat.numel(), step))


class StagedLink(Link):
    """The link to a device with memory of its own: staging slots, and one host thread that does all work in the order
    of the calls.

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
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # of the host thread
        self._leaving: queue.SimpleQueue[Gradient | Job | None] = queue.SimpleQueue()  # before them, if `ahead` is set
        self._sent: queue.SimpleQueue[int] = queue.SimpleQueue()  # bytes of those that have left
        self._waiting = 0  # bytes of gradients that have been fetched, and are not known to have left
        self._failed: BaseException | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._threads: list[threading.Thread] = []  # run from the first job to `close`, and again for a second fit

    def _start(self) -> None:
        if self._threads:
            return
        loops = {"host-step": self._work} | ({"gradients": self._send_all} if self.ahead else {})
        self._threads = [threading.Thread(target=loop, daemon=True, name=name) for name, loop in loops.items()]
        for thread in self._threads:
            thread.start()

    def _ask(self, job: Gradient | Job | None) -> None:
        self._start()
        (self._leaving if self.ahead else self._jobs).put(job)

    def fetch(self, gradient: Tensor, take: Take) -> None:
        flat = gradient.reshape(-1)  # this may copy; the mark has to cover the copy
        leaving = Gradient(flat, take, self.lane.mark())
        if self.ahead:
            self._ask(leaving)
            self._waiting += flat.nbytes
            while self._waiting > self.ahead:
                self._waiting -= self._sent.get()
        else:
            self._start()
            self._send(leaving)
        self._raise()

    def _send(self, gradient: Gradient) -> None:
        for start, piece in pieces(gradient.flat, self.slot_bytes):
            slot = self._down.get()
            host = slot.view(piece.dtype)[: piece.numel()]
            landed = self.lane.copy(host, piece, gradient.complete)
            self._jobs.put(partial(self._take, gradient.take, start, host, landed, slot))

    def _send_all(self) -> None:
        """Sends gradients in a thread of its own, and hands on other jobs: all keep their order."""
        while (job := self._leaving.get()) is not None:
            if not isinstance(job, Gradient):
                self._jobs.put(job)
                continue
            try:
                self._send(job)
            except BaseException as error:
                self._failed = self._failed or error
            self._sent.put(job.flat.nbytes)
            del job  # its memory is free as soon as its copy has run
        self._jobs.put(None)

    def _take(self, take: Take, start: int, host: Tensor, landed: Mark, slot: Tensor) -> None:
        try:
            landed.synchronize()
            if self._failed is None:
                take(start, host)
        finally:
            self._down.put(slot)

    def update(self, weight: Tensor, compute: Compute) -> None:
        assert id(weight) not in self._coming, "a forward pass did not wait for this weight's last update"
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

    def update_block(self, host_block: HostBlock, compute: Callable[[], None]) -> None:
        done: Future[None] = Future()
        host_block.steps += 1
        host_block.updates.append(done)

        def job() -> None:
            try:
                if self._failed is not None:
                    raise self._failed
                if host_block.last_copy is not None:
                    host_block.last_copy.synchronize()
                compute()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
                raise

        self._ask(job)

    def _landing(self, weight: Tensor) -> Tensor:
        """Returns host memory of one weight's size, the same for all weights."""
        if self._scratch.numel() < weight.nbytes:
            self._scratch = torch.empty(weight.nbytes, dtype=torch.uint8)
        return self._scratch[: weight.nbytes].view(weight.dtype).view(weight.shape)

    def wait(self, weight: Tensor) -> None:
        coming = self._coming.pop(id(weight), None)
        if coming is not None:
            self.lane.hold(coming.result())

    def finish(self) -> None:
        if self._threads:
            done = threading.Event()
            self._ask(done.set)
            done.wait()
        self._raise()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # the next call raises it; later jobs are not done
                self._failed = self._failed or error

    def close(self) -> None:
        if self._threads:
            self._ask(None)
            for thread in self._threads:
                thread.join()
            self._threads = []
        for coming in self._coming.values():
            if coming.exception() is None:
                self.lane.hold(coming.result())  # from now on weights are read without asking this link first
        self._coming.clear()


def link_to(device: torch.device) -> Link:
    return StagedLink(CardLane(device)) if device.type in CARDS else Link()
