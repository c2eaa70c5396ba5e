"""Measures the resident memory of the process, and the bytes of live tensors."""

import ctypes
import gc
import threading
from pathlib import Path

import pytest
import torch

from lowmem.memory.ledger import Ledger
from lowmem.memory.tracker import StorageTracker
from lowmem.system.process import trim

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc tells what is resident")


def resident(kind):
    """Returns the resident bytes of this process. Args: kind: "RssAnon" (anonymous memory) or "RssFile" (mapped
    files)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


def mapped_from(size):
    """Sets the smallest size in bytes for which malloc maps new memory instead of using the heap. A no-op without
    glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, size)  # M_MMAP_THRESHOLD


class Highest:
    """Context manager that measures `rise`, the largest increase of `RssAnon` above its value at the start, in bytes.
    First trims the heap and makes malloc map large tensors, so that memory that earlier tests freed does not change the
    result."""

    def __enter__(self):
        gc.collect()
        trim()  # otherwise malloc would reuse free heap memory that is already resident
        mapped_from(1 << 18)
        self.rise, self.over, start = 0, threading.Event(), resident("RssAnon")

        def watch():
            while not self.over.wait(0.001):
                self.rise = max(self.rise, resident("RssAnon") - start)

        self.thread = threading.Thread(target=watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        mapped_from(1 << 25)


def peak(model, forward, inputs=()):
    """Returns the peak of the bytes of live tensors during `forward` and its backward pass, without weights, `inputs`
    and their gradients."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    outside = [t for p in [*model.parameters(), *inputs] for t in (p, p.grad) if t is not None]
    ledger = Ledger()
    ledger.own("weights", lambda: outside, "host")
    with StorageTracker(ledger.storages()) as tracker:
        forward().backward()
    return max(point.total for point in tracker.timeline())
