"""Tensor parallelism within groups of devices, and `fully_shard` over the groups: a mesh of two dimensions.

The ranks of a group, between which the link is fast, compute one micro-batch together; the groups read other rows. What
a rank of a group holds is divided once more over the groups, so that of what tensor parallelism divides each device has
1/N, and of what it leaves whole one part per group.
"""

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lowmem.techniques.strategy.divided_layers import Layout
from lowmem.techniques.strategy.fsdp import shard
from lowmem.techniques.strategy.tensor_parallel import TensorParallel


class FullyShardTensorParallel(TensorParallel):
    """Args: tensor_parallel_size: ranks of a group, which are neighbours; with N devices there are N / size groups."""

    def __init__(
        self, device: str = "cpu", devices: int = 1, timeout: float = 600, tensor_parallel_size: int = 2
    ) -> None:
        self.tensor_parallel_size = tensor_parallel_size
        super().__init__(device, devices, timeout)

    def laid_out(self, module: LightningModule) -> dict[str, Layout]:
        layouts = super().laid_out(module)
        shard(module, self.mesh["data"], offload=False, pinned=False)
        return layouts

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        return _piece(super().shard_of(p, full), self.data_rank, self.data_size)


def _piece(part: Tensor, rank: int, size: int) -> Tensor:
    """What a rank keeps of its part within a group: fully_shard divides the first dimension; the last are smaller."""
    pieces = part.chunk(size)
    return pieces[rank] if rank < len(pieces) else part[:0]
