"""`loss=tiled`: cross entropy that computes the logits of one tile of the vocabulary at a time, for all tokens.

N: number of tokens with a label; V: tokens in the vocabulary; C: tokens of the vocabulary per tile; H: hidden size.

    forward     for each tile: logits (N, C) -> running maximum and sum of exponentials, logit of the label
    backward    for each tile: logits again -> gradient of the logits -> complete gradient (C, H) of the tile's weights

`loss=chunked` sums the gradient of the head's weight (V, H) in fp32, over chunks of tokens. With 16-bit weights, the
memory use of a run often peaks while this sum exists. `loss=tiled` computes the gradient of a tile as a single product
over all tokens, so the gradient has the dtype of the weight: 2 bytes per element with 16-bit weights, without an fp32
sum. The price is that the logits are computed twice: the gradient needs the softmax, whose denominator is a sum over
all tiles (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867). With 16-bit products, the temporary memory is
6 x N x C bytes for logits, and in backward also 4 x N x H bytes for the fp32 gradient of the head's input.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lowmem.data.loader import MicroBatch
from lowmem.model.head_tiles import tiles_of
from lowmem.system.errors import Refused
from lowmem.techniques.loss.cross_entropy import Loss, counted
from lowmem.techniques.loss.head import agrees, enter, finished, multiplied_in


class Tiled(Loss):
    """Computes the loss of `cross_entropy.full`, one tile of the vocabulary at a time. Args: columns: maximum number of
    tokens of the vocabulary per tile; only the logits of one tile are in memory at a time. Raises: Refused: `columns`
    is not a whole number of at least 1."""

    head_in_tiles = True

    def __init__(self, columns: int) -> None:
        if not isinstance(columns, int) or isinstance(columns, bool) or columns < 1:
            raise Refused(
                f"loss.columns={columns}: give a whole number of vocabulary entries, at least 1, such as "
                "loss.columns=4096."
            )
        self.columns = columns

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        return self.each(model, batch)[0].sum()

    def each(self, model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns two tensors (N,): the fp32 loss of each token with a label, and the token's index in the flattened
        labels."""
        head = enter(model, batch.inputs)
        hidden, labels = head.hidden.flatten(0, 1), batch.labels.flatten()  # (B x T, H)
        hidden = hidden.to(multiplied_in(hidden))  # autocast has no effect inside the autograd function
        learned = counted(labels, batch.known_learned_tokens)  # the head is not computed at other positions
        source = tiles_of(head.linear)
        weight, bias = head.linear.weight, head.linear.bias
        losses = _TiledCrossEntropy.apply(hidden, weight, bias, labels, learned, source, self.columns, head.finish)
        return losses, learned

    def verify(self, model: PreTrainedModel, batch: MicroBatch) -> None:
        if not agrees(model, batch.inputs, tiled=True):
            instead = "loss=chunked" if agrees(model, batch.inputs) else "loss=full"
            raise Refused(
                f"loss=tiled: logits of {type(model).__name__} computed in tiles of the vocabulary differ from the "
                f"model's own, so training would optimize a different function. Type {instead}."
            )


