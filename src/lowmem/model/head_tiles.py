"""Gives a loss the matrix (V, H) of the output layer in tiles of C tokens of the vocabulary, and collects its gradient.

    HeadSource        the interface
    ResidentHead      here: the matrix is on the device
    Edge              `offload/edges.py`: the matrix is in host memory

Other sources: a matrix that is sharded over devices (`techniques/strategy`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class HeadSource:
    """A source of tiles of the output layer's matrix. The default methods are for a device that reads all tiles; a
    source of a matrix that is sharded over devices overrides `joined` and `summed`."""

    def joined(self, top: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combines statistics of the logits over all devices.

        Args:
            top: (N,), the largest logit of each row.
            total: (N,), the sum of exp(logit - top).
            chosen: (N,), the label's logit; 0 if the label is in no tile of this device.

        Returns:
            (top, total, chosen) over all devices.
        """
        return top, total, chosen

    def summed(self, d_rows: Tensor) -> Tensor:
        """Returns the gradient (N, H) of the head's input, summed over all devices."""
        return d_rows


class ResidentHead(HeadSource):
    """A matrix (V, H) on the device: tiles are views, and the gradient is a single tensor of the matrix's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        self.weight = linear.weight.detach()

    def tiles(self, columns: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (index of the tile's first token, tile (C, H)), in order; the last tile may be smaller."""
        yield from zip(range(0, len(self.weight), columns), self.weight.split(columns), strict=True)

    def start_gradient(self) -> None:
        """Called before the first tile of a backward pass."""
        self.gradient = torch.empty_like(self.weight)

    def add_product(self, first: int, d_logits: Tensor, rows: Tensor) -> None:
        """Stores the gradient (C, H) of a tile, d_logits.T @ rows.

        Args:
            first: index of the tile's first token.
            d_logits: (N, C), gradient of the logits.
            rows: (N, H), input of the head.
        """
        tile = self.gradient[first : first + d_logits.shape[1]]
        if tile.dtype == rows.dtype:
            torch.mm(d_logits.T, rows, out=tile)
        else:
            tile.copy_(d_logits.T @ rows)

    def whole_gradient(self) -> Tensor:
        """Returns the full gradient (V, H) after the last tile, and drops the reference to it: autograd would copy a
        gradient with two references."""
        gradient, self.gradient = self.gradient, None
        return gradient


def tiles_of(linear: nn.Linear) -> HeadSource:
    """Returns the source of a layer's tiles: its `source` attribute if set (such as `offload/edges.py`), otherwise its
    weight on the device."""
    return getattr(linear, "source", None) or ResidentHead(linear)  # theirs: any layer


def matrix_of(linear: nn.Linear) -> Tensor:
    """Returns the full matrix (V, H) as a differentiable function of the weight."""
    source = getattr(linear, "source", None)  # theirs: any layer
    return source.matrix() if source else linear.weight
