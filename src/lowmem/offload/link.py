"""Copies gradients from the device to the host, runs optimizer steps there, and copies new weights back.

    thread           work                                                                          copy stream
    autograd's       `fetch`: copies a gradient, in pieces, into free pinned staging slots         device to host
    "host-step"      receives each piece once it has arrived, and frees the slot (`Receive`);
                     steps weights (`update`, `update_block`);
                     sends new weights through other staging slots (`Staging`)                     host to device
    "gradients"      only if `ahead` is set: does the copies of `fetch`, which returns earlier     device to host
    training         `wait`: makes the device wait for one weight before a module reads it

The staging slots have a fixed total size. A device that is faster than the host waits for a free slot, so gradients
cannot fill the host's memory. If gradients come in bursts (`by_layer.py`), up to `ahead` bytes of them may queue on the
device instead. Jobs have one order, the order of the calls: if the "gradients" thread exists, all jobs pass through its
queue first. Streamed weights are not sent back after a step: they are stepped in place in their `HostBlock`, and copied
from there before their block computes.

On a CPU, device and host share their memory: `Link` does the same work immediately and in place, without copies or
threads.
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

# size and number of staging slots in each direction; torch's pinned allocator rounds sizes up to a power of two
SLOT_BYTES, SLOTS = 1 << 25, 4

Receive = Callable[[int, Tensor], None]  # receives (index of the first element, flat piece in host memory)
Compute = Callable[[Tensor], None]  # writes the new weight into its argument
Job = Callable[[], None]  # work for the host thread


class Link:
    """The link of a CPU, which is device and host: all work is done in place, before the call returns."""

    lends = False  # True: pieces are in staging memory, which is overwritten once `receive` has returned
    # bytes of gradients that may queue on the device for a staging slot; set before the first gradient is sent
    ahead = 0

    def fetch(self, gradient: Tensor, receive: Receive) -> None:
        """Sends a gradient to the host. Args: gradient: the gradient on the device; receive: receives its pieces, in
        order."""
        receive(0, gradient.reshape(-1))

    def update(self, weight: Tensor, compute: Compute) -> None:
        """Computes a new weight on the host after all work queued before, and copies it to the device. Args: weight: on
        the device; compute: writes the new weight into its argument, a host tensor of the weight's shape and
        dtype."""
        compute(weight.detach())

    def update_block(self, host_block: HostBlock, compute: Callable[[], None]) -> None:
        """Updates weights in place in their host block, after all work queued before. Nothing is copied to the
        device."""
        host_block.steps += 1
        if host_block.last_copy is not None:
            host_block.last_copy.synchronize()
        compute()

    def wait(self, weight: Tensor) -> None:
        """Makes the device wait until the weight's last update has arrived."""

    def finish(self) -> None:
        """Waits until the host has done all queued work. Raises the first error of that work."""

    def close(self) -> None:
        """Finishes the queued work and ends the threads."""


class Gradient(NamedTuple):
    """A gradient to send. Args: flat: the gradient on the device, one-dimensional; receive: receives its pieces on the
    host; complete: reached once the device has computed the gradient."""

    flat: Tensor
    receive: Receive
    complete: Mark


class FileBytes(Protocol):
    """Bytes that are read from a file instead of memory."""

    nbytes: int

    def read(self, start: int, into: Tensor) -> None:
        """Reads bytes into a buffer. Args: start: offset of the first byte; into: (bytes,), page-aligned at both
        ends."""


