"""Copies gradients from the device to the host, runs the updates of the weights on the host in a thread, and copies the
new weights back. `HostOptimizer`, `MasterWeights`, `StreamedWeights` and `Edge` use the link.

    thread           work                                                                          copy stream
    autograd's       `fetch`: copies a gradient, in pieces, into free pinned staging slots         device to host
    "host-step"      receives each piece once it is on the host, and frees the slot (`Receive`);
                     runs the updates that `update` and `update_block` have queued;
                     copies new weights through other staging slots (`Staging`)                    host to device
    "gradients"      only if `ahead` is set: launches these copies in place of `fetch`             device to host
    training         queues updates; `wait`: before a module reads a weight, blocks until the host has
                     updated the weight, and makes the device wait for the copy

In the other modules of this folder, "the host thread" is the "host-step" thread. The training thread queues updates
after backward; autograd's thread queues early updates (`HostOptimizer`). With weights.order=by_layer the thread of the
micro-batch runs forward and backward, calls `wait` and `fetch`, and queues early updates. At the end of the window the
training thread calls `fetch` for the sums of gradients that no micro-batch has sent.

The staging slots have a fixed total size. If the device is faster than the host, `fetch` blocks until a slot is free,
so the bytes on their way to the host are limited. If gradients come in bursts (`by_layer.py`), the "gradients"
thread waits for the slots instead, and `fetch` blocks only while more than `ahead` bytes of gradients wait on the
device. The host thread runs all jobs in the order of the calls; if the "gradients" thread exists, all jobs pass through
its queue first. Streamed weights are not copied back after an update: they are updated in place in their `HostBlock`,
and copied to the device before their next use.

On a CPU, device and host share their memory, and `Link` does the work immediately and in place, without copies or
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

# Size in bytes and number of the staging slots in each direction. The size is a power of two, because torch's allocator
# of pinned memory rounds sizes up to a power of two.
SLOT_BYTES, SLOTS = 1 << 25, 4

Receive = Callable[[int, Tensor], None]  # called with (index of the first element, flat piece in host memory)
Compute = Callable[[Tensor], None]  # writes the new weight into its argument, a host tensor
Job = Callable[[], None]  # work for the host thread


class Link:
    """The interface of a link, and the link of a CPU. The CPU is both device and host, so all work is done in place,
    before the call returns."""

    # True: a piece that `Receive` gets is in staging memory, which is overwritten after the call, so the piece must be
    # copied
    lends = False
    # bytes of gradients that may wait on the device for a staging slot after `fetch` has returned; 0: `fetch` itself
    # waits for the slots. Set this before the first job, which starts the threads.
    ahead = 0

    def fetch(self, gradient: Tensor, receive: Receive) -> None:
        """Copies a gradient to the host. Raises the first error of the link's threads, if any.

        Args:
            gradient: the gradient on the device.
            receive: called for each piece of the gradient, in order; on a card by the host thread.
        """
        receive(0, gradient.reshape(-1))

    def update(self, weight: Tensor, compute: Compute) -> None:
        """Queues the update of a weight that is not streamed. After all work that was queued earlier, `compute` writes
        the new value, which is then copied to the device.

        Args:
            weight: the weight on the device.
            compute: writes the new value into its argument, a host tensor of the weight's shape and dtype.
        """
        compute(weight.detach())

    def update_block(self, host_block: HostBlock, compute: Callable[[], None]) -> None:
        """Queues the update of a streamed weight. After all work that was queued earlier, and after the last copy from
        the host block to the device, `compute` changes the weight in its host block. Nothing is copied to the
        device."""
        host_block.steps += 1
        if host_block.last_copy is not None:
            host_block.last_copy.synchronize()
        compute()

    def wait(self, weight: Tensor) -> None:
        """Blocks until the host has computed the weight's last update, then makes the device wait for the copy of the
        new weight. A no-op for a streamed weight, or if no update of the weight is queued. Raises the error if this
        update, or work before it, failed."""

    def finish(self) -> None:
        """Blocks until the host has done all queued work. Raises the first error of the link's threads, even if an
        earlier call has already raised this error."""

    def close(self) -> None:
        """Waits for all queued work, ends the threads, and makes the device wait for the copies of new weights. Does
        not raise errors of the queued work."""


class Gradient(NamedTuple):
    """A gradient that `StagedLink` copies to the host.

    Args:
        flat: the gradient on the device, one-dimensional.
        receive: called by the host thread for each piece.
        complete: reached once the device has computed the gradient.
    """

    flat: Tensor
    receive: Receive
    complete: Mark


class FileBytes(Protocol):
    """The bytes of a tensor that is in a file instead of host memory."""

    nbytes: int

    def read(self, start: int, into: Tensor) -> None:
        """Reads bytes into a buffer. Args: start: offset of the first byte, a multiple of the page size; into:
        (bytes,), page-aligned; its size is a multiple of the page size."""


class Staging:
    """Copies host memory that is not pinned, or bytes of a file, to the device in pieces, through pinned staging slots.
    Only one thread may call the methods: the host thread in `StagedLink`, the "staging" thread in `Registered`.

    Args:
        lane: the device's copy streams.
        slot_bytes: size of a slot in bytes.
        slots: number of slots.
    """

    def __init__(self, lane: Lane, slot_bytes: int, slots: int) -> None:
        self.lane, self.slot_bytes = lane, slot_bytes
        self._slots = deque((_from_a_page(lane, slot_bytes), lane.mark()) for _ in range(slots))

    def send(self, source: Tensor, to: Tensor, after: Mark) -> Mark:
        """Copies a tensor to the device. Returns as soon as the copy of the last piece is queued.

        Args:
            source: the tensor in host memory.
            to: the target on the device, contiguous, with the size and dtype of `source`.
            after: the first piece is copied to the device once this mark is reached.

        Returns:
            A mark that is reached when the last piece is on the device.
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
        """Copies bytes of a file to the device, like `send`. Args: source: the file; to: (bytes,), on the device;
        after: see `send`."""
        for start, piece in pieces(to, self.slot_bytes):
            slot, free = self._slots.popleft()
            free.synchronize()
            source.read(start, slot[: full_pages(piece.numel())])
            after = self.lane.copy(piece, slot[: piece.numel()], after)
            self._slots.append((slot, after))
        return after


