"""Stores boundaries until backward, on the device or in host memory. A boundary is the input of a checkpointed block or
segment, or with `policies.offload_attention` a result of attention.

`OnDevice` keeps a reference to the tensor. `OnHost` copies the tensor to host memory, and back to the device for
backward. The thread of the forward pass creates a boundary, and the thread of the backward pass fetches it. In between,
the autograd graph owns the boundary.

                compute stream      copy streams, at the same time
    forward     computes block n    down: copies boundary n to the host
    backward    computes block n    up: copies boundary n - 1 to the device

Fetching a boundary starts the copy of the boundary that backward needs next (`Chain`), so that copies overlap with
computation. If the device is a CPU, copies are synchronous. The memory meter counts tensors of `OnHost` as host memory,
also in a run on a CPU.
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
    """A tensor that is stored until backward: the input of a block or segment, or a result of attention."""

    def fetch(self) -> Tensor:
        """Returns the tensor on its original device, with its original `requires_grad`. Raises: RuntimeError: the
        tensor was changed in place after it was stored (only `OnDevice`)."""


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
    """Keeps a copy of the tensor in host memory, so that the tensor on the device can be freed. The host memory is
    pinned if the device is a card. `fetch` may be called only once.

    Args:
        tensor: the block input, or a result of attention.
        chain: the `Chain` that starts the copy of the next boundary after each fetch.
        block: index of the block.
        in_pass: (id of the thread, number of the forward pass in this thread).
    """

    def __init__(self, tensor: Tensor, chain: "Chain", block: int, in_pass: tuple[int, int]) -> None:
        self.device, self.requires_grad = tensor.device, tensor.requires_grad
        self.chain, self.block, self.in_pass = chain, block, in_pass
        self.lane = _lane(tensor.device)
        self.back: Tensor | None = None  # the new tensor on the device, from `start` until `fetch`
        self.host = self.lane.staging(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self.left = self.lane.copy(self.host, tensor.detach(), self.lane.mark())
        belongs(self.host, "activations", "host")

    def __del__(self) -> None:
        if self.back is not None:  # not fetched: the copy must end before the device memory is reused
            self.lane.hold(self.arrived)

    def fetch(self) -> Tensor:
        self.start()
        self.lane.hold(self.arrived)
        tensor, self.back, self.host = self.back, None, None
        self.chain.start_next(self)
        return tensor.requires_grad_(self.requires_grad)

    @property
    def waits(self) -> bool:
        """Returns True if the copy back to the device has not been started."""
        return self.back is None and self.host is not None

    def start(self) -> None:
        """Starts the copy back to the device, unless it has been started already."""
        if not self.waits:
            return
        self.lane.hold(self.left)
        self.back = torch.empty_like(self.host, device=self.device)
        self.arrived = self.lane.copy(self.back, self.host, self.lane.mark())


class Chain:
    """Creates the boundaries of a model in host memory, and starts their copies to the device in the order in which
    backward needs them: the last block first.

    A block has several boundaries with `offload_attention`, or if several micro-batches are in progress. With
    weights.order=by_layer each micro-batch has its own thread, and backward computes a block for all micro-batches
    before it goes on to the previous block. So the boundaries of a block are copied in the order of their creation,
    before the boundaries of the previous block. With strategy=pipeline one thread computes all micro-batches, and
    backward computes all blocks for one micro-batch before it begins the next micro-batch. So a fetch does not start
    copies for other forward passes of the same thread.
    """

    def __init__(self) -> None:
        # Weak references: the autograd graph owns a boundary, and frees it if backward never runs.
        self._made: dict[int, list[weakref.ref[OnHost]]] = {}  # index of a block -> its boundaries
        self._latest: dict[int, tuple[int, int]] = {}  # thread id -> (block, number of the pass) of its latest boundary

    def make(self, block: int, tensor: Tensor) -> OnHost:
        boundary = OnHost(tensor, self, block, self._pass_of(block))
        alive = [other for other in self._made.get(block, []) if other() is not None]
        self._made[block] = [*alive, weakref.ref(boundary)]
        return boundary

    def _pass_of(self, block: int) -> tuple[int, int]:
        """Returns the id of this thread and the number of its forward pass. A new pass begins at a block with a lower
        index than the thread's latest block. So passes over a single block, as on a pipeline stage of one block, get
        the same number."""
        thread = threading.get_ident()
        latest, number = self._latest.get(thread, (0, 0))
        number += block < latest
        self._latest[thread] = block, number
        return thread, number

    def start_next(self, fetched: OnHost) -> None:
        """Starts the copy of one boundary for which `waits` is True: the oldest one of the same block, or if there is
        none, the oldest one of the previous block. Skips boundaries that other forward passes of the same thread
        created. Args: fetched: the boundary that was just fetched."""
        references = (*self._made.get(fetched.block, ()), *self._made.get(fetched.block - 1, ()))
        for boundary in filter(None, (reference() for reference in references)):
            is_of_other_pass = boundary.in_pass[0] == fetched.in_pass[0] and boundary.in_pass != fetched.in_pass
            if boundary.waits and not is_of_other_pass:
                boundary.start()
                return


@cache
def _lane(device: torch.device) -> Lane:
    """Returns the `Lane` that copies all boundaries of a device. On a card the lane has one copy stream per
    direction."""
    return lane_of(device)
