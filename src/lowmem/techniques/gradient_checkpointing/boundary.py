"""Stores a boundary (the input of a checkpointed block) until backward, on the device or in host memory.

    forward     compute stream: block n         | block n + 1     copy stream, down: boundary n
    backward    compute stream: block n         | block n - 1     copy stream, up:   boundary n - 1, while block n runs

Copies to and from the host overlap with computation: fetching a boundary starts the copy of the boundary that backward
needs next (`Chain`). On a CPU the copies are synchronous, and the meter counts them as host memory, as on a card.
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
        """Returns the tensor on its original device, with its original `requires_grad`."""


class OnDevice:
    """Keeps the tensor itself on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        self.requires_grad = tensor.requires_grad

    def fetch(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("A checkpointed activation was modified in place, so its block cannot be recomputed.")
        return self.tensor.detach().requires_grad_(self.requires_grad)


class OnHost:
    """Keeps a copy in host memory, pinned so that copies overlap with computation.

    Args:
        tensor: the boundary.
        chain: prefetches boundaries in the order of backward.
        block: index of the block.
    """

    def __init__(self, tensor: Tensor, chain: "Chain", block: int) -> None:
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        self.chain, self.block = chain, block
        self.lane = _lane(tensor.device)
        self.back: Tensor | None = None  # the tensor on the device, while its copy is in progress
        self.host = self.lane.staging(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self.left = self.lane.copy(self.host, tensor.detach(), self.lane.mark())
        belongs(self.host, "activations", "host")

    def __del__(self) -> None:
        if self.back is not None:  # never fetched: free its memory only after the copy
            self.lane.hold(self.arrived)

    def fetch(self) -> Tensor:
        self.start()
        self.lane.hold(self.arrived)
        tensor, self.back, self.host = self.back, None, None
        self.chain.start_next(self.block)
        return tensor.requires_grad_(self.requires_grad)

    @property
    def waits(self) -> bool:
        """Returns True if the copy to the device has not been started yet."""
        return self.back is None and self.host is not None

    def start(self) -> None:
        """Starts the copy to the device, if it was not started before."""
        if not self.waits:
            return
        self.lane.hold(self.left)
        self.back = torch.empty_like(self.host, device=self.device)
        self.arrived = self.lane.copy(self.back, self.host, self.lane.mark())


class Chain:
    """Creates boundaries, and prefetches them in the order of backward: the last block first. Within a block (with
    weights.order=by_layer a block has a boundary per micro-batch) in the order of their creation."""

    def __init__(self) -> None:
        # Weak references: the autograd graph owns a boundary, and frees it if backward is never run.
        self._made: dict[int, list[weakref.ref[OnHost]]] = {}  # index of a block -> its boundaries

    def make(self, block: int, tensor: Tensor) -> OnHost:
        boundary = OnHost(tensor, self, block)
        alive = [other for other in self._made.get(block, []) if other() is not None]
        self._made[block] = [*alive, weakref.ref(boundary)]
        return boundary

    def start_next(self, block: int) -> None:
        """Starts the copy of the boundary that backward needs next. Args: block: index of the block whose boundary was
        just fetched."""
        references = (*self._made.get(block, ()), *self._made.get(block - 1, ()))
        following = (boundary for reference in references if (boundary := reference()) is not None)
        if (boundary := next(filter(lambda boundary: boundary.waits, following), None)) is not None:
            boundary.start()


@cache
def _lane(device: torch.device) -> Lane:
    """Returns the lane of a device, which all boundaries share."""
    return lane_of(device)
