"""Pins the host memory of streamed weights with cudaHostRegister, and copies weights from host memory or a drive to the
device. `StreamedWeights` (`streamed.py`) and `Edge` (`edges.py`) use the class `Registered`.

cudaHostRegister pins memory in place. Torch's allocator of pinned memory would need a second copy of the weights, and
would round each size up to a power of two. Registered pages count as locked memory, so `ulimit -l` (often low in
containers) must allow them. On a machine with several NUMA nodes, copies are fastest from memory of the card's node:
start the run under `numactl --cpunodebind=N --membind=N`.

Copies from memory that cannot be registered, and from a drive, need an additional thread:

    registered        host memory -----------------------------------------> device    started by the calling thread
    not registered    host memory or drive -> two pinned staging buffers --> device    started by the "staging" thread

The "staging" thread copies piece by piece, while `copy` returns immediately. `hold` then blocks the calling thread
until the "staging" thread has launched the last piece of the copy. If the "staging" thread exists, it starts all other
copies, too, so that all copies keep their order.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from lowmem.offload.copy_lanes import Lane, Mark
from lowmem.offload.link import SLOT_BYTES, FileBytes, Staging
from lowmem.system.torch_private import storage_key
from lowmem.system.units import GIB, MIB

log = logging.getLogger(__name__)
SLOTS = 2  # number of staging buffers: the host fills one while the device reads the other


class Registered:
    """Copies weights from host memory or a drive to the device. Has the methods `staging`, `mark`, `copy` and `hold` of
    a `Lane`.

    Args:
        lane: the device's copy streams.
        memory: host tensors to register. They stay registered until `close`.
        slot_bytes: size of each staging buffer in bytes.
        reads: True: some weights are on a drive, so the "staging" thread is needed.
    """

    def __init__(self, lane: Lane, memory: Sequence[Tensor], slot_bytes: int = SLOT_BYTES, reads: bool = False) -> None:
        self.lane, start = lane, time.perf_counter()
        # mark of the last copy; reached when all copies are complete, since copies keep their order
        self._last = lane.mark()
        results = [(tensor, lane.register(tensor)) for tensor in memory if lane.registers]
        self._memory = [tensor for tensor, why in results if why is None]
        refused = [(tensor, why) for tensor, why in results if why is not None]
        self._unregistered = {storage_key(tensor) for tensor, _ in refused}
        if self._memory:
            size, seconds = sum(tensor.nbytes for tensor in self._memory), time.perf_counter() - start
            log.info(f"Pinned {size / GIB:.1f} GiB of host memory (cudaHostRegister) in {seconds:.1f} s.")
        if self._unregistered:
            size, why = sum(tensor.nbytes for tensor, _ in refused), refused[0][1]
            log.warning(
                f"{size / GIB:.1f} GiB of host memory could not be pinned ({why}): copies use {SLOTS} pinned staging "
                f"buffers of {slot_bytes / MIB:.0f} MiB, which is slower."
            )
        self._through_thread = reads or bool(self._unregistered)
        if self._through_thread:
            self._staging, self._thread = Staging(lane, slot_bytes, SLOTS), ThreadPoolExecutor(1, "staging")

    def staging(self, size: int) -> Tensor:
        return self.lane.staging(size)

    def mark(self) -> Mark:
        return self.lane.mark()

    def copy(self, to: Tensor, source: Tensor | FileBytes, after: Mark) -> Mark:
        if self._through_thread:  # one thread starts all copies, so that the copies keep their order
            self._last = Coming(self._thread.submit(self._send, to, source, after))
        else:
            self._last = self.lane.copy(to, source, after)
        return self._last

    def _send(self, to: Tensor, source: Tensor | FileBytes, after: Mark) -> Mark:
        if not isinstance(source, Tensor):
            return self._staging.read(source, to, _queued(after))
        if storage_key(source) in self._unregistered:
            return self._staging.send(source, to, _queued(after))
        return self.lane.copy(to, source, _queued(after))

    def hold(self, until: Mark) -> None:
        self.lane.hold(_queued(until))

    def close(self) -> None:
        """Waits for all copies, ends the "staging" thread, and unregisters the memory. Raises the error of the last
        copy if it has failed."""
        try:
            self._last.synchronize()
        finally:
            if self._through_thread:
                self._thread.shutdown()
            while self._memory:
                self.lane.unregister(self._memory.pop())


class Coming:
    """The `Mark` of a copy that the "staging" thread may not have started yet. Args: queued: future of the mark that
    the lane returns for the copy."""

    def __init__(self, queued: Future[Mark]) -> None:
        self.queued = queued

    def synchronize(self) -> None:
        self.queued.result().synchronize()


def _queued(mark: Mark) -> Mark:
    return mark.queued.result() if isinstance(mark, Coming) else mark
