"""Stores the 16-bit weights of one block in host memory: one flat buffer per block, in the order of its parameters.

One buffer of exact size is one copy to the device, and one piece of memory to register. The host steps the memory that
is copied, so each waits for the other: a copy for the last update, an update for the last copy.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.memory.tracker import belongs, host_side
from lowmem.offload.copy_lanes import Mark

ALIGNED = 256  # bytes; weights start at multiples of it in a buffer, as in CUDA's own allocator


class Span(NamedTuple):
    """The place of one weight in a buffer."""

    start: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Returns the size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class HostBlock:
    """Host memory of the weights of one block. Args: weights: their data is copied here, one after the other."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.spans: dict[Tensor, Span] = {}
        end = 0
        for p in weights:
            start = -(-end // ALIGNED) * ALIGNED
            self.spans[p] = Span(start, p.shape, p.dtype)
            end = start + self.spans[p].size
        self.updates: list[Future[None]] = []  # by the host; a copy has to wait for them
        self.last_copy: Mark | None = None  # reached when the last copy from here is complete
        self.steps = 0  # updates so far; a copy with fewer is out of date
        with host_side(), torch.no_grad():
            self.flat = torch.empty(end, dtype=torch.uint8)  # with weights.drive_holds=all its data is elsewhere
            for p, view in self.within(self.flat).items():
                view.copy_(p.data)
        belongs(self.flat, "weights", "host")

    def tensor(self, p: Tensor) -> Tensor:
        """Returns a weight, where it waits now."""
        return self.spans[p].within(self.flat)

    def within(self, buffer: Tensor) -> dict[Tensor, Tensor]:
        """Returns views of a buffer that is laid out like this one, by weight."""
        return {p: span.within(buffer) for p, span in self.spans.items()}

    def wait_for_updates(self) -> None:
        """Returns when the host has done all updates that were asked for, or raises the error that it met."""
        updates, self.updates = self.updates, []  # so that an error is raised once
        for update in wait(updates).done:
            update.result()


def nowhere(p: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns one NaN, expanded to a weight's shape: it stands in for a weight that is elsewhere, so that reading it
    too early or too late cannot give a plausible number. Packed bits have none, but their scales have."""
    missing = torch.nan if dtype.is_floating_point else 0
    return torch.full((), missing, dtype=dtype, device=device).expand(p.shape)
