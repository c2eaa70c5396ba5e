"""Registers host memory in place, so that the device itself reads the weights that stream from it.

Registering needs no second copy and rounds nothing up, as an allocator of pinned memory would. Registered pages count
as locked: where `ulimit -l` limits them (in a container, as a rule) they must be within it. A machine with several NUMA
nodes reads fastest from the card's node: start the run under `numactl --cpunodebind=N --membind=N`.

Memory that cannot be registered is copied by a host thread, piece by piece, into two pinned slots, and from there to
the device, so that the training loop never waits for a copy on the host.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from lowmem.offload.copy_lanes import Lane, Mark
from lowmem.offload.link import SLOT_BYTES, Source, Staging
from lowmem.system.torch_private import storage_key
from lowmem.system.units import GIB, MIB

log = logging.getLogger(__name__)
SLOTS = 2  # one is filled while the device empties the other


class Registered:
    """A lane for copies from given host memory. Args: memory: registered until `close`; slot_bytes: of the staging
    memory; reads: some sources are not in memory."""

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
                f"buffers of {slot_bytes / MIB:.0f} MiB and run at about half the speed."
            )
        self._through_thread = reads or bool(self._unregistered)
        if self._through_thread:
            self._staging, self._thread = Staging(lane, slot_bytes, SLOTS), ThreadPoolExecutor(1, "staging")

    def staging(self, size: int) -> Tensor:
        return self.lane.staging(size)

    def mark(self) -> Mark:
        return self.lane.mark()

    def copy(self, to: Tensor, source: Tensor | Source, after: Mark) -> Mark:
        if self._through_thread:  # one thread does all copies, so that they keep their order
            self._last = Coming(self._thread.submit(self._send, to, source, after))
        else:
            self._last = self.lane.copy(to, source, after)
        return self._last

    def _send(self, to: Tensor, source: Tensor | Source, after: Mark) -> Mark:
        if not isinstance(source, Tensor):
            return self._staging.read(source, to, _queued(after))
        if storage_key(source) in self._unregistered:
            return self._staging.send(source, to, _queued(after))
        return self.lane.copy(to, source, _queued(after))

    def hold(self, until: Mark) -> None:
        self.lane.hold(_queued(until))

    def close(self) -> None:
        """Unregisters everything, once all copies are complete."""
        try:
            self._last.synchronize()
        finally:
            if self._through_thread:
                self._thread.shutdown()
            while self._memory:
                self.lane.unregister(self._memory.pop())


class Coming:
    """The mark of a copy that the thread has not yet given to the device."""

    def __init__(self, queued: Future[Mark]) -> None:
        self.queued = queued

    def synchronize(self) -> None:
        self.queued.result().synchronize()


def _queued(mark: Mark) -> Mark:
    return mark.queued.result() if isinstance(mark, Coming) else mark
