"""Styles that shard a layer for tensor parallelism: each rank of a group computes with its shard.

    style        input                   output                           all-reduce
    Colwise      replicated              sharded by features              of the input's gradient, in backward
    Rowwise      sharded by features     replicated                       of the output, in forward
    Embedding    token ids               replicated                       of the output: only one rank has a token's row

A sharded head is Colwise too. Its forward pass gathers the logits. A loss that reads the head in tiles (`HeadShard`)
computes with sharded logits instead.

torch's `parallelize_module` applies the styles. Sharded parameters are DTensors, and most collectives are DTensor's.
Matrix products use plain tensors, so code that observes operators (memory tracker, selective checkpointing) sees the
same products as in a run without sharding.

torch's own styles, ColwiseParallel and RowwiseParallel, multiply DTensors. In a measurement, a block took twice as much
host time with torch's styles as with the styles of this module, and every rank had embedding gradients of full size.
The backward pass of a block needed five all-reduces instead of two, because layers with a common input (query, key and
value; gate and up) each reduced their own gradient of this input. torch's styles support neither GPT-2's Conv1D nor its
fused matrices.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from transformers.pytorch_utils import Conv1D

from lowmem.model.head_tiles import ResidentHead


class Group:
    """The ranks along one dimension of a device mesh, which compute each layer together."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}

    def entering(self, x: Tensor) -> Tensor:
        """Returns x as a tensor whose gradient is all-reduced in backward. Layers with a common input, such as query,
        key and value, get the same tensor object until `leaving` is called. So autograd first sums their gradients of
        this input on each rank, and one all-reduce follows. Args: x: a tensor that is equal on all ranks."""
        if id(x) not in self._entered:
            entered = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
            self._entered[id(x)] = x, entered
        return self._entered[id(x)][1]

    def leaving(self) -> None:
        """Drops the references to the inputs of `entering`. Called by `Rowwise`, which ends a pair of layers, and by a
        `Colwise` that gathers its output."""
        self._entered.clear()

    def redistributed(self, x: Tensor, before: Placement, after: Placement) -> Tensor:
        """Changes the placement of a local tensor with DTensor's collectives, and returns the new local tensor."""
        return DTensor.from_local(x, self.mesh, [before]).redistribute(self.mesh, [after]).to_local()

    def placed(self, shard: Tensor, full: Tensor, dim: int) -> DTensor:
        """Returns a shard as a DTensor. Args: shard: this rank's shard; full: a tensor with the shape and strides of
        the full matrix; dim: the sharded dimension."""
        return DTensor.from_local(shard, self.mesh, [Shard(dim)], shape=full.shape, stride=full.stride())

    def shard(self, layer: nn.Module, name: str, dim: int, fused: int = 1) -> None:
        """Replaces a parameter by a DTensor with this rank's shard.

        Args:
            layer: the layer with the parameter.
            name: the parameter's name.
            dim: the dimension to shard.
            fused: number of matrices that are concatenated along `dim`; each matrix is sharded separately.
        """
        p = getattr(layer, name)
        shard = swapped(p.detach(), dim, fused, self.size).chunk(self.size, dim)[self.rank].clone()
        setattr(layer, name, nn.Parameter(self.placed(shard, p, dim), p.requires_grad))

    def all_reduced(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a tensor over the group, in place, and returns it."""
        dist.all_reduce(tensor, op, self.mesh.get_group())
        return tensor


def swapped(tensor: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """Transposes the order of the pieces along a dimension that consists of `outer` x `inner` equal pieces. With outer
    = matrices and inner = ranks, this sorts the pieces of fused matrices by rank. With outer = ranks and inner =
    matrices, it restores the original order."""
    return tensor.unflatten(dim, (outer, inner, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


class Colwise(ParallelStyle):
    """Shards a linear layer along its output features: the input is (..., in), equal on all ranks, and the output is
    (..., out / N).

    Args:
        group: the ranks.
        fused: see `Group.shard`.
        gathered: True: the output is gathered to (..., out).
    """

    def __init__(self, group: Group, fused: int = 1, gathered: bool = False) -> None:
        self.group, self.fused, self.gathered = group, fused, gathered

    def _apply(self, layer: nn.Linear | Conv1D, device_mesh: DeviceMesh) -> nn.Module:
        self.group.shard(layer, "weight", 0 if isinstance(layer, nn.Linear) else 1, self.fused)
        if layer.bias is not None:
            self.group.shard(layer, "bias", 0, self.fused)

        def forward(x: Tensor) -> Tensor:
            bias = None if layer.bias is None else layer.bias.to_local()
            product = F.linear(self.group.entering(x), _local(layer), bias)
            if not self.gathered:
                return product
            self.group.leaving()
            return self.group.redistributed(product, Shard(product.dim() - 1), Replicate())

        layer.forward = forward
        return layer


class Rowwise(ParallelStyle):
    """Shards a linear layer along its input features: the input is (..., in / N), and the output is (..., out). Every
    rank has the full bias.

    Args:
        group: the ranks.
        split: True: the input is (..., in), equal on all ranks, and each rank uses its own slice of the features.
    """

    def __init__(self, group: Group, split: bool = False) -> None:
        self.group, self.split = group, split

    def _apply(self, layer: nn.Linear | Conv1D, device_mesh: DeviceMesh) -> nn.Module:
        self.group.shard(layer, "weight", 1 if isinstance(layer, nn.Linear) else 0)

        def forward(x: Tensor) -> Tensor:
            self.group.leaving()
            x = self.group.redistributed(x, Replicate(), Shard(x.dim() - 1)) if self.split else x
            product = self.group.redistributed(F.linear(x, _local(layer)), Partial(), Replicate())
            # the result has the dtype of the product, as in a linear layer under autocast
            return product if layer.bias is None else product + layer.bias.to(product.dtype)

        layer.forward = forward
        return layer


class Embedding(ParallelStyle):
    """Shards an embedding along the vocabulary. Each rank looks up the tokens whose rows it has, and uses zeros for all
    other tokens. An all-reduce sums the results of the ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def _apply(self, embedding: nn.Embedding, device_mesh: DeviceMesh) -> nn.Module:
        own = embedding.num_embeddings // self.group.size
        first_token = own * self.group.rank
        padding = embedding.padding_idx
        padding = padding - first_token if padding is not None and 0 <= padding - first_token < own else None
        self.group.shard(embedding, "weight", 0)

        def forward(input_ids: Tensor) -> Tensor:
            place = input_ids - first_token
            elsewhere = (place < 0) | (place >= own)
            rows = F.embedding(place.masked_fill(elsewhere, 0), embedding.weight.to_local(), padding)
            return self.group.redistributed(rows.masked_fill(elsewhere[..., None], 0.0), Partial(), Replicate())

        embedding.forward = forward
        return embedding


class HeadShard(ResidentHead):
    """Provides this rank's shard of the head's matrix to a loss, in tiles. `HeadSource` and `ResidentHead` describe the
    methods, except `matrix`, which returns the full matrix for `matrix_of` (`model/head_tiles.py`). `matrix`, `joined`
    and `summed` communicate, so all ranks of the group must call them."""

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


def _local(layer: nn.Linear | Conv1D) -> Tensor:
    """Returns this rank's shard of a matrix, in the layout (out, in) of nn.Linear."""
    weight = layer.weight.to_local()
    return weight if isinstance(layer, nn.Linear) else weight.T
