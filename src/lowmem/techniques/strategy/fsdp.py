"""`fsdp`: weights, gradients and optimizer state are sharded over all devices; a block's weights are gathered while it
computes.

Each device holds 1/N of them, and for a moment the full weights of two blocks: the one that computes and the next. It
costs two all-gathers of all weights and one reduce-scatter of all gradients per micro-batch. `fsdp_offload` keeps the
shards in host memory and steps them there. Source: Zhao et al. 2023, arXiv 2304.11277; torch's fully_shard.
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
    """Shards with torch's fully_shard. Args: offload: keep the shards in host memory."""

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
    """Shards each block by itself, and the rest of the model with its root. Gradients are added in fp32 or wider: a sum
    of many in 16 bits would lose the small ones."""
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    widest = reduce(torch.promote_types, (p.dtype for p in module.model.parameters()), torch.float32)
    mixed_precision = MixedPrecisionPolicy(reduce_dtype=widest)
    for block in blocks(module.model):
        fully_shard(block, mesh=mesh, mp_policy=mixed_precision, offload_policy=policy)
    fully_shard(module.model, mesh=mesh, mp_policy=mixed_precision, offload_policy=policy)
    Resharding(module)


class Resharding(Loss):
    """A loss that reshards the model's root. fully_shard leaves the root's weights gathered after a forward pass, for
    the backward pass. If no backward pass follows they would stay gathered, and a parameter would be the full
    tensor; a loss that reads the head itself must therefore reshard when it is done."""

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
