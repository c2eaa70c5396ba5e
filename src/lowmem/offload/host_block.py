"""Stores the 16-bit weights of one block in host memory: one flat buffer per block, in the order of its parameters.

One flat buffer of exact size needs one copy to the device and one call to pin it. Two threads use the buffer: the
training thread starts copies from it, and the host thread of `link.py` updates the weights in place. Each side waits
for the other:

    a copy       waits until the host thread has done all queued updates    `wait_for_updates`
    an update    waits until the last copy is complete                      `last_copy`
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
    """The location of one weight in a flat buffer."""

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
    """Host memory for the weights of one block. Args: weights: parameters whose data is copied into the buffer."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.spans: dict[Tensor, Span] = {}
        end = 0
        for p in weights:
            start = -(-end // ALIGNED) * ALIGNED
            self.spans[p] = Span(start, p.shape, p.dtype)
            end = start + self.spans[p].size
        self.updates: list[Future[None]] = []  # queued updates by the host thread; a copy has to wait for them
        self.last_copy: Mark | None = None  # reached when the last copy from this buffer is complete
        self.steps = 0  # number of updates; a copy on the device that was made at a lower number is out of date
        with host_side(), torch.no_grad():
            self.flat = torch.empty(end, dtype=torch.uint8)  # data moves to the drive with weights.drive_holds=all
            for p, view in self.within(self.flat).items():
                view.copy_(p.data)
        belongs(self.flat, "weights", "host")

    def tensor(self, p: Tensor) -> Tensor:
        """Returns a weight as a view of this buffer."""
        return self.spans[p].within(self.flat)

    def within(self, buffer: Tensor) -> dict[Tensor, Tensor]:
        """Returns a view for each weight into `buffer`, which has the layout of this block's buffer."""
        return {p: span.within(buffer) for p, span in self.spans.items()}

    def wait_for_updates(self) -> None:
        """Waits until the host has done all queued updates. Raises the error of an update that failed."""
        updates, self.updates = self.updates, []  # so that an error is raised once
        for update in wait(updates).done:
            update.result()


def nowhere(p: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns a single NaN expanded to a weight's shape: a placeholder for a weight whose data is elsewhere. Code that
    reads the weight too early or too late gets NaN instead of a plausible number. Integer dtypes (packed 4-bit weights)
    have no NaN and get 0; their floating-point scales get NaN."""
    missing = torch.nan if dtype.is_floating_point else 0
    return torch.full((), missing, dtype=dtype, device=device).expand(p.shape)
