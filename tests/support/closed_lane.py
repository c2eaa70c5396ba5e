"""A copy lane that protects the source and the destination of a copy until the copy has run, so that the program
crashes if it accesses them too early.

Slots, host blocks and staging memory are mapped twice. The program uses the first mapping, and copies use the second. A
copy runs as late as possible, which is when the program waits for it. From the call of `copy` until the copy has run,
`mprotect` keeps the program's mapping of the destination inaccessible, and its mapping of the source read-only. An
access that comes too early causes a segmentation fault, and `faulthandler` writes the line of the access. Therefore
each case runs in a separate process.
"""

import ctypes
import faulthandler
import mmap
import os
import threading
from typing import ClassVar

import torch

from lowmem.offload.copy_lanes import AtOnceLane

CLOSED, READ, OPEN = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
FEW = 4  # every run has more buffers (slots, host blocks and staging memory) than this
LIBC = ctypes.CDLL(None, use_errno=True)


class Memory:
    """A buffer with two mappings, `tensor` for the program and `other` for copies. Args: size: bytes."""

    known: ClassVar[dict[int, "Memory"]] = {}  # address of the program's mapping -> buffer

    def __init__(self, size):
        self.bytes = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        handle = os.memfd_create("lane")
        os.ftruncate(handle, self.bytes)
        self.tensor, self.other = (
            torch.frombuffer(mmap.mmap(handle, self.bytes), dtype=torch.uint8)[:size] for _ in range(2)
        )
        self.writers = self.readers = 0
        self.known[self.tensor.untyped_storage().data_ptr()] = self

    @classmethod
    def of(cls, tensor):
        return cls.known.get(tensor.untyped_storage().data_ptr())

    def hidden(self, tensor):
        """Returns a view of the second mapping, with the offset, dtype and shape of a tensor in the first mapping."""
        start = tensor.storage_offset() * tensor.element_size()
        return self.other[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def count(self, writers, readers):
        self.writers += writers
        self.readers += readers
        access = CLOSED if self.writers else READ if self.readers else OPEN
        place = ctypes.c_void_p(self.tensor.untyped_storage().data_ptr())
        assert LIBC.mprotect(place, ctypes.c_size_t(self.bytes), access) == 0, os.strerror(ctypes.get_errno())


class Copy:
    """A copy that runs when the program waits for it, or for a later copy in the same direction.

    Args:
        before: the previous copy in this direction, or None.
        after: an event that the copy waits for.
    """

    def __init__(self, lane, to, source, before, after):
        self.lane, self.ends, self.before, self.after, self.done = lane, (to, source), before, after, False
        for tensor, counts in zip(self.ends, ((1, 0), (0, 1)), strict=True):
            if (memory := Memory.of(tensor)) is not None:
                memory.count(*counts)

    def synchronize(self):
        with self.lane.lock:
            if self.done:
                return
            for earlier in (self.before, self.after):
                if earlier is not None:
                    earlier.synchronize()
            self.done = True
            memories = [Memory.of(tensor) for tensor in self.ends]
            to, source = (
                tensor if memory is None else memory.hidden(tensor)
                for tensor, memory in zip(self.ends, memories, strict=True)
            )
            with torch.no_grad():
                to.copy_(source)
            for memory, counts in zip(memories, ((-1, 0), (0, -1)), strict=True):
                if memory is not None:
                    memory.count(*counts)
            self.ends = self.before = self.after = None


class ClosedLane(AtOnceLane):
    """The copy lane that the module's docstring describes. Args: registers: False makes `register` return an error
    message, as if memory could not be pinned."""

    registers = True

    def __init__(self, registers=True):
        self.lock, self.last, self.can_register = threading.RLock(), {True: None, False: None}, registers

    def staging(self, size):
        return Memory(size).tensor

    def copy(self, to, source, after):
        with self.lock:
            down = Memory.of(source) is None  # computed by the device, for example a gradient
            self.last[down] = Copy(self, to.detach(), source.detach(), self.last[down], after)
            return self.last[down]

    def hold(self, until):
        until.synchronize()

    def register(self, memory):
        return None if self.can_register else "this lane registers nothing"

    def unregister(self, memory):
        pass


class Torch:
    """Stands in for the module torch. Its `empty` returns the tensor of a `Memory` if the dtype is uint8, as for host
    blocks and slots."""

    def __getattr__(self, name):
        return self.empty if name == "empty" else getattr(torch, name)

    @staticmethod
    def empty(*size, dtype=torch.float32, **_):
        return Memory(*size).tensor if dtype is torch.uint8 else torch.empty(*size, dtype=dtype)


def live(log, wrong, registers, model, arguments, weights):
    """Trains one case, in a process that was started for the case.

    Args:
        log: file for the stack of a segmentation fault.
        wrong: name of a wrong variant in `races.py`; None: the correct code.
        registers: see `ClosedLane`.
        model, arguments, weights: see `races.run`.
    """
    import pytest

    import races
    from lowmem.offload import host_block, streamed

    with open(log, "w") as stacks, pytest.MonkeyPatch.context() as patch:
        faulthandler.enable(stacks)
        for module in (host_block, streamed):
            patch.setattr(module, "torch", Torch())
        if wrong is not None:
            getattr(races, wrong)(patch)
        races.run(ClosedLane(registers), model, arguments, weights)
        assert len(Memory.known) > FEW, "nothing was closed"
