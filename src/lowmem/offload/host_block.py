"""Stores the streamed weights of one block in a flat buffer in host memory. `StreamedWeights` (`streamed.py`) creates
the buffers, also for an embedding or a head (`Edge`).

The buffer is flat, so that one call pins it, and so that the weights of a block are copied to the device in one piece.
(Memory that cannot be pinned, and weights on a drive, are copied in several pieces. An `Edge` copies rows or tiles.)

On a card, the thread that runs forward or backward requests copies from the buffer, and the host thread of `link.py`
updates the weights in place. Each of these two threads waits for the other:

    before a copy       wait until the host thread has done the buffer's queued updates    `wait_for_updates`
    before an update    wait until the last copy is complete                               `last_copy`

On a CPU the thread that computes also updates the weights, immediately, so no update is queued.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.memory.tracker import belongs, host_side
from lowmem.offload.copy_lanes import Mark

ALIGNED = 256  # bytes; each weight starts at a multiple of this number, like memory from cudaMalloc


class Span(NamedTuple):
    """The location of a weight in a flat buffer, or of a tensor in a swap file (`drive.py`)."""

    start: int  # offset in bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Returns the size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class HostBlock:
    """Host memory for the weights of one block, or for the weight of an `Edge`. Args: weights: parameters, and buffers
    of `Packed` layers; their data is copied into the flat buffer, in this order."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.spans: dict[Tensor, Span] = {}
        end = 0
        for p in weights:
            start = -(-end // ALIGNED) * ALIGNED
            self.spans[p] = Span(start, p.shape, p.dtype)
            end = start + self.spans[p].size
        # Updates that were queued since the last `wait_for_updates`. The thread that queues an update appends to the
        # list: the training thread after backward; for early updates autograd's thread, or the micro-batch's thread
        # with weights.order=by_layer. The list stays empty on a CPU.
        self.updates: list[Future[None]] = []
        self.last_copy: Mark | None = None  # reached when the last copy from this buffer is complete
        # Number of updates so far: one per weight and step, counted when the update is queued. A copy to the device
        # that was made at a lower number is out of date.
        self.steps = 0
        with host_side(), torch.no_grad():
            # the flat buffer of a block is swapped to the drive if weights.drive_holds=all
            self.flat = torch.empty(end, dtype=torch.uint8)
            for p, view in self.within(self.flat).items():
                view.copy_(p.data)
        belongs(self.flat, "weights", "host")

    def tensor(self, p: Tensor) -> Tensor:
        """Returns a weight as a view of this buffer."""
        return self.spans[p].within(self.flat)

    def within(self, buffer: Tensor) -> dict[Tensor, Tensor]:
        """Returns for each weight its view of `buffer`. Args: buffer: (bytes,), on any device, with the layout of
        `flat`."""
        return {p: span.within(buffer) for p, span in self.spans.items()}

    def wait_for_updates(self) -> None:
        """Blocks until the host thread has done all queued updates of this buffer. If updates failed, raises the error
        of one of them."""
        updates, self.updates = self.updates, []  # cleared first: a later call must not raise the same errors
        for update in wait(updates).done:
            update.result()


def nowhere(p: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns a placeholder for a weight whose data is stored elsewhere: a single NaN, expanded to the weight's shape.
    Code that reads the weight too early or too late gets NaN instead of a plausible number. Integer dtypes (packed
    4-bit weights) have no NaN, so their placeholder is 0; the floating-point scales of packed weights are still NaN."""
    missing = torch.nan if dtype.is_floating_point else 0
    return torch.full((), missing, dtype=dtype, device=device).expand(p.shape)
