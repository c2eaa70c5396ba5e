"""Keeps a boundary activation until the backward pass: on the device, or in host memory.

The copies to the host and back overlap with a card's computation: fetching one boundary starts the copy of the one
before it, which backward needs next. On a CPU the same steps are plain copies, and the meter counts the copy as host
memory, as it would be with a card.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from lowmem.memory.tracker import belongs
from lowmem.system.copy_lanes import Lane, lane_of


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
    """Keeps a copy in host memory, which is pinned beside a card so that copies overlap with computation."""

    def __init__(self, tensor: Tensor, before: "weakref.ref[OnHost] | None") -> None:
        self.device, self.requires_grad, self.before = tensor.device, tensor.requires_grad, before
        self.lane = _lane(tensor.device)
        self.back: Tensor | None = None  # the copy that is on its way to the device
        self.host = self.lane.staging(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self.left = self.lane.copy(self.host, tensor.detach(), self.lane.mark())
        belongs(self.host, "activations", "host")

    def __del__(self) -> None:
        if self.back is not None:  # nobody has fetched it: its memory is free only when the copy has arrived
            self.lane.hold(self.arrived)

    @classmethod
    def chain(cls) -> Callable[[Tensor], "OnHost"]:
        """Returns a function that makes boundaries, each of which knows the one before it."""
        last: weakref.ref[OnHost] | None = None

        def make(tensor: Tensor) -> OnHost:
            nonlocal last
            boundary = cls(tensor, before=last)
            last = weakref.ref(boundary)  # weak: the graph owns a boundary, and frees one whose backward never comes
            return boundary

        return make

    def fetch(self) -> Tensor:
        self.start()
        self.lane.hold(self.arrived)
        tensor, self.back, self.host = self.back, None, None
        before = self.before() if self.before is not None else None
        if before is not None:
            before.start()
        return tensor.requires_grad_(self.requires_grad)

    def start(self) -> None:
        """Starts the copy to the device."""
        if self.back is not None or self.host is None:  # under way, or used by an earlier backward pass
            return
        self.lane.hold(self.left)
        self.back = torch.empty_like(self.host, device=self.device)
        self.arrived = self.lane.copy(self.back, self.host, self.lane.mark())


@cache
def _lane(device: torch.device) -> Lane:
    """Returns a device's lane, which all boundaries share: copies in one direction keep their order."""
    return lane_of(device)
