"""`fsdp`: weights, gradients and optimizer state are divided among all devices; a block's weights are gathered for its
turn.

Each device holds 1/N of them, and for a moment the whole of two blocks: the one that computes and the next. What it
costs: per micro-batch two gatherings of all weights and one reduction of all gradients. `fsdp_offload` keeps the parts
in host memory, where they are stepped, too. Source: Zhao et al. 2023, arXiv 2304.11277; torch's fully_shard.
"""

from collections.abc import Callable
from functools import reduce

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lowmem.data.loader import MicroBatch
from lowmem.techniques.gradient_checkpointing.policies import blocks
from lowmem.techniques.loss.cross_entropy import Loss
from lowmem.techniques.strategy import load_in_parts
from lowmem.techniques.strategy.several import Divided


class FullyShard(Divided):
    """Args: offload: whether the parts are in host memory."""

    in_numbers = False

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600, offload: bool = False) -> None:
        super().__init__(device, devices, timeout)
        self.offload = offload
        self.side = self.side_of_weights = "host" if offload else "device"
        self.mesh = self.meshed(timeout, data=self.size)

    def shard(self, module: LightningModule) -> None:
        pinned = self.device == "cuda"
        parts_in = torch.device("cpu") if self.offload else self.place
        load_in_parts.shard_and_send(
            module.model, self, lambda: shard(module, self.mesh, self.offload, pinned), parts_in
        )


def shard(module: LightningModule, mesh: torch.distributed.device_mesh.DeviceMesh, offload: bool, pinned: bool) -> None:
    """Each block is gathered by itself, and what is outside of them with the whole. Gradients are added in fp32 at
    least: the sum of many in 16 bits would lose the small ones."""
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    widest = reduce(torch.promote_types, (p.dtype for p in module.model.parameters()), torch.float32)
    added = MixedPrecisionPolicy(reduce_dtype=widest)
    for block in blocks(module.model):
        fully_shard(block, mesh=mesh, mp_policy=added, offload_policy=policy)
    fully_shard(module.model, mesh=mesh, mp_policy=added, offload_policy=policy)
    Resharding(module)


class Resharding(Loss):
    """What is outside of the blocks stays gathered after a forward pass, for the backward pass. Where none follows it
    would stay for ever, and a parameter would be its whole: so it is put away, by a loss that reads the head itself
    when it has done so."""

    def __init__(self, module: LightningModule) -> None:
        self.loss, self._reads = module.loss, False
        module.loss, self.own_logits = self, self.loss.own_logits
        module.model.register_forward_hook(self._put_away)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        return self._read(self.loss, model, batch)

    def verify(self, model: nn.Module, batch: MicroBatch) -> None:
        self._read(self.loss.verify, model, batch)

    def _read(self, read: Callable, model: nn.Module, batch: MicroBatch) -> Tensor | None:
        self._reads = True
        try:
            return read(model, batch)
        finally:
            self._reads = False
            self._put_away(model)

    def _put_away(self, model: nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled() and not self._reads:
            model.reshard()
