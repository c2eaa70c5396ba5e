"""Pins existing host memory with cudaHostRegister, so that the device copies streamed weights directly from it.

Registering memory in place needs no second copy, and does not round sizes up to a power of two as torch's allocator of
pinned memory does. Registered pages count as locked memory, so `ulimit -l` (often low in containers) must allow them.
On a machine with several NUMA nodes, copies are fastest from the card's node: start the run under
`numactl --cpunodebind=N --membind=N`.

Memory that cannot be registered, and weights on a drive, need one more thread:

    registered        host memory -----------------------------------------> device    started by the training thread
    not registered    host memory or drive -> two pinned staging buffers --> device    done by the thread "staging"

The staging thread copies piece by piece, so the training thread never waits for a copy on the host. It then starts
all copies, also from registered memory, so that copies keep their order.
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
SLOTS = 2  # the host fills one staging buffer while the device reads the other buffer


class Registered:
    """A `Lane` for copies from pinned host memory to the device.

    Args:
        lane: the device's copy streams.
        memory: host memory to register until `close`.
        slot_bytes: size of each staging buffer.
        reads: some sources are on a drive, not in memory.
    """

    def __init__(self, lane: Lane, memory: Sequence[Tensor], slot_bytes: int = SLOT_BYTES, reads: bool = False) -> None:
        self.lane, start = lane, time.perf_counter()
        self._last = lane.mark()  # reached when all copies are complete, since they keep their order
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
        if self._through_thread:  # one thread does all copies, so that they keep their order
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
        """Waits for all copies, then unregisters the memory."""
        try:
            self._last.synchronize()
        finally:
            if self._through_thread:
                self._thread.shutdown()
            while self._memory:
                self.lane.unregister(self._memory.pop())


class Coming:
    """A `Mark` for a copy that the staging thread may not have started yet. Args: queued: the copy's own mark."""

    def __init__(self, queued: Future[Mark]) -> None:
        self.queued = queued

    def synchronize(self) -> None:
        self.queued.result().synchronize()


def _queued(mark: Mark) -> Mark:
    return mark.queued.result() if isinstance(mark, Coming) else mark
