"""Shards one layer over the ranks of a group; each rank computes with its shard.

A matrix that is sharded by columns needs the same input on every rank; the input's gradient is a sum over the ranks. If
it is sharded by rows, its output is such a sum, and the gradient needs none. An embedding's output is a sum, too, since
one rank has a token's row. A head gathers its logits, or leaves them sharded for a loss that reads them in tiles.
DTensor computes the sums; matrix products take plain tensors.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers.pytorch_utils import Conv1D

from lowmem.model.head_tiles import ResidentHead


class Layout(NamedTuple):
    """Describes how a parameter is sharded over a group.

    Args: dim: the sharded dimension; None: every rank has the full parameter. fused: the number of matrices that are
    concatenated along it, each of which is sharded by itself. summed: a rank's gradient is one summand of the true one.
    """

    dim: int | None = None
    fused: int = 1
    summed: bool = False

    def shard_of(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Returns one rank's shard in the order in which it computes: a copy, or `full` itself if it is not divided."""
        if self.dim is None:
            return full
        return torch.cat([matrix.chunk(size, self.dim)[rank] for matrix in full.chunk(self.fused, self.dim)], self.dim)

    def joined(self, shards: list[Tensor]) -> Tensor:
        """Returns the full tensor. Args: shards: those of all ranks, in order of rank."""
        if self.dim is None:
            return shards[0]
        matrices = zip(*(shard.chunk(self.fused, self.dim) for shard in shards), strict=True)
        return torch.cat([piece for matrix in matrices for piece in matrix], self.dim)


UNDIVIDED = Layout()


Layouts = dict[nn.Parameter, Layout]


class Group:
    """The ranks along one dimension of a mesh, which compute a layer together."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}

    def entering(self, x: Tensor) -> Tensor:
        """Returns x, which is the same on every rank, and adds its gradient over the ranks in backward."""
        return DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])

    def entering_several(self, x: Tensor) -> Tensor:
        """Does the same for layers that read one tensor, such as query, key and value: their gradients are added first,
        and the sum is reduced over the ranks once."""
        if id(x) not in self._entered:
            self._entered[id(x)] = x, self.entering(x)
        return self._entered[id(x)][1]

    def leaving(self) -> None:
        """Is called when these layers have computed, and forgets their input."""
        self._entered.clear()

    def redistributed(self, x: Tensor, before: Placement, after: Placement) -> Tensor:
        return DTensor.from_local(x, self.mesh, [before]).redistribute(self.mesh, [after]).to_local()

    def placed(self, shard: Tensor, full: Tensor, dim: int) -> DTensor:
        """Returns a shard as a DTensor. Args: full: a tensor of the full shape; dim: the sharded dimension."""
        return DTensor.from_local(shard, self.mesh, [Shard(dim)], shape=full.shape, stride=full.stride())

    def all_reduced(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Returns the reduced tensor; it is reduced in place if it needs no gradient."""
        dist.all_reduce(tensor, op, self.mesh.get_group())
        return tensor


def divide_columns(layer: nn.Linear | Conv1D, group: Group, fused: int = 1, gathered: bool = False) -> Layouts:
    """Shards a layer along its output: x (..., in), the same on every rank -> (..., out / N), or (..., out) if it is
    gathered."""
    layouts = {_exchange(layer, "weight", Layout(0 if isinstance(layer, nn.Linear) else 1, fused), group)}
    if layer.bias is not None:
        layouts.add(_exchange(layer, "bias", Layout(0, fused), group))

    def forward(x: Tensor) -> Tensor:
        if not gathered:
            return _product(layer, group.entering_several(x), layer.bias)
        product = _product(layer, group.entering(x), layer.bias)
        return group.redistributed(product, Shard(product.dim() - 1), Replicate())

    layer.forward = forward
    return dict(layouts)


def divide_rows(layer: nn.Linear | Conv1D, group: Group, split: bool = False) -> Layouts:
    """Shards a layer along its input: x (..., in / N), or (..., in) if it is to be split here -> (..., out). Every rank
    has the full bias."""
    layouts = {_exchange(layer, "weight", Layout(1 if isinstance(layer, nn.Linear) else 0), group)}

    def forward(x: Tensor) -> Tensor:
        group.leaving()
        x = group.redistributed(x, Replicate(), Shard(x.dim() - 1)) if split else x
        product = group.redistributed(_product(layer, x, None), Partial(), Replicate())
        return product if layer.bias is None else product + layer.bias.to(product.dtype)  # autocast casts it, too

    layer.forward = forward
    return dict(layouts)


def divide_embedding(embedding: nn.Embedding, group: Group) -> Layouts:
    """Shards an embedding along the vocabulary: each rank looks up the tokens whose rows it has, and takes zeros for
    others."""
    layouts = dict([_exchange(embedding, "weight", Layout(0), group)])
    own = embedding.num_embeddings // group.size
    first_token = own * group.rank
    padding = embedding.padding_idx
    padding = padding - first_token if padding is not None and 0 <= padding - first_token < own else None

    def forward(input_ids: Tensor) -> Tensor:
        place = input_ids - first_token
        elsewhere = (place < 0) | (place >= own)
        rows = F.embedding(place.masked_fill(elsewhere, 0), embedding.weight.to_local(), padding)
        return group.redistributed(rows.masked_fill(elsewhere[..., None], 0.0), Partial(), Replicate())

    embedding.forward = forward
    return layouts


def divide_head(head: nn.Linear, group: Group) -> Layouts:
    """Shards a head along the vocabulary. All logits are gathered, except for a loss in tiles, which reads each rank's
    own."""
    layouts = divide_columns(head, group, gathered=True)
    head.source = Share(head, group)
    return layouts


class Share(ResidentHead):
    """This rank's shard of a head's matrix, as a source of tiles."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        self.linear, self.group = linear, group

    @property
    def weight(self) -> Tensor:
        """Returns the shard (V / N, H)."""
        return self.linear.weight.detach().to_local()

    @property
    def first_token(self) -> int:
        return self.group.rank * len(self.weight)

    def matrix(self) -> Tensor:
        return self.linear.weight.full_tensor()

    def tiles(self, columns: int) -> Iterator[tuple[int, Tensor]]:
        yield from ((self.first_token + start, tile) for start, tile in super().tiles(columns))

    def add_product(self, first: int, d_logits: Tensor, rows: Tensor) -> None:
        super().add_product(first - self.first_token, d_logits, rows)

    def whole_gradient(self) -> DTensor:
        return self.group.placed(super().whole_gradient(), self.linear.weight, 0)

    def joined(self, top: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        highest = self.group.all_reduced(top.clone(), dist.ReduceOp.MAX)
        total, chosen = self.group.all_reduced(torch.stack([total * (top - highest).exp_(), chosen]))
        return highest, total, chosen

    def summed(self, d_rows: Tensor) -> Tensor:
        return self.group.all_reduced(d_rows)


def _exchange(layer: nn.Module, name: str, layout: Layout, group: Group) -> tuple[nn.Parameter, Layout]:
    """Replaces a layer's parameter by this rank's shard of it."""
    p = getattr(layer, name)
    shard = layout.shard_of(p.detach(), group.rank, group.size)
    divided = nn.Parameter(group.placed(shard, p, layout.dim), p.requires_grad)
    setattr(layer, name, divided)
    return divided, layout


def _product(layer: nn.Linear | Conv1D, x: Tensor, bias: DTensor | None) -> Tensor:
    weight = layer.weight.to_local()
    weight = weight if isinstance(layer, nn.Linear) else weight.T
    return F.linear(x, weight, None if bias is None else bias.to_local())
