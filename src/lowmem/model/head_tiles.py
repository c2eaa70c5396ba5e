"""Defines how `loss=tiled` and the preference losses read the matrix (V, H) of the output layer: in tiles (C, H), each
for C tokens of the vocabulary. A `HeadSource` provides the tiles, and collects the gradient of the matrix.

    HeadSource        this module: the base class
    ResidentHead      this module: the matrix is on the device
    HeadShard         `techniques/strategy/parallel_styles.py`: each device has a shard of the matrix
    Edge              `offload/edges.py`: the matrix is in host memory
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class HeadSource:
    """Base class of sources of tiles. The methods of this class are for a matrix whose tiles are all read by one
    device. If the matrix is sharded over devices, a subclass overrides `joined` and `summed` with collectives, which
    all devices must call."""

    def joined(self, top: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combines statistics of the logits over all devices. The base class returns them unchanged.

        Args:
            top: (N,), the largest logit of each row.
            total: (N,), the sum of exp(logit - top).
            chosen: (N,), the logit of each row's label; 0 if the label is not in a tile of this device.

        Returns:
            (top, total, chosen) over all devices.
        """
        return top, total, chosen

    def summed(self, d_rows: Tensor) -> Tensor:
        """Returns the gradient (N, H) of the head's input, summed over all devices. Args: d_rows: the gradient from the
        tiles of this device."""
        return d_rows


class ResidentHead(HeadSource):
    """A source for a matrix (V, H) on the device. Tiles are views of the matrix, and the gradient is a single tensor
    with the dtype of the matrix."""

    def __init__(self, linear: nn.Linear) -> None:
        self.weight = linear.weight.detach()

    def tiles(self, columns: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (index of the tile's first token, tile (C, H)), in order; the last tile may be smaller. Args: columns:
        C, the number of columns of the tile's logits."""
        yield from zip(range(0, len(self.weight), columns), self.weight.split(columns), strict=True)

    def start_gradient(self) -> None:
        """Allocates the gradient (V, H). The loss calls this method before the first tile of a backward pass."""
        self.gradient = torch.empty_like(self.weight)

    def add_product(self, first: int, d_logits: Tensor, rows: Tensor) -> None:
        """Computes d_logits.T @ rows, the gradient (C, H) of a tile, and stores it in the full gradient.

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
        """Returns the full gradient (V, H) after the last tile. Also drops this object's own reference to the gradient,
        because autograd would copy a gradient that has a second reference."""
        gradient, self.gradient = self.gradient, None
        return gradient


def tiles_of(linear: nn.Linear) -> HeadSource:
    """Returns the source of a layer's tiles: the layer's attribute `source` if it is set, for example by
    `offload/edges.py`, otherwise a `ResidentHead`."""
    return getattr(linear, "source", None) or ResidentHead(linear)  # theirs: layers of models have no such attribute


def matrix_of(linear: nn.Linear) -> Tensor:
    """Returns the full matrix (V, H) as a differentiable function of the weight. If the matrix is sharded over devices,
    all devices must call this function."""
    source = getattr(linear, "source", None)  # theirs: layers of models have no such attribute
    return source.matrix() if source else linear.weight