class _TiledCrossEntropy(torch.autograd.Function):
    """Computes -log softmax(head(hidden_i))[label_i] for each token i with a label, one tile of the vocabulary at a
    time."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, learned, source, columns, finish):  # noqa: PLR0913
        """Returns the losses (N,) in fp32.

        Args:
            hidden: (B x T, H), input of the head.
            weight: (V, H), the head's weight. It is an argument so that autograd expects a gradient; the values are
                read through `source`.
            bias: (V,), the head's bias, or None.
            labels: (B x T,).
            learned: (N,), indices of positions with a label.
            source: the `HeadSource` that provides the tiles of the weight.
            columns: tokens of the vocabulary per tile.
            finish: see `Head`.
        """
        rows, labels = hidden.index_select(0, learned), labels[learned]  # (N, H), (N,)
        top = torch.full(labels.shape, torch.finfo(torch.float32).min, device=hidden.device)
        total, chosen = torch.zeros_like(top), torch.zeros_like(top)
        for first, tile in source.tiles(columns):
            tile = tile.to(rows.dtype)
            logits = _logits(rows, tile, first, bias, finish)[0]  # (N, C), fp32
            inside, place = _place(labels, first, len(tile))
            chosen = torch.where(inside, logits.gather(1, place[:, None])[:, 0], chosen)
            higher = torch.maximum(top, logits.amax(1))
            total.mul_((top - higher).exp_()).add_(logits.sub_(higher[:, None]).exp_().sum(1))
            top = higher
            del logits, tile  # freed before the next tile and its logits are allocated
        top, total, chosen = source.joined(top, total, chosen)
        lse = total.log_().add_(top)  # (N,), log-sum-exp over the vocabulary
        ctx.save_for_backward(rows, lse, labels, learned, bias)
        ctx.source, ctx.columns, ctx.finish, ctx.positions = source, columns, finish, len(hidden)
        return lse - chosen

    @staticmethod
    def backward(ctx, d_losses):
        rows, lse, labels, learned, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_rows = torch.zeros_like(rows, dtype=torch.float32) if needs_hidden else None
        d_bias = torch.empty_like(bias) if needs_bias else None
        if needs_weight:
            ctx.source.start_gradient()
        for first, tile in ctx.source.tiles(ctx.columns):
            last, tile = first + len(tile), tile.to(rows.dtype)
            d_logits, back = _logits(rows, tile, first, bias, ctx.finish)
            d_logits = d_logits.sub_(lse[:, None]).exp_()  # the gradient is softmax minus one-hot
            inside, place = _place(labels, first, len(tile))
            d_logits[torch.arange(len(place), device=place.device), place] -= inside.float()
            d_logits = back(d_logits.mul_(d_losses[:, None]))  # d_losses has the loss scale: multiply before rounding
            if needs_bias:
                d_bias[first:last] = d_logits.sum(0)
            d_logits = d_logits.to(rows.dtype)
            if needs_hidden:
                _add_product(d_rows, d_logits, tile)
            del back, tile
            if needs_weight:
                ctx.source.add_product(first, d_logits, rows)
            del d_logits
        d_weight = ctx.source.whole_gradient() if needs_weight else None
        d_hidden = _spread(ctx.source.summed(d_rows).to(rows.dtype), learned, ctx.positions) if needs_hidden else None
        return d_hidden, d_weight, d_bias, *[None] * 5


def _logits(
    rows: Tensor, tile: Tensor, first: int, bias: Tensor | None, finish: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the fp32 logits (N, C) of a tile, which the caller may overwrite, and a function that maps the gradient
    of the logits to the gradient of the head's output. Args: rows: (N, H); tile: (C, H); first: index of the tile's
    first token."""
    tile_bias = None if bias is None else bias[first : first + len(tile)].to(rows.dtype)
    return finished(F.linear(rows, tile, tile_bias), finish, copy=True)


def _place(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns two tensors (N,): a bool mask that is True for labels in the tile, and the column of each label in the
    tile. If a label is outside of the tile, its column is in range, but has no meaning.

    Args:
        labels: (N,).
        first: index of the tile's first token.
        size: number of tokens in the tile.
    """
    inside = (labels >= first) & (labels < first + size)
    return inside, (labels - first).clamp_(0, size - 1)


def _add_product(total: Tensor, d_logits: Tensor, tile: Tensor) -> None:
    """Adds d_logits @ tile to total. Args: total: (N, H), fp32; d_logits: (N, C); tile: (C, H)."""
    if total.dtype == tile.dtype:
        total.addmm_(d_logits, tile)
    else:
        total.add_(d_logits @ tile)


def _spread(rows: Tensor, learned: Tensor, positions: int) -> Tensor:
    """Returns (B x T, H) with the rows (N, H) at the positions `learned`, and zeros elsewhere."""
    return rows.new_zeros(positions, rows.shape[1]).index_copy_(0, learned, rows)
