"""Stores a boundary (the input of a checkpointed block) until backward, on the device or in host memory.

`OnDevice` keeps the tensor. `OnHost` copies the tensor to host memory, and back to the device for backward.
`policies.offload_attention` also stores the results of attention with `OnHost`. The thread of the forward pass creates
a boundary, the thread of the backward pass fetches it, and the autograd graph owns it in between.

                compute stream      copy streams, at the same time
    forward     computes block n    down: copies boundary n to the host
    backward    computes block n    up: copies boundary n - 1 to the device

Fetching a boundary starts the copy of the boundary that backward needs next (`Chain`), so the copies overlap with
computation. On a CPU the copies are synchronous. The memory meter counts the copies as host memory, even in a run on a
CPU.
"""

import weakref
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from lowmem.memory.tracker import belongs
from lowmem.offload.copy_lanes import Lane, lane_of


class Boundary(Protocol):
    """A tensor that is stored until backward: a block input, or a result of attention."""

    def fetch(self) -> Tensor:
        """Returns the tensor on its original device, with its original `requires_grad`. Raises: RuntimeError: the
        tensor was changed in place (only `OnDevice`)."""


class OnDevice:
    """Keeps a reference to the tensor on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        self.requires_grad = tensor.requires_grad

    def fetch(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("A checkpointed activation was modified in place, so its block cannot be recomputed.")
        return self.tensor.detach().requires_grad_(self.requires_grad)


class OnHost:
    """Keeps a copy in host memory (pinned, if the device is a card), so that the tensor on the device can be freed. Can
    be fetched only once.

    Args:
        tensor: the block input, or a result of attention.
        chain: prefetches the next boundary after each fetch.
        block: index of the block.
    """

    def __init__(self, tensor: Tensor, chain: "Chain", block: int) -> None:
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        self.chain, self.block = chain, block
        self.lane = _lane(tensor.device)
        self.back: Tensor | None = None  # the new tensor on the device, from the start of its copy until `fetch`
        self.host = self.lane.staging(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self.left = self.lane.copy(self.host, tensor.detach(), self.lane.mark())
        belongs(self.host, "activations", "host")

    def __del__(self) -> None:
        if self.back is not None:  # not fetched: the device must not reuse the memory before the copy is complete
            self.lane.hold(self.arrived)

    def fetch(self) -> Tensor:
        self.start()
        self.lane.hold(self.arrived)
        tensor, self.back, self.host = self.back, None, None
        self.chain.start_next(self.block)
        return tensor.requires_grad_(self.requires_grad)

    @property
    def waits(self) -> bool:
        """Returns True if the copy back to the device has not been started yet."""
        return self.back is None and self.host is not None

    def start(self) -> None:
        """Starts the copy back to the device, unless it was started before."""
        if not self.waits:
            return
        self.lane.hold(self.left)
        self.back = torch.empty_like(self.host, device=self.device)
        self.arrived = self.lane.copy(self.back, self.host, self.lane.mark())


class Chain:
    """Creates the boundaries of a model in host memory, and prefetches them in the order of backward: the last block
    first. A block has several boundaries with `offload_attention`, and if several micro-batches are in progress
    (weights.order=by_layer, strategy=pipeline). The boundaries of a block are prefetched in the order in which they
    were created, before the boundaries of the previous block."""

    def __init__(self) -> None:
        # Weak references: the autograd graph owns a boundary, and frees it if backward never runs.
        self._made: dict[int, list[weakref.ref[OnHost]]] = {}  # index of a block -> its boundaries

    def make(self, block: int, tensor: Tensor) -> OnHost:
        boundary = OnHost(tensor, self, block)
        alive = [other for other in self._made.get(block, []) if other() is not None]
        self._made[block] = [*alive, weakref.ref(boundary)]
        return boundary

    def start_next(self, block: int) -> None:
        """Starts the copy of one boundary whose copy has not been started: the first of the same block, otherwise the
        first of the previous block. Args: block: index of the block whose boundary was just fetched."""
        references = (*self._made.get(block, ()), *self._made.get(block - 1, ()))
        following = (boundary for reference in references if (boundary := reference()) is not None)
        if (boundary := next(filter(lambda boundary: boundary.waits, following), None)) is not None:
            boundary.start()


@cache
def _lane(device: torch.device) -> Lane:
    """Returns the `Lane` that copies all boundaries of a device; on a card it has one copy stream up and one down."""
    return lane_of(device)