def _from_a_page(lane: Lane, size: int) -> Tensor:
    """Returns page-aligned staging memory. Pinned memory is page-aligned, but the staging memory of a CPU may not
    be."""
    memory = lane.staging(size)
    if memory.data_ptr() % PAGE == 0:
        return memory
    memory = lane.staging(size + PAGE)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def pieces(tensor: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Splits a tensor into flat pieces of at most `size` bytes. Yields (index of the piece's first element, piece), in
    order."""
    flat, step = tensor.reshape(-1), size // tensor.element_size()
    return ((start, flat[start : start + step]) for start in range(0, flat.numel(), step))


class StagedLink(Link):
    """The link to a device with separate memory, through pinned staging slots. For the threads see the module's
    docstring.

    Args:
        lane: the device's copy streams.
        slot_bytes: size of a staging slot in bytes.
        slots: number of staging slots in each direction.
    """

    lends = True

    def __init__(self, lane: Lane, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self.lane, self.slot_bytes = lane, slot_bytes
        self._down: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(slots):
            self._down.put(lane.staging(slot_bytes))
        self._up = Staging(lane, slot_bytes, slots)
        # id of a weight -> future that gets a mark when the copy of the weight's new value is queued; the mark is
        # reached when the copy is complete
        self._coming: dict[int, Future[Mark]] = {}
        # queues of the two threads; None ends the thread
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # for "host-step": pieces and updates
        self._leaving: queue.SimpleQueue[Gradient | Job | None] = queue.SimpleQueue()  # for "gradients"
        # bytes of each gradient that the "gradients" thread has finished: all copies are launched, or one has failed
        self._sent: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiting = 0  # upper bound of the bytes of gradients that still wait on the device
        self._failed: BaseException | None = None  # the first error of a thread
        self._scratch = torch.empty(0, dtype=torch.uint8)  # memory of `_landing`
        # the threads run from the first job until `close`; a later job starts new threads
        self._threads: list[threading.Thread] = []

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
        flat = gradient.reshape(-1)  # may launch a copy on the device, so record the mark after this line
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
        """Runs in the "gradients" thread: launches the copies of gradients, and forwards all other jobs to "host-step",
        in the order of the calls."""
        while (job := self._leaving.get()) is not None:
            if not isinstance(job, Gradient):
                self._jobs.put(job)
                continue
            try:
                self._send(job)
            except BaseException as error:
                self._failed = self._failed or error
            self._sent.put(job.flat.nbytes)
            del job  # otherwise the gradient's memory would stay allocated until the next job
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
        read, coming = self.lane.mark(), Future()  # `read` is reached when queued kernels have read the old weight
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
        """Returns host scratch memory with the weight's shape and dtype. All weights can share this memory, because the
        host thread updates one weight at a time, and `Staging.send` returns only after it has copied the memory into
        staging slots."""
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
            except BaseException as error:  # later calls of `fetch` and `finish` raise it; later jobs compute nothing
                self._failed = self._failed or error

    def close(self) -> None:
        if self._threads:
            self._ask(None)
            for thread in self._threads:
                thread.join()
            self._threads = []
        for coming in self._coming.values():
            if coming.exception() is None:
                self.lane.hold(coming.result())  # code that runs after `close` reads weights without calling `wait`
        self._coming.clear()


def link_to(device: torch.device) -> Link:
    return StagedLink(CardLane(device)) if device.type in CARDS else Link()
