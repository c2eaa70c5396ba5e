"""Records, on a machine without a card, the calls that would make a training step wait for a card.

A card computes asynchronously until the host reads a number that the card may not have computed yet: by `.item()`,
`bool(tensor)`, `tensor.tolist()`, or an operator whose output size depends on values (`nonzero`, a boolean index).
`DeviceReads`, a dispatch mode, records the operators in READS, and the operators in INDEXED if an index is a mask.
`Methods` records `tolist` and `cpu`, which call no operator on a CPU. A call is recorded only if a tensor argument is
on the *device side*.

On a CPU, all tensors have the device "cpu", so this module assigns each storage to a side. A storage is on the host
side if

- the ledger of the memory meter says so (fp32 masters and their optimizer state), or it was made in `host_side()`,
- it is staging memory or registered memory of the lane, or the link's "host-step" thread made it,
- the loader made it (moving a micro-batch to the device makes a copy, as on a card),
- it is the step count of an optimizer that is not fused (torch keeps this count in host memory even with a card),
- or an operator made it from tensors that are all on the host side.

Every other storage is on the device side. Therefore a host tensor of another kind is taken for a device tensor, and
reading it makes a test fail, but no device tensor is taken for a host tensor. Weights and gradients go through staging
memory and a thread, as with a card. Other waits (for an event, for the link, and for copies from memory that is not
pinned) are not recorded.
"""

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import races
from lowmem.data.loader import MicroBatch, WindowLoader
from lowmem.memory.ledger import Owner, Side
from lowmem.memory.meter import MemoryMeter
from lowmem.memory.tracker import StorageTracker, host_side
from lowmem.offload.copy_lanes import AtOnceLane
from lowmem.offload.link import StagedLink
from lowmem.system.torch_private import modes_of_this_thread, storage_key, tree_leaves

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,  # .item(), bool(), float() and int()
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
METHODS = {Tensor.tolist, Tensor.cpu}  # not `numpy`: CUDA tensors do not support it


class Read(NamedTuple):
    """A read of a device tensor. Args: window: number of the optimizer step, from 1; line: "file:line" of the innermost
    frame whose file is not excluded by NOT_THE_CALLER; call: name of the operator or method."""

    window: int
    line: str
    call: str
    of_model: bool  # True if the line is in transformers


class DeviceReads(StorageTracker):
    """A dispatch mode that records reads of device tensors. Nothing is recorded while `window` is None."""

    def __init__(self) -> None:
        super().__init__({})
        self.lock = threading.RLock()  # the "host-step" thread also uses this mode
        self.window: int | None = None
        self.seen: list[Read] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        of_host = bool(given) and all(map(self.is_host, given))
        if reads_a_number(func, args) and not of_host:
            self.note(str(func))
        with self.lock, host_side() if of_host else nullcontext():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def is_host(self, tensor: Tensor) -> bool:
        serial = self._live.get(storage_key(tensor))
        return serial is not None and self._side(serial) != "device"

    def put(self, tensor: Tensor, side: Side) -> Tensor:
        self.own(tensor, Owner("other", side, tuple))
        return tensor

    def note(self, call: str) -> None:
        if self.window is None:
            return
        frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in NOT_THE_CALLER)]
        frame = frames[-1]
        file = frame.filename.rpartition("/src/")[2].rpartition("site-packages/")[2]
        self.seen.append(Read(self.window, f"{file}:{frame.lineno}", call, "/transformers/" in frame.filename))

    def lines(self, window: int, of_model: bool = False) -> Counter[str]:
        """Returns a counter that maps each line to the number of its reads of device tensors in a window. Args:
        of_model: True counts only lines in transformers; False counts only other lines."""
        return Counter(read.line for read in self.seen if (read.window, read.of_model) == (window, of_model))


NOT_THE_CALLER = ("/torch/", "/support/device_reads.py", "/memory/tracker.py", "/contextlib.py")


def reads_a_number(func: object, args: tuple) -> bool:
    if func in INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return func in READS


class Methods(TorchFunctionMode):
    """A function mode that records calls of METHODS, which copy a tensor to the host. A dispatch mode does not see
    them, because they call no operator on a CPU."""

    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in METHODS and not self.reads.is_host(args[0]):
            self.reads.note(func.__name__)
        return func(*args, **(kwargs or {}))


class Lane(AtOnceLane):
    """A lane that marks its staging memory and registered memory as host memory."""

    registers = True

    def __init__(self, reads: DeviceReads) -> None:
        self.reads = reads

    def staging(self, size: int) -> Tensor:
        return self.reads.put(super().staging(size), "host")

    def register(self, memory: Tensor) -> None:
        self.reads.put(memory, "host")

    def unregister(self, memory: Tensor) -> None:
        pass


@contextmanager
def as_on_a_card() -> Iterator[DeviceReads]:
    """Yields a `DeviceReads` that records the reads of a run in this context. The run copies gradients and weights over
    a lane, as on a card."""
    reads = DeviceReads()
    modes = []  # a function that returns the modes of this thread, for "host-step"
    window, to, work, begins = WindowLoader._window, MicroBatch.to, StagedLink._work, MemoryMeter.on_train_batch_start

    def loaded(*arguments):
        with host_side():
            return window(*arguments)

    def moved(self, device, **how):
        copy = to(self, device, **how)
        for name, tensor in self.tensors.items():
            object.__setattr__(copy, name, reads.put(tensor.clone(), "device"))
        return copy

    def working(self):
        with modes[0](), host_side():
            work(self)

    def began(self, trainer, module, *batch):
        begins(self, trainer, module, *batch)
        reads.settle(self.ledger.storages())
        for state in trainer.optimizers[0].state.values():
            if torch.is_tensor(state.get("step")) and not trainer.optimizers[0].defaults.get("fused"):
                reads.put(state["step"], "host")
        reads.window = trainer.global_step + 1

    with ExitStack() as stack:
        for owner, name, value in (
            (WindowLoader, "_window", loaded),
            (MicroBatch, "to", moved),
            (StagedLink, "_work", working),
            (MemoryMeter, "on_train_batch_start", began),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(races.all_over(Lane(reads)))
        stack.enter_context(Methods(reads))
        stack.enter_context(reads)
        modes.append(modes_of_this_thread())
        yield reads
