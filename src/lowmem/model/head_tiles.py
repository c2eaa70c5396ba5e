"""Reads a head's matrix in tiles, some tokens of the vocabulary at a time, and collects its gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class HeadSource:
    """The source of a head's matrix for a loss that reads it in tiles. This base class is for a device that reads all
    tiles."""

    def joined(self, top: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combines statistics over all devices that read tiles. Args, each (N,), and Returns: a row's largest logit,
        the sum of exp(logit - largest), and the label's logit, or 0 if no tile had it."""
        return top, total, chosen

    def summed(self, d_rows: Tensor) -> Tensor:
        """Returns the gradient (N, H) of the head's input, summed over all devices that read tiles."""
        return d_rows


class ResidentHead(HeadSource):
    """A matrix (V, H) on the device: its tiles are views, and its gradient is one tensor of its dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        self.weight = linear.weight.detach()

    def tiles(self, columns: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first token of the vocabulary, tile (C, H)), in order; the last tile may be smaller."""
        yield from zip(range(0, len(self.weight), columns), self.weight.split(columns), strict=True)

    def start_gradient(self) -> None:
        """Is called before the first tile of a backward pass."""
        self.gradient = torch.empty_like(self.weight)

    def add_product(self, first: int, d_logits: Tensor, rows: Tensor) -> None:
        """Adds a tile's gradient (C, H): d_logits (N, C) transposed x rows (N, H), both in the computation's dtype."""
        tile = self.gradient[first : first + d_logits.shape[1]]
        if tile.dtype == rows.dtype:
            torch.mm(d_logits.T, rows, out=tile)
        else:
            tile.copy_(d_logits.T @ rows)

    def whole_gradient(self) -> Tensor:
        """Returns (V, H), after the last tile, and drops its own reference: else autograd would copy it."""
        gradient, self.gradient = self.gradient, None
        return gradient


def tiles_of(linear: nn.Linear) -> HeadSource:
    """Returns the source of a layer's tiles: its own weight, unless that is elsewhere
    (`offload/edges.py`)."""
    return getattr(linear, "source", None) or ResidentHead(linear)  # theirs


def matrix_of(linear: nn.Linear) -> Tensor:
    """Returns the full matrix (V, H), whose gradient reaches the weight."""
    source = getattr(linear, "source", None)  # theirs
    return source.matrix() if source else linear.weight
