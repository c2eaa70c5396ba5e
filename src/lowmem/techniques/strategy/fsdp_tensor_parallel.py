"""Combines tensor parallelism within groups of devices with `fully_shard` over the groups: a mesh of two dimensions.

The ranks of a group share a fast link and compute one micro-batch together; the groups read other rows. A rank's shard
within its group is sharded once more over the groups. So each device has 1/N of a parameter that tensor parallelism
shards, and of any other parameter one shard per group.
"""

from lightning.pytorch import LightningModule

from lowmem.techniques.strategy.fsdp import shard
from lowmem.techniques.strategy.tensor_parallel import TensorParallel


class FullyShardTensorParallel(TensorParallel):
    """Args: tensor_parallel_size: the ranks of a group, which are neighbours; N devices form N / size groups."""

    def __init__(
        self, device: str = "cpu", devices: int = 1, timeout: float = 600, tensor_parallel_size: int = 2
    ) -> None:
        self.tensor_parallel_size = tensor_parallel_size
        super().__init__(device, devices, timeout)

    def laid_out(self, module: LightningModule) -> dict[str, str]:
        styles = super().laid_out(module)
        shard(module, self.mesh["data"], offload=False, pinned=False)
        return styles
