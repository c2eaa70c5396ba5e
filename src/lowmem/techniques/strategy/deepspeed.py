"""`deepspeed_zero2`, `deepspeed_zero3`: DeepSpeed shards gradients and optimizer state over all devices, and zero3 the
weights, too. With `offload: true` the sharded tensors wait in host memory and are stepped there.

DeepSpeed's engine gathers weights, and reduces and shards gradients. The optimizer step is this project's own: of each
parameter a device holds a run of fp32 elements, which the optimizer, the norm and the loss scale see as a plain tensor;
the optimizer that DeepSpeed gets does nothing. It costs a second copy of the sharded weights, one to send and one to
step, besides the full weights of zero2; and while a checkpoint is written, each process has it in full in host memory.
Source: Rajbhandari et al. 2020, arXiv 1910.02054; github.com/deepspeedai/DeepSpeed, an optional dependency.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.data.loader import MicroBatch
from lowmem.memory.ledger import Ledger, gradients
from lowmem.model.trainable import trainable
from lowmem.system.torch_private import deepspeed_fragment
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.techniques.strategy.several import Divided

BUCKET = 1 << 25  # elements that are reduced or gathered at once, 128 MiB in fp32; DeepSpeed would take 2 GB


class Fragment(NamedTuple):
    """The elements of a flattened parameter that this process holds."""

    tensor: Tensor  # (count,) fp32, in the memory that DeepSpeed sends from
    start: int  # index of the first element in the flattened parameter
    shape: torch.Size  # the parameter's
    gradient: Callable[[], Tensor | None] = lambda: None  # returns their gradient after a window's last backward pass

    @property
    def elements(self) -> slice:
        return slice(self.start, self.start + len(self.tensor))


class ZeRO2(Divided):
    """DeepSpeed's ZeRO, stage 2: gradients and optimizer state are sharded. Args: offload: step them in host memory."""

    stage = 2
    engine: Any  # DeepSpeed's engine

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600, offload: bool = False) -> None:
        super().__init__(device, devices, timeout)
        # A card reads and writes pinned memory 3 to 5 times as fast as pageable memory.
        self.offload = {"device": "cpu", "pin_memory": device == "cuda"} if offload else None
        self.side = "host" if offload else "device"
        self._runs: dict[nn.Parameter, Fragment] = {}

    # --- before the first step ------------------------------------------------------------------------------------

    def shard(self, module: LightningModule) -> None:
        stepped = [p for _, p in trainable(module)]
        bucket = {"reduce_bucket_size": min(BUCKET, sum(p.numel() for p in stepped))}
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed only multiplies it for what it prints
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.stage} | bucket | self.offload_settings(),
        }
        arguments = {"model": Loss(module), "optimizer": Unmoved(stepped), "config": settings}
        self.engine, *_ = imported(self.device).initialize(**arguments, dist_init_required=False)
        module.loss = InEngine(self.engine, module.loss)
        self._runs = {p: self.run_of(p) for p in module.parameters()}

    def offload_settings(self) -> dict:
        """Returns DeepSpeed's settings for where tensors are kept."""
        return {"offload_optimizer": self.offload} if self.offload else {}

    def run_of(self, p: nn.Parameter) -> Fragment:
        """Returns this process's run of a parameter. DeepSpeed flattens all trained weights into one tensor and gives
        each process a run of it, which may begin and end within a parameter. Frozen weights are not sharded."""
        if not p.requires_grad:
            return Fragment(p.data.view(-1), 0, p.shape)
        if (fragment := deepspeed_fragment(p)) is None:
            return Fragment(torch.empty(0, device="cpu" if self.offload else p.device), 0, p.shape)
        tensor, start, gradient = fragment
        return Fragment(tensor, start, p.shape, gradient)

    def before_training(self, module: LightningModule) -> None:
        super().before_training(module)
        self.forward = self.engine

    def register_memory(self, ledger: Ledger) -> None:
        ledger.own("optimizer", lambda: (run.tensor for run in self._runs.values()), self.side)
        ledger.own("gradients", lambda: gradients(self._locals.values()), self.side)

    # --- each window ----------------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch_context(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def gather_gradients(self) -> None:
        if self.offload and self.device == "cuda":
            torch.cuda.synchronize()  # gradients may still be on their way to the host
        for p, local in self._locals.items():
            if p.requires_grad:  # also if it has no element here: all processes must hold the same set of states
                gradient = self._runs[p].gradient()
                local.grad = torch.zeros_like(local) if gradient is None else gradient.view(-1)

    def clear_gradients(self) -> None:
        """Copies the stepped weights to the memory from which DeepSpeed gathers them, and makes DeepSpeed drop its
        gradients."""
        for local in self._locals.values():
            local.grad = None
        self.engine.step()

    def after_load(self) -> None:
        """Tells DeepSpeed that its weights were overwritten by something else than a step."""
        self.engine.optimizer.update_lp_params()

    # --- parameters -----------------------------------------------------------------------------------------------

    def new_local(self, p: nn.Parameter) -> nn.Parameter:
        local = nn.Parameter(self._runs[p].tensor, p.requires_grad)
        self._holders[local] = 1
        return local

    def gathered(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        run = self._runs[p]
        if len(shard) == run.shape.numel() and not p.requires_grad:  # zero2 does not shard frozen weights
            return shard.cpu().view(run.shape)
        full = torch.zeros(run.shape.numel(), dtype=shard.dtype)
        full[run.elements] = shard.cpu()
        dist.all_reduce(full.view(torch.uint8))  # processes that do not hold an element add zero bits
        return full.view(run.shape)

    as_dtensor = gathered

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        return full.flatten()[self._runs[p].elements]


class ZeRO3(ZeRO2):
    """DeepSpeed's ZeRO, stage 3: weights are sharded, too. Args: whole_below: smaller weights stay on every device."""

    stage = 3

    def __init__(
        self,
        device: str = "cpu",
        devices: int = 1,
        timeout: float = 600,
        offload: bool = False,
        whole_below: int = 10_000,
    ) -> None:
        super().__init__(device, devices, timeout, offload)
        self.whole_below = whole_below

    def offload_settings(self) -> dict:
        weights = {
            "stage3_param_persistence_threshold": self.whole_below,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_reuse_distance": 0,  # else up to 4 GB of weights would stay gathered between two uses
        }
        return super().offload_settings() | weights | ({"offload_param": self.offload} if self.offload else {})

    def run_of(self, p: nn.Parameter) -> Fragment:
        """Returns this process's run of a parameter: all processes hold equal runs, with zeros behind the last
        elements."""
        p.whole_shape = p.ds_shape
        start = min(self.rank * p.partition_numel(), p.ds_numel)
        own = slice(min(p.partition_numel(), p.ds_numel - start))
        if not p.requires_grad:
            return Fragment(p.ds_tensor.data[own], start, p.ds_shape)
        zero = self.engine.optimizer
        group, offset, count = zero.grad_position[zero.get_param_id(p)]
        flat, number = zero.fp32_partitioned_groups_flat[group], _index(zero.fp16_groups[group], p)

        def gradient() -> Tensor:
            elements = flat.grad[offset : offset + count] if self.offload else zero.averaged_gradients[group][number]
            return elements[own]

        return Fragment(flat.data[offset : offset + count][own], start, p.ds_shape, gradient)

    def register_memory(self, ledger: Ledger) -> None:
        shards = [p.ds_tensor for p in self._runs]
        ledger.own("weights", lambda: shards, self.side)
        super().register_memory(ledger)

    def after_load(self) -> None:
        for p, run in self._runs.items():
            p.ds_tensor.data[: len(run.tensor)].copy_(run.tensor)
        self.engine.optimizer.empty_partition_cache()  # drop weights that are gathered now


class Loss(nn.Module):
    """The module that DeepSpeed calls in place of the model."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.model, self.loss = module.model, module.loss
        self.module = (module,)  # in a tuple, so that it is not registered: only the model is a submodule

    def forward(self, micro_batch: MicroBatch, compute: Callable | None = None) -> Tensor | None:
        """Returns the loss of a micro-batch. Args: compute: replaces the loss by another function of (model,
        micro-batch)."""
        precision = self.module[0].trainer.precision_plugin
        with precision.forward_context():  # DeepSpeed turns off an autocast that is active around its engine
            return (compute or self.loss)(self.model, micro_batch)


class InEngine(losses.Loss):
    """Computes the module's loss inside DeepSpeed's engine, in evaluations too: only the engine gathers the weights of
    submodules that are not called themselves."""

    def __init__(self, engine: Callable, loss: losses.Loss) -> None:
        self.engine, self.loss, self.own_logits = engine, loss, loss.own_logits

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        return self.engine(micro_batch)

    def verify(self, model: nn.Module, micro_batch: MicroBatch) -> None:
        self.engine(micro_batch, self.loss.verify)


class Unmoved(Optimizer):
    """An optimizer that does nothing. DeepSpeed needs one to shard parameters and calls it at each step; lowmem's own
    optimizer has stepped by then."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable | None = None) -> None:
        """Leaves the weights as they are."""


def imported(device: str) -> Any:
    """Imports DeepSpeed. It would use a card wherever there is one, print to the terminal, and on a CPU compile a
    collective for inference at import time. Args: device: cpu or cuda."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    from deepspeed import ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives that newer versions of torch rename
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _index(parameters: list[nn.Parameter], p: nn.Parameter) -> int:
    return next(number for number, other in enumerate(parameters) if other is p)
