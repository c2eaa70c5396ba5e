"""Copies tensors between host and device asynchronously, so that copies overlap with computation. `link.py`,
`registered.py`, `streamed.py` and `edges.py` copy weights and gradients with these classes, and
`techniques/gradient_checkpointing/boundary.py` copies activations.

    Lane    a pair of copy streams, one per direction    `CardLane` (CUDA, ROCm, XPU)    `AtOnceLane` (CPU)
    Mark    an event of a stream                         `torch.Event`                   `AtOnce`

The method `copy` takes one mark, after which the copy starts (the source is computed, or the target is free), and
returns another mark (the copy is complete). Both device and host can wait for a mark: `Lane.hold` makes the compute
stream wait, and `Mark.synchronize` blocks the calling thread. `torch.Stream` and `torch.Event` have the same interface
for every kind of card. On a CPU, a copy is complete when the call returns. `registered.py` wraps a lane, and defines
another kind of mark, `Coming`.
"""

import weakref
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from lowmem.system.errors import out_of_memory

CARDS = ("cuda", "xpu")  # device types that have streams and separate memory; "xpu" is not tested


class Lane(Protocol):
    """Copies between host and device that overlap with the device's computation."""

    # True: asynchronous copies need pinned memory, so call `register`. False: the lane has no `register`.
    registers: bool

    def staging(self, size: int) -> Tensor:
        """Returns a new uint8 host tensor of shape (size,), pinned if the device is a card. Raises: MemoryError: the
        memory cannot be pinned."""

    def mark(self) -> "Mark":
        """Returns a mark that is reached when the compute stream has finished all work that was queued before this
        call. The mark does not wait for the copy streams."""

    def copy(self, to: Tensor, source: Tensor, after: "Mark") -> "Mark":
        """Queues a copy that starts once the mark `after` is reached. The caller may free a `source` on the device
        immediately, but must keep a `to` on the device until `hold` or `synchronize` was called for the returned mark.
        Before this mark is reached, host memory must not be freed or written, and a `to` on the host must not be read.

        Returns:
            A mark that is reached when the copy is complete. Copies in one direction keep their order, so when the mark
            of the last copy is reached, all earlier copies in this direction are complete.
        """

    def hold(self, until: "Mark") -> None:
        """Makes the compute stream wait for the mark `until` before any work that is queued after this call. The
        calling thread does not wait."""

    def register(self, memory: Tensor) -> str | None:
        """Pins host memory in place, until `unregister` is called or the tensor object is deleted. Returns: None on
        success, otherwise the reason why the memory cannot be pinned."""

    def unregister(self, memory: Tensor) -> None:
        """Unpins memory that `register` has pinned. All copies from the memory must be complete."""


class Mark(Protocol):
    """A point in the work of a stream, such as the end of a copy."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the mark is reached."""


class CardLane:
    """Two copy streams of a card, one for each direction. For a device whose streams or memory work differently, a
    subclass can override `new_stream`, `computing`, `is_host` and `keep`."""

    registers = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._registered: dict[int, weakref.finalize] = {}  # address of registered memory -> finalizer that unpins it
        self._down, self._up = self.new_stream(), self.new_stream()

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def computing(self) -> torch.Stream:
        """Returns the compute stream, which is the current stream of the calling thread."""
        return torch.accelerator.current_stream(self.device)

    def is_host(self, memory: Tensor) -> bool:
        return memory.device.type == "cpu"

    def keep(self, memory: Tensor, stream: torch.Stream) -> None:
        """Tells the caching allocator not to reuse the memory until the stream has finished all work that was queued
        before the memory was freed."""
        memory.record_stream(stream)

    def staging(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # CUDA reports a failure to pin host memory as out of device memory
            if out_of_memory(error):
                raise MemoryError(f"{size:,} bytes of host memory cannot be pinned.") from error
            raise

    def mark(self) -> torch.Event:
        return self.computing().record_event()

    def copy(self, to: Tensor, source: Tensor, after: torch.Event) -> torch.Event:
        stream = self._up if self.is_host(source) else self._down
        stream.wait_event(after)
        with stream:
            to.copy_(source, non_blocking=True)
        if not self.is_host(source):  # the caller may free the source before the copy has run
            self.keep(source, stream)
        return stream.record_event()

    def hold(self, until: torch.Event) -> None:
        self.computing().wait_event(until)

    def register(self, memory: Tensor) -> str | None:
        if self.device.type != "cuda":  # "cuda" is both NVIDIA and AMD
            return f"torch cannot register host memory for {self.device.type} devices"
        cudart, place = torch.cuda.cudart(), memory.data_ptr()
        with torch.cuda.device(self.device):
            code = cudart.cudaHostRegister(place, memory.nbytes, 0)
        if int(code):
            with suppress(RuntimeError):  # CUDA would report the error again at the next launch: clear it here
                torch.ones(1, device=self.device)
            return cudart.cudaGetErrorString(code)
        self._registered[place] = weakref.finalize(memory, cudart.cudaHostUnregister, place)
        return None

    def unregister(self, memory: Tensor) -> None:
        self._registered.pop(memory.data_ptr())()


class AtOnceLane:
    """The lane of a CPU: device and host share their memory, and a copy is complete when the call returns."""

    registers = False

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> "AtOnce":
        return AtOnce()

    def copy(self, to: Tensor, source: Tensor, after: Mark) -> "AtOnce":
        to.copy_(source)
        return AtOnce()

    def hold(self, until: Mark) -> None:
        pass


class AtOnce:
    def synchronize(self) -> None:
        pass


def lane_of(device: torch.device) -> Lane:
    return CardLane(device) if device.type in CARDS else AtOnceLane()