class Staging:
    """Copies memory that is not pinned, or bytes of a file, to the device: in pieces, through pinned staging slots.

    Args:
        lane: the device's copy streams.
        slot_bytes: size of a slot.
        slots: number of slots.
    """

    def __init__(self, lane: Lane, slot_bytes: int, slots: int) -> None:
        self.lane, self.slot_bytes = lane, slot_bytes
        self._slots = deque((_from_a_page(lane, slot_bytes), lane.mark()) for _ in range(slots))

    def send(self, source: Tensor, to: Tensor, after: Mark) -> Mark:
        """Copies a tensor to the device; blocks while no slot is free.

        Args:
            source: in host memory.
            to: on the device, contiguous, of the same size and dtype.
            after: the first copy starts once this mark is reached.

        Returns:
            A mark that is reached when the last piece has arrived.
        """
        target = to.detach().view(-1)
        for start, piece in pieces(source, self.slot_bytes):
            slot, free = self._slots.popleft()
            free.synchronize()
            staged = slot.view(piece.dtype)[: piece.numel()].copy_(piece)
            after = self.lane.copy(target[start : start + piece.numel()], staged, after)
            self._slots.append((slot, after))
        return after

    def read(self, source: FileBytes, to: Tensor, after: Mark) -> Mark:
        """Copies the bytes of a source to the device, like `send`. Args: to: (bytes,), on the device."""
        for start, piece in pieces(to, self.slot_bytes):
            slot, free = self._slots.popleft()
            free.synchronize()
            source.read(start, slot[: full_pages(piece.numel())])
            after = self.lane.copy(piece, slot[: piece.numel()], after)
            self._slots.append((slot, after))
        return after


def _from_a_page(lane: Lane, size: int) -> Tensor:
    """Returns page-aligned staging memory. Pinned memory of a card is always page-aligned."""
    memory = lane.staging(size)
    if memory.data_ptr() % PAGE == 0:
        return memory
    memory = lane.staging(size + PAGE)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def pieces(tensor: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (index of the first element, flat piece of at most `size` bytes) until the tensor ends."""
    flat, step = tensor.reshape(-1), size // tensor.element_size()
    return ((start, flat[start : start + step]) for start in range(0, flat.numel(), step))


class StagedLink(Link):
    """The link to a device with separate memory: pinned staging slots, and a host thread that does all work in the
    order of the calls. The docstring of the module describes the threads.

    Args:
        lane: the device's copy streams.
        slot_bytes: size of a staging slot.
        slots: number of staging slots in each direction.
    """

    lends = True

    def __init__(self, lane: Lane, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self.lane, self.slot_bytes = lane, slot_bytes
        self._down: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(slots):
            self._down.put(lane.staging(slot_bytes))
        self._up = Staging(lane, slot_bytes, slots)
        self._coming: dict[int, Future[Mark]] = {}  # id of a weight -> reached once its update is on the device
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # queue of "host-step": pieces and updates
        self._leaving: queue.SimpleQueue[Gradient | Job | None] = queue.SimpleQueue()  # queue of "gradients"
        self._sent: queue.SimpleQueue[int] = queue.SimpleQueue()  # bytes of each gradient that "gradients" has sent
        self._waiting = 0  # bytes on the device of gradients that are queued in `_leaving`
        self._failed: BaseException | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._threads: list[threading.Thread] = []  # running from the first job to `close`; restarted for a second fit

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

    def fetch(self, gradient: Tensor, receive: Receive) -> None:
        flat = gradient.reshape(-1)  # may copy, so the mark is made after this line
        leaving = Gradient(flat, receive, self.lane.mark())
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
            self._jobs.put(partial(self._receive, gradient.receive, start, host, landed, slot))

    def _send_all(self) -> None:
        """The loop of the thread "gradients": sends gradients, and forwards other jobs to "host-step", in order."""
        while (job := self._leaving.get()) is not None:
            if not isinstance(job, Gradient):
                self._jobs.put(job)
                continue
            try:
                self._send(job)
            except BaseException as error:
                self._failed = self._failed or error
            self._sent.put(job.flat.nbytes)
            del job  # the allocator may reuse the gradient's memory as soon as the copy is done
        self._jobs.put(None)

    def _receive(self, receive: Receive, start: int, host: Tensor, landed: Mark, slot: Tensor) -> None:
        try:
            landed.synchronize()
            if self._failed is None:
                receive(start, host)
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
        """Returns scratch memory in the weight's shape and dtype. All weights share this memory."""
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
            except BaseException as error:  # the next call raises the error; later jobs are skipped
                self._failed = self._failed or error

    def close(self) -> None:
        if self._threads:
            self._ask(None)
            for thread in self._threads:
                thread.join()
            self._threads = []
        for coming in self._coming.values():
            if coming.exception() is None:
                self.lane.hold(coming.result())  # later code reads weights without calling `wait`
        self._coming.clear()


def link_to(device: torch.device) -> Link:
    return StagedLink(CardLane(device)) if device.type in CARDS else Link()
