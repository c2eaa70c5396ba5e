"""Tensor parallelism within groups of devices, combined with `fully_shard` over the groups: a two-dimensional mesh.

The ranks of a group should share a fast link, because they compute a micro-batch together. Different groups read
different rows. Tensor parallelism shards a matrix within a group, and `fully_shard` shards each of these shards over
the groups. So each of N devices in G groups has 1/N of the parameters that tensor parallelism shards, and 1/G of the
replicated parameters.
"""

from lightning.pytorch import LightningModule

from lowmem.techniques.strategy.fsdp import shard
from lowmem.techniques.strategy.tensor_parallel import TensorParallel


class FullyShardTensorParallel(TensorParallel):
    """Tensor parallelism within groups, and FSDP over the groups. Args: tensor_parallel_size: number of ranks in a
    group; the ranks of a group are consecutive, and N devices form N / tensor_parallel_size groups."""

    def __init__(
        self, device: str = "cpu", devices: int = 1, timeout: float = 600, tensor_parallel_size: int = 2
    ) -> None:
        self.tensor_parallel_size = tensor_parallel_size
        super().__init__(device, devices, timeout)

    def laid_out(self, module: LightningModule) -> dict[str, str]:
        styles = super().laid_out(module)
        shard(module, self.mesh["data"], offload=False, pinned=False)
        return styles
