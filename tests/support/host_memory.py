"""Reads how much memory a test takes: of the process, and of live tensors."""

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
    """Bytes of this process: RssAnon (its own memory) or RssFile (pages of mapped files)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


def mapped_from(size):
    """Bytes of an allocation that is not taken from the heap (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, size)  # M_MMAP_THRESHOLD


class Highest:
    """Measures the highest `RssAnon` while it is entered, above that at its start. Tensors come from the system and go
    back to it: memory that others in this process have freed is not resident, nor is it freed meanwhile."""

    def __enter__(self):
        gc.collect()
        trim()  # what is free in the heap is taken before anything is mapped, and must not be resident already
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
    """Live bytes at the highest point of forward and backward, weights and gradients left out."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    outside = [t for p in [*model.parameters(), *inputs] for t in (p, p.grad) if t is not None]
    ledger = Ledger()
    ledger.own("weights", lambda: outside, "host")
    with StorageTracker(ledger.storages()) as tracker:
        forward().backward()
    return max(point.total for point in tracker.timeline())
