"""Where tiles of a head's matrix come from, some tokens of the vocabulary at a time, and where their gradient goes."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Source:
    """What a loss asks of where a head's matrix lies, beside its tiles. Here one device reads all of them."""

    def joined(self, top: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row (N,): its largest logit, the sum of exp(logit - largest) and the label's logit, or 0 where no
        tile had it; of the tiles that this source gave -> of all tiles."""
        return top, total, chosen

    def summed(self, d_rows: Tensor) -> Tensor:
        """The gradient (N, H) that these tiles leave for what entered the head -> that of all."""
        return d_rows


class Whole(Source):
    """The matrix (V, H) lies on the device: its tiles are views, and its gradient is one tensor of its dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        self.weight = linear.weight.detach()

    def tiles(self, columns: int) -> Iterator[tuple[int, Tensor]]:
        """(first token of the vocabulary, tile (C, H)), in order; the last may be smaller."""
        yield from zip(range(0, len(self.weight), columns), self.weight.split(columns), strict=True)

    def start_gradient(self) -> None:
        """Before the first tile of a backward pass."""
        self.gradient = torch.empty_like(self.weight)

    def add_product(self, first: int, d_logits: Tensor, rows: Tensor) -> None:
        """A tile's gradient (C, H) is d_logits (N, C) transposed x rows (N, H), both in the computation's dtype."""
        here = self.gradient[first : first + d_logits.shape[1]]
        if here.dtype == rows.dtype:
            torch.mm(d_logits.T, rows, out=here)
        else:
            here.copy_(d_logits.T @ rows)

    def whole_gradient(self) -> Tensor:
        """(V, H), after the last tile. Nothing here holds it any longer: autograd would copy it."""
        gradient, self.gradient = self.gradient, None
        return gradient


def tiles_of(linear: nn.Linear) -> Source:
    """Its own, unless its weight lies elsewhere and whoever holds it is the source (`techniques/weights/edges.py`)."""
    return getattr(linear, "source", None) or Whole(linear)


def matrix_of(linear: nn.Linear) -> Tensor:
    """(V, H), whole, whose gradient reaches the weight."""
    source = getattr(linear, "source", None)
    return source.matrix() if source else linear.weight
