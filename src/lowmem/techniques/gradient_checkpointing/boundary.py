"""Keeps a boundary activation until the backward pass: on the device, or in host memory.

On CUDA the copies to the host and back overlap with computation: both run on a stream of their own, and fetching one
boundary starts the copy of the one before it, which backward needs next. On a CPU the same steps are plain copies, and
the meter counts the copy as host memory, as it would be with a card.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lowmem.memory.tracker import belongs


class Boundary(Protocol):
    def fetch(self) -> Tensor:
        """Returns the tensor on its device, with the `requires_grad` that it had."""


class OnDevice:
    """Keeps the tensor itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        self.requires_grad = tensor.requires_grad

    def fetch(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("A checkpointed activation was changed in place: its block cannot be computed again.")
        return self.tensor.detach().requires_grad_(self.requires_grad)


class OnHost:
    """Keeps a copy in host memory, which is pinned on CUDA so that copies overlap with computation."""

    def __init__(self, tensor: Tensor, before: "weakref.ref[OnHost] | None") -> None:
        self.device, self.requires_grad, self.before = tensor.device, tensor.requires_grad, before
        self.stream = _stream(tensor.device)
        self.back: Tensor | None = None  # the copy that is on its way to the device
        if self.stream is None:
            self.host = tensor.detach().clone()
        else:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self.stream):
                self.host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self.stream)
        belongs(self.host, "activations", "host")

    @classmethod
    def chain(cls) -> Callable[[Tensor], "OnHost"]:
        """Returns a function that makes boundaries, each of which knows the one before it."""
        last: weakref.ref[OnHost] | None = None

        def make(tensor: Tensor) -> OnHost:
            nonlocal last
            made = cls(tensor, before=last)
            last = weakref.ref(made)  # the graph owns them: the next must not keep one alive that never sees backward
            return made

        return make

    def fetch(self) -> Tensor:
        self.start()
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self.back.record_stream(torch.cuda.current_stream(self.device))
        tensor, self.back, self.host = self.back, None, None
        before = self.before() if self.before is not None else None
        if before is not None:
            before.start()
        return tensor.requires_grad_(self.requires_grad)

    def start(self) -> None:
        """Starts the copy to the device."""
        if self.back is not None or self.host is None:  # under way, or used by an earlier backward pass
            return
        if self.stream is None:
            self.back = self.host.clone()
        else:
            with torch.cuda.stream(self.stream):
                self.back = self.host.to(self.device, non_blocking=True)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    """Returns a device's stream for copies in both directions, which keep their order."""
    if device.type != "cuda":
        return None
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
