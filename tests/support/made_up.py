"""Stand-ins for parts of a card: copy lanes with delayed copies or a simulated clock, an allocator with made-up
numbers, and a message from NCCL."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch

# the message that NCCL's watchdog prints before the watchdog ends a rank
WATCHDOG = (
    "[rank1]:[E ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)


class SlowLane:
    """A copy lane that runs its copies later, one after another, in a separate thread. Computation is synchronous."""

    registers = True

    def __init__(self):
        self.copies, self.moved = ThreadPoolExecutor(1), 0
        self.registered = Counter()  # address -> number of registrations

    def staging(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def mark(self):
        return Reached(None)

    def copy(self, to, source, after):
        self.moved += to.nbytes

        def late():
            after.synchronize()
            time.sleep(0.0005)
            with torch.no_grad():
                to.copy_(source)

        return Reached(self.copies.submit(late))

    def hold(self, until):
        until.synchronize()

    def register(self, memory):
        self.registered[memory.data_ptr()] += 1

    def unregister(self, memory):
        self.registered[memory.data_ptr()] -= 1


class LateLane(SlowLane):
    """A copy lane that runs its copies in four threads after random delays, so that a copy may overtake another unless
    it waits for an event."""

    def __init__(self, seed):
        super().__init__()
        self.copies, self.draw = ThreadPoolExecutor(4), random.Random(seed)

    def copy(self, to, source, after):
        self.moved += to.nbytes
        delay = self.draw.random() * 0.003

        def late():
            after.synchronize()
            time.sleep(delay)
            with torch.no_grad():
                to.copy_(source)

        return Reached(self.copies.submit(late))


class ClockLane:
    """A copy lane with a simulated clock. Copying a block takes `copying` units of time. Blocks are copied one after
    another. `computes` advances the clock by the duration of a computation. The host never runs ahead of the device,
    which is the worst case for prefetching."""

    registers = False

    def __init__(self, copying):
        self.copying, self.now, self.link_free, self.waits = copying, 0.0, 0.0, 0

    def computes(self, duration):
        self.now += duration

    def staging(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def mark(self):
        return At(self.now)

    def copy(self, to, source, after):
        to.copy_(source)
        if to.dtype != torch.uint8:  # rows of the embedding: few bytes, so no time passes
            return At(self.now)
        self.link_free = max(self.link_free, self.now, after.time) + self.copying
        return At(self.link_free)

    def hold(self, until):
        self.waits += until.time > self.now
        self.now = max(self.now, until.time)


class At:
    def __init__(self, time):
        self.time = time

    def synchronize(self):
        pass


class Reached:
    def __init__(self, future):
        self.future = future

    def synchronize(self):
        if self.future is not None:
            self.future.result()


class Allocator:
    """Stands in for the CUDA allocator. Every query increases the allocated peak by 100 bytes, and the reserved peak by
    200 bytes."""

    peak, resets = 10**9, 0

    def stats(self, device):
        self.peak += 100
        keys = [f"{kind}_bytes.all.{which}" for kind in ("allocated", "reserved") for which in ("current", "peak")]
        return dict(zip(keys, (10, self.peak, 20, 2 * self.peak), strict=True)) | {
            "num_alloc_retries": 3,
            "num_ooms": 1,
        }

    def reset(self, device):
        self.resets += 1

    def install(self, monkeypatch):
        """Makes the memory meter query this allocator, as if runs were on a card. The end of the test restores the
        meter."""
        from lowmem.memory.meter import MemoryMeter  # imported here, because it imports Lightning

        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        start = MemoryMeter.on_train_start

        def on_cuda(meter, trainer, module):
            start(meter, trainer, module)
            meter._cuda = torch.device("cuda")

        monkeypatch.setattr(MemoryMeter, "on_train_start", on_cuda)
