"""transformers' Adafactor, with an additional method that updates 16-bit weights in host memory piece by piece.

For a 16-bit weight, transformers' `step` needs 16 bytes of temporary memory per element of the largest parameter: fp32
copies of weight and gradient, and two more fp32 tensors. For the embedding of Llama-3.1-8B this is 8 GiB. `step_narrow`
applies transformers' formulas to one piece of the parameter at a time, so it needs temporary memory for only one piece.
Reductions over the full parameter (the RMS of the weight, the mean squares of rows and columns, and the RMS of the
update) are computed in separate passes, so the gradient is read three times. These reductions add in a different order
than transformers' `step` does; all other arithmetic is bit-identical. Source: Shazeer and Stern 2018, arXiv 1804.04235.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import optimization

from lowmem.step.one_weight import InPieces, Step

CHUNK = 1 << 22  # maximum number of elements of a piece (16 MiB in fp32), unless a single row has more

Shape = tuple[int, int, int]  # (matrices, rows, columns)
Piece = tuple[slice, slice]  # (matrices, rows): one or more full matrices, or one or more rows of a matrix
Read = Callable[[Piece], Tensor]  # returns an fp32 copy that the caller may change; a later call may overwrite it
Scale = Callable[[Piece, Tensor], Tensor]  # (piece, output tensor) -> output tensor with the scales of the piece


class Adafactor(optimization.Adafactor, InPieces):
    """transformers' Adafactor. Args: see transformers; `relative_step` must be False, because `step_narrow` takes the
    step size from `lr`."""

    @torch.no_grad()
    def step_narrow(self, step: Step, round: Callable[[Tensor, Tensor], None]) -> None:
        gradient, group, p, reading, narrow = step
        state, shape = self.state[p], _as_matrices(p.shape)
        if not state:
            state |= _zeros(p.shape, group, gradient.device)
        gradient, narrow, pieces = gradient.reshape(shape), narrow.view(shape), list(_pieces(shape))
        # Allocate the buffers once: allocating and freeing them per piece would fragment the heap.
        scratch = torch.empty(2, max(narrow[piece].numel() for piece in pieces), device=gradient.device)

        def buffer(number: int, piece: Piece) -> Tensor:
            return scratch[number, : narrow[piece].numel()].view(narrow[piece].shape)

        def weight(piece: Piece) -> Tensor:
            return buffer(0, piece).copy_(narrow[piece])

        def read(piece: Piece) -> Tensor:
            return reading(gradient[piece], buffer(0, piece))

        def direction(piece: Piece) -> Tensor:
            return scale(piece, buffer(1, piece)).mul_(read(piece))

        state["step"] += 1
        state["RMS"] = _rms(weight, pieces, p.numel())
        lr = group["lr"]
        if group["scale_parameter"]:
            lr = state["RMS"].clamp(min=group["eps"][1]) * lr
        scale = (_factored if p.dim() > 1 else _each)(state, shape, pieces, read, group)
        limit = (_rms(direction, pieces, p.numel()) / group["clip_threshold"]).clamp_(min=1.0)
        for piece in pieces:
            update = direction(piece).div_(limit).mul_(lr)
            if group["beta1"] is not None:
                momentum = state["exp_avg"].view(shape)[piece]
                update = momentum.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
            wide = weight(piece)
            if group["weight_decay"] != 0:
                wide.add_(wide, alpha=-group["weight_decay"] * lr)
            round(wide.sub_(update).view(-1), narrow[piece].view(-1))


def _zeros(shape: torch.Size, group: dict, device: torch.device) -> dict:
    """Returns the initial state, as transformers' first step creates it."""
    sizes = {} if group["beta1"] is None else {"exp_avg": shape}
    if len(shape) > 1:
        sizes |= {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
    else:
        sizes |= {"exp_avg_sq": shape}
    return {"step": 0, **{key: torch.zeros(size, device=device) for key, size in sizes.items()}, "RMS": 0}


def _as_matrices(shape: torch.Size) -> Shape:
    """Returns a parameter's shape as (matrices, rows, columns). A vector becomes a matrix with one column."""
    return (shape[:-2].numel(), *shape[-2:]) if len(shape) > 1 else (1, shape.numel(), 1)


def _pieces(shape: Shape) -> Iterator[Piece]:
    """Yields the pieces of a parameter in the order of its elements."""
    matrices, rows, columns = shape
    if count := CHUNK // (rows * columns):  # number of full matrices per piece
        yield from ((slice(i, i + count), slice(None)) for i in range(0, matrices, count))
    else:
        height = max(1, CHUNK // columns)  # rows per piece
        yield from ((slice(i, i + 1), slice(j, j + height)) for i in range(matrices) for j in range(0, rows, height))


def _rms(read: Read, pieces: list[Piece], elements: int) -> Tensor:
    norms = torch.empty(len(pieces))  # one tensor, because many small tensors would fragment the heap
    for number, piece in enumerate(pieces):
        norms[number] = read(piece).norm(2)
    return norms.norm(2) / elements**0.5


def _factored(state: dict, shape: Shape, pieces: list[Piece], read: Read, group: dict) -> Scale:
    """Updates the running mean squares of rows and columns. Returns: a function that writes a piece of the scales
    1 / sqrt(v) into a tensor, where v is the second moment that is estimated from the mean squares."""
    rows, columns = state["exp_avg_sq_row"].view(shape[:2]), state["exp_avg_sq_col"].view(shape[0], shape[2])
    beta, sums = _beta(state, group), torch.zeros_like(columns)
    for piece in pieces:
        square = read(piece).square_().add_(group["eps"][0])
        rows[piece].mul_(beta).add_(square.mean(-1), alpha=1.0 - beta)
        sums[piece[0]].add_(square.sum(-2))
    columns.mul_(beta).add_(sums.div_(shape[1]), alpha=1.0 - beta)
    row_scale, column_scale = (rows / rows.mean(-1, keepdim=True)).rsqrt_(), columns.rsqrt()
    return lambda piece, out: torch.mul(row_scale[piece].unsqueeze(-1), column_scale[piece[0]].unsqueeze(-2), out=out)


def _each(state: dict, shape: Shape, pieces: list[Piece], read: Read, group: dict) -> Scale:
    """Updates the running mean square v of each element of a vector. Returns: a function as in `_factored`, for this
    v."""
    squares, beta = state["exp_avg_sq"].view(shape), _beta(state, group)
    for piece in pieces:
        squares[piece].mul_(beta).add_(read(piece).square_().add_(group["eps"][0]), alpha=1.0 - beta)
    return lambda piece, out: torch.rsqrt(squares[piece], out=out)


def _beta(state: dict, group: dict) -> float:
    return 1.0 - state["step"] ** group["decay_rate"]
