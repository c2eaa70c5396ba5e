"""Keeps a boundary activation until the backward pass: on the device, or in host memory.

The copies to the host and back overlap with a card's computation: fetching one boundary starts the copy of the one that
backward needs next. On a CPU the same steps are plain copies, and the meter counts the copy as host
memory, as it would be with a card.
"""

import weakref
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from lowmem.memory.tracker import belongs
from lowmem.offload.copy_lanes import Lane, lane_of


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
            raise RuntimeError("A checkpointed activation was modified in place, so its block cannot be recomputed.")
        return self.tensor.detach().requires_grad_(self.requires_grad)


class OnHost:
    """Keeps a copy in host memory, which is pinned beside a card so that copies overlap with computation."""

    def __init__(self, tensor: Tensor, chain: "Chain", block: int) -> None:
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        self.chain, self.block = chain, block
        self.lane = _lane(tensor.device)
        self.back: Tensor | None = None  # the copy that is on its way to the device
        self.host = self.lane.staging(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self.left = self.lane.copy(self.host, tensor.detach(), self.lane.mark())
        belongs(self.host, "activations", "host")

    def __del__(self) -> None:
        if self.back is not None:  # nobody has fetched it: its memory is free only when the copy has arrived
            self.lane.hold(self.arrived)

    def fetch(self) -> Tensor:
        self.start()
        self.lane.hold(self.arrived)
        tensor, self.back, self.host = self.back, None, None
        self.chain.start_next(self.block)
        return tensor.requires_grad_(self.requires_grad)

    @property
    def waits(self) -> bool:
        """Returns False if it is under way, or was used by an earlier backward pass."""
        return self.back is None and self.host is not None

    def start(self) -> None:
        """Starts the copy to the device."""
        if not self.waits:
            return
        self.lane.hold(self.left)
        self.back = torch.empty_like(self.host, device=self.device)
        self.arrived = self.lane.copy(self.back, self.host, self.lane.mark())


class Chain:
    """Makes boundaries, and knows in which order backward needs them: boundaries of the last block first, and of one
    block (weights.order=by_layer) in the order in which they were made."""

    def __init__(self) -> None:
        # Weak: the graph owns a boundary, and frees one whose backward never comes.
        self._made: dict[int, list[weakref.ref[OnHost]]] = {}  # by the number of the block

    def make(self, block: int, tensor: Tensor) -> OnHost:
        boundary = OnHost(tensor, self, block)
        alive = [other for other in self._made.get(block, []) if other() is not None]
        self._made[block] = [*alive, weakref.ref(boundary)]
        return boundary

    def start_next(self, block: int) -> None:
        """Starts the copy that backward waits for next. Args: block: the one whose boundary it has just fetched."""
        references = (*self._made.get(block, ()), *self._made.get(block - 1, ()))
        following = (boundary for reference in references if (boundary := reference()) is not None)
        if (boundary := next(filter(lambda boundary: boundary.waits, following), None)) is not None:
            boundary.start()


@cache
def _lane(device: torch.device) -> Lane:
    """Returns a device's lane, which all boundaries share: copies in one direction keep their order."""
    return lane_of(device)
