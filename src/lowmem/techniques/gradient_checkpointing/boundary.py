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

import threading
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
        in_pass: (thread, number of the forward pass in this thread).
    """

    def __init__(self, tensor: Tensor, chain: "Chain", block: int, in_pass: tuple[int, int]) -> None:
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        self.chain, self.block, self.in_pass = chain, block, in_pass
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
        self.chain.start_next(self)
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
    first.

    A block has several boundaries with `offload_attention`, and if several micro-batches are in progress. With
    weights.order=by_layer a thread computes each micro-batch, and backward computes a block for all micro-batches
    before the previous block. So the boundaries of a block are prefetched in the order in which they were created,
    before the boundaries of the previous block. With strategy=pipeline one thread computes all micro-batches, and
    backward computes all blocks for a micro-batch before the next micro-batch. So boundaries of another forward pass of
    the same thread are not prefetched.
    """

    def __init__(self) -> None:
        # Weak references: the autograd graph owns a boundary, and frees it if backward never runs.
        self._made: dict[int, list[weakref.ref[OnHost]]] = {}  # index of a block -> its boundaries
        self._latest: dict[int, tuple[int, int]] = {}  # thread -> (block, number of the pass) of its latest boundary

    def make(self, block: int, tensor: Tensor) -> OnHost:
        boundary = OnHost(tensor, self, block, self._pass_of(block))
        alive = [other for other in self._made.get(block, []) if other() is not None]
        self._made[block] = [*alive, weakref.ref(boundary)]
        return boundary

    def _pass_of(self, block: int) -> tuple[int, int]:
        """Returns the thread, and the number of the forward pass. A lower block than before begins another pass."""
        thread = threading.get_ident()
        latest, number = self._latest.get(thread, (0, 0))
        number += block < latest
        self._latest[thread] = block, number
        return thread, number

    def start_next(self, fetched: OnHost) -> None:
        """Starts the copy of one boundary whose copy has not been started: the first of the same block, otherwise the
        first of the previous block. Args: fetched: the boundary that was just fetched."""
        references = (*self._made.get(fetched.block, ()), *self._made.get(fetched.block - 1, ()))
        for boundary in filter(None, (reference() for reference in references)):
            is_of_other_pass = boundary.in_pass[0] == fetched.in_pass[0] and boundary.in_pass != fetched.in_pass
            if boundary.waits and not is_of_other_pass:
                boundary.start()
                return


@cache
def _lane(device: torch.device) -> Lane:
    """Returns the `Lane` that copies all boundaries of a device; on a card it has one copy stream up and one down."""
    return lane_of(device)
