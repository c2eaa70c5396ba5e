"""`strategy=fsdp`: shards weights, gradients and optimizer state over all devices. Each device gathers the full weights
of a block shortly before the block computes.

Each of N devices stores 1/N of the weights, gradients and optimizer state, and temporarily also the full weights of two
blocks: the block that computes, and the block that computes next. In backward, each device also stores the full
gradients of a block until they are reduced. The weights outside the blocks (embedding, head) stay gathered from forward
to the end of backward. Each micro-batch costs two all-gathers of the blocks' weights, one all-gather of the weights
outside the blocks, and one reduce-scatter of all gradients. With `strategy=fsdp_offload` the shards are in host memory,
and the CPU runs the optimizer. Source: Zhao et al. 2023, arXiv 2304.11277; torch's fully_shard.
"""

from collections.abc import Callable
from functools import reduce

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lowmem.data.loader import MicroBatch
from lowmem.model.blocks import blocks
from lowmem.techniques.loss.cross_entropy import Loss
from lowmem.techniques.strategy import load_in_parts
from lowmem.techniques.strategy.several import Divided


class FullyShard(Divided):
    """Shards with torch's fully_shard. Args: offload: True: keep the shards in host memory."""

    widens = shards_matrices = True

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600, offload: bool = False) -> None:
        super().__init__(device, devices, timeout)
        self.offload = offload
        self.side = "host" if offload else "device"
        self.mesh = self.meshed(timeout, data=self.size)

    def shard(self, module: LightningModule) -> None:
        pinned = self.device == "cuda"
        shard_device = torch.device("cpu") if self.offload else self.place
        load_in_parts.shard_and_send(
            module.model, self, lambda: shard(module, self.mesh, self.offload, pinned), shard_device
        )


def shard(module: LightningModule, mesh: torch.distributed.device_mesh.DeviceMesh, offload: bool, pinned: bool) -> None:
    """Applies fully_shard to each block, and then to the model, for the parameters outside the blocks. Gradients are
    reduced in fp32 or wider, because sums in 16 bits would lose small gradients.

    Args:
        module: the module whose model is sharded in place, and whose loss is wrapped by `Resharding`.
        mesh: the ranks over which parameters are sharded.
        offload: True: keep the shards in host memory.
        pinned: True: pin the host memory of the shards. Has no effect without `offload`.
    """
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    widest = reduce(torch.promote_types, (p.dtype for p in module.model.parameters()), torch.float32)
    mixed_precision = MixedPrecisionPolicy(reduce_dtype=widest)
    for block in blocks(module.model):
        fully_shard(block, mesh=mesh, mp_policy=mixed_precision, offload_policy=policy)
    fully_shard(module.model, mesh=mesh, mp_policy=mixed_precision, offload_policy=policy)
    Resharding(module)


class Resharding(Loss):
    """Reshards the weights outside the blocks after a forward pass without gradients. For this purpose it wraps the
    loss of a module, and adds a hook to the module's model.

    After a forward pass, fully_shard leaves these weights gathered for the backward pass. Without a backward pass they
    would stay gathered, and other code would see full parameters. So the hook reshards them at the end of a forward
    pass without gradients. A loss may read the head's weight after the model's forward pass. Therefore the hook does
    nothing during a call of the loss, and the weights are resharded when the loss returns.
    """

    def __init__(self, module: LightningModule) -> None:
        self.loss, self._reads = module.loss, False
        module.loss, self.own_logits = self, self.loss.own_logits
        module.model.register_forward_hook(self._put_away)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        return self._read(self.loss, model, batch)

    def verify(self, model: nn.Module, batch: MicroBatch) -> None:
        self._read(self.loss.verify, model, batch)

    def _read(self, compute: Callable, model: nn.Module, batch: MicroBatch) -> Tensor | None:
        self._reads = True
        try:
            return compute(model, batch)
        finally:
            self._reads = False
            self._put_away(model)

    def _put_away(self, model: nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled() and not self._reads:
            model.reshard()
