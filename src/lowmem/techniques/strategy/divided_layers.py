"""One layer of which each rank of a group holds a part, and computes with it.

A product whose columns are divided needs nothing but the same input on every rank; its gradient is a sum over them. One
whose rows are divided is such a sum, and hands its gradient on as it is. An embedding is a sum too, since a token's row
is on one rank; a head gathers its logits, or leaves them divided for a loss that reads them in tiles. The sums are
DTensor's; products are of plain tensors.
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

from lowmem.techniques.loss.head_tiles import Whole


class Layout(NamedTuple):
    """How the ranks of a group hold a parameter.

    dim: along which it is divided; None: every rank has all of it. fused: how many parts stand one behind the other
    along it, each divided by itself. summed: whether a rank's gradient is a summand of the true one.
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


WHOLE = Layout()


Layouts = dict[nn.Parameter, Layout]


class Group:
    """Ranks that compute together, of one dimension of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}

    def entering(self, x: Tensor) -> Tensor:
        """x itself, the same on every rank. What comes back is a summand of its gradient on each."""
        return DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])

    def entering_several(self, x: Tensor) -> Tensor:
        """The same for all layers that read one tensor, query, key and value, say: their gradients are added up first,
        and then once over the ranks."""
        if id(x) not in self._entered:
            self._entered[id(x)] = x, self.entering(x)
        return self._entered[id(x)][1]

    def leaving(self) -> None:
        """These layers are done."""
        self._entered.clear()

    def redistributed(self, x: Tensor, before: Placement, after: Placement) -> Tensor:
        return DTensor.from_local(x, self.mesh, [before]).redistribute(self.mesh, [after]).to_local()

    def placed(self, part: Tensor, whole: Tensor, dim: int) -> DTensor:
        """A rank's part as what it is. Args: whole: of the shape of the whole; dim: along which it is divided."""
        return DTensor.from_local(part, self.mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride())

    def all_reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """In place, where no gradient is asked for."""
        dist.all_reduce(tensor, how, self.mesh.get_group())
        return tensor


def divide_columns(layer: nn.Linear | Conv1D, group: Group, fused: int = 1, gathered: bool = False) -> Layouts:
    """Along what leaves it: x (..., in), the same on every rank -> (..., out / N); where it is gathered (..., out)."""
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
    """Along what enters it: x (..., in / N), or if it is split here (..., in) -> (..., out). The bias stays whole."""
    layouts = {_exchange(layer, "weight", Layout(1 if isinstance(layer, nn.Linear) else 0), group)}

    def forward(x: Tensor) -> Tensor:
        group.leaving()
        x = group.redistributed(x, Replicate(), Shard(x.dim() - 1)) if split else x
        product = group.redistributed(_product(layer, x, None), Partial(), Replicate())
        return product if layer.bias is None else product + layer.bias.to(product.dtype)  # autocast casts it, too

    layer.forward = forward
    return dict(layouts)


def divide_embedding(embedding: nn.Embedding, group: Group) -> Layouts:
    """Along the vocabulary: each rank looks up the tokens of which it has the rows; of others it has zeros."""
    layouts = dict([_exchange(embedding, "weight", Layout(0), group)])
    own = embedding.num_embeddings // group.size
    first = own * group.rank
    padding = embedding.padding_idx
    padding = padding - first if padding is not None and 0 <= padding - first < own else None

    def forward(input_ids: Tensor) -> Tensor:
        place = input_ids - first
        elsewhere = (place < 0) | (place >= own)
        rows = F.embedding(place.masked_fill(elsewhere, 0), embedding.weight.to_local(), padding)
        return group.redistributed(rows.masked_fill(elsewhere[..., None], 0.0), Partial(), Replicate())

    embedding.forward = forward
    return layouts


def divide_head(head: nn.Linear, group: Group) -> Layouts:
    """Along the vocabulary. All logits are gathered; a loss in tiles reads each rank's own."""
    layouts = divide_columns(head, group, gathered=True)
    head.source = Share(head, group)
    return layouts


class Share(Whole):
    """This rank's part of a head's matrix, as a source of tiles."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        self.linear, self.group = linear, group

    @property
    def weight(self) -> Tensor:
        """(V / N, H)."""
        return self.linear.weight.detach().to_local()

    @property
    def first(self) -> int:
        return self.group.rank * len(self.weight)

    def matrix(self) -> Tensor:
        return self.linear.weight.full_tensor()

    def tiles(self, columns: int) -> Iterator[tuple[int, Tensor]]:
        yield from ((self.first + start, tile) for start, tile in super().tiles(columns))

    def add_product(self, first: int, d_logits: Tensor, rows: Tensor) -> None:
        super().add_product(first - self.first, d_logits, rows)

    def whole_gradient(self) -> DTensor:
        return self.group.placed(super().whole_gradient(), self.linear.weight, 0)

    def joined(self, top: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        highest = self.group.all_reduced(top.clone(), dist.ReduceOp.MAX)
        total, chosen = self.group.all_reduced(torch.stack([total * (top - highest).exp_(), chosen]))
        return highest, total, chosen

    def summed(self, d_rows: Tensor) -> Tensor:
        return self.group.all_reduced(d_rows)


def _exchange(layer: nn.Module, name: str, layout: Layout, group: Group) -> tuple[nn.Parameter, Layout]:
    """A parameter for this rank's part of it."""
    p = getattr(layer, name)
    part = layout.shard_of(p.detach(), group.rank, group.size)
    divided = nn.Parameter(group.placed(part, p, layout.dim), p.requires_grad)
    setattr(layer, name, divided)
    return divided, layout


def _product(layer: nn.Linear | Conv1D, x: Tensor, bias: DTensor | None) -> Tensor:
    weight = layer.weight.to_local()
    weight = weight if isinstance(layer, nn.Linear) else weight.T
    return F.linear(x, weight, None if bias is None else bias.to_local())
