"""Copies between host and device that run beside the device's computation, for every kind of card.

A lane copies in both directions, and marks say when: a copy starts after one mark and reaches another. torch's streams
and events are the same for every kind of card. On a CPU the device is the host, and a copy is complete at once.
"""

import weakref
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from lowmem.system.errors import out_of_memory

CARDS = ("cuda", "xpu")  # kinds of devices with streams and memory of their own; no xpu has run this


class Lane(Protocol):
    """A device's means to copy beside its computation."""

    registers: bool  # True if the device reads only registered host memory by itself

    def staging(self, size: int) -> Tensor:
        """Returns (size,) bytes of host memory that the device can copy to and from by itself. Raises: MemoryError."""

    def mark(self) -> "Mark":
        """Returns a mark that is reached when the device has computed everything that was queued until now."""

    def copy(self, to: Tensor, source: Tensor, after: "Mark") -> "Mark":
        """Starts a copy after the mark `after`. Returns a mark that is reached when it is complete. Copies in one
        direction keep their order: waiting for the last one waits for all."""

    def hold(self, until: "Mark") -> None:
        """Makes the device wait for `until` before it computes anything that is queued from now on."""

    def register(self, memory: Tensor) -> str | None:
        """Lets the device read host memory where it is, until it is unregistered. Returns: why it cannot; None:
        it can."""

    def unregister(self, memory: Tensor) -> None:
        """Undoes `register`. No copy from the memory may be under way."""


class Mark(Protocol):
    def synchronize(self) -> None:
        """Waits on the host until the mark is reached."""


class CardLane:
    """Two copy streams of a card, one for each direction. torch's streams and events are the same for every kind of
    card; what is not has a method of its own."""

    registers = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._registered: dict[int, weakref.finalize] = {}  # by address
        self._down, self._up = self.new_stream(), self.new_stream()

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def computing(self) -> torch.Stream:
        """Returns the stream on which the device computes."""
        return torch.accelerator.current_stream(self.device)

    def is_host(self, memory: Tensor) -> bool:
        return memory.device.type == "cpu"

    def keep(self, memory: Tensor, stream: torch.Stream) -> None:
        """Makes the device's allocator wait for the stream before it uses the memory again."""
        memory.record_stream(stream)

    def staging(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # in CUDA's words it is the device's memory
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
        if not self.is_host(source):  # it may be freed before the copy has run
            self.keep(source, stream)
        return stream.record_event()

    def hold(self, until: torch.Event) -> None:
        self.computing().wait_event(until)

    def register(self, memory: Tensor) -> str | None:
        if self.device.type != "cuda":  # NVIDIA's and AMD's
            return f"torch cannot register host memory for {self.device.type} devices"
        cudart, place = torch.cuda.cudart(), memory.data_ptr()
        with torch.cuda.device(self.device):
            code = cudart.cudaHostRegister(place, memory.nbytes, 0)
        if int(code):
            with suppress(RuntimeError):  # CUDA would report the error at the next kernel launch, which is ours
                torch.ones(1, device=self.device)
            return cudart.cudaGetErrorString(code)
        self._registered[place] = weakref.finalize(memory, cudart.cudaHostUnregister, place)
        return None

    def unregister(self, memory: Tensor) -> None:
        self._registered.pop(memory.data_ptr())()


class AtOnceLane:
    """The lane of a CPU, where the device is the host: a copy is complete when the call returns."""

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
