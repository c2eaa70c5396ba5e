"""Precision plugins: in which dtype weights are held and products computed, and how gradients become an update.

The module asks of whichever plugin is installed: which parameters the optimizer steps (`master`), `forward_context()`
around the forward pass, Lightning's `backward`, `unscale()` once per window before anyone looks at the gradients,
`clip()`, and Lightning's `optimizer_step`.
Lightning's own plugin does not unscale for fused optimizers, refuses to clip for them, and counts a step that the loss
scaler skipped as a step; on a CPU it turns fp16 into bf16. These do none of that.

Autocast (`16`, `bf16`) keeps the weights in fp32 and saves half of the activations' bytes. Source: Micikevicius et al.
2018, arXiv 1710.03740. Where the weights themselves have 16 bits see `sixteen.py`; where they have masters on the host,
`master.py`; how a CPU multiplies 16 bits for which it has no units, `widened.py`.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.gradients import norm
from lowmem.memory.ledger import Side
from lowmem.precision.loss_scale import LossScale
from lowmem.precision.widened import NAMES, widened

log = logging.getLogger(__name__)


class FullPrecision(Precision):
    """fp32 throughout."""

    dtype = torch.float32  # of the matrix products
    scales_loss = False  # gradients mean nothing until the whole window's are unscaled
    gradient_scale = 1.0  # what a gradient of true size 1 is stored as, after `unscale`
    optimizer_side: Side = "device"  # where the optimizer's state lies

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._run = ExitStack()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Lightning calls this before anything is computed or tracked, and `teardown` in the end, come what may."""
        if self._run.enter_context(widened(self.dtype, self.device)):
            log.info(f"This CPU has no {NAMES[self.dtype]} products: they are computed in fp32 and rounded once.")
        return module

    def teardown(self) -> None:
        self._run.close()

    def master(self, p: nn.Parameter) -> nn.Parameter:
        """What the optimizer steps in the place of a parameter of the model."""
        return p

    def host_tensors(self) -> Iterable[Tensor]:
        """What is held in host memory instead of on the device, beside the optimizer's state."""
        return ()

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """After the step, or instead of it."""
        optimizer.zero_grad(set_to_none=True)

    def arrived(self) -> None:
        """Return when every weight of the model is that of the last step."""

    def widest(self, module: nn.Module) -> AbstractContextManager:
        """Within it the module's parameters hold the weights at their full precision."""
        return nullcontext()

    def train_step_context(self) -> AbstractContextManager:
        # Lightning wraps the whole training step, backward and optimizer included. The module enters
        # `forward_context` itself, around the forward pass alone.
        return nullcontext()

    def unscale(self, optimizer: Optimizer) -> bool:
        """Bring the window's gradients to their true size. False: they overflowed, skip this step."""
        return True

    def clip(self, model: nn.Module, value: float | None, largest: float | None) -> Tensor | None:
        """Limit each element to +-value, then the global norm to `largest`; None: off.

        Returns:
            The global norm before it was limited, where it was asked for.
        """
        # In the model's order, not the optimizer's groups': a sum in the order of every other loop has the same bits.
        parameters = [p for p in model.parameters() if p.grad is not None]
        if not parameters:  # each gradient was used up in backward
            return None
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value * self.gradient_scale)
        if largest is None:
            return None
        found = norm([p.grad for p in parameters]) / self.gradient_scale
        nn.utils.clip_grads_with_norm_(parameters, largest, found)
        return found

    def update(self, optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
        """Step a single parameter of a group, and use its gradient up."""
        step_one(optimizer, group, p)
        p.grad = None


class TensorFloat32(FullPrecision):
    """fp32 storage; matrix products of a CUDA device read 10 bits of each factor's mantissa and add in fp32."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._before: str | None = None
        if has_tf32(device):
            self._before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        else:
            log.info("precision=tf32: this device has no TF32 products; it runs in fp32.")

    def teardown(self) -> None:
        super().teardown()
        if self._before is not None:  # the setting is the process's, and the next job of a sweep may be fp32
            torch.set_float32_matmul_precision(self._before)


def has_tf32(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)


class BFloat16Autocast(FullPrecision):
    """Matrix products in bf16, weights in fp32."""

    dtype = torch.bfloat16

    def forward_context(self) -> AbstractContextManager:
        # Without the cache: it would hold a 16-bit copy of every weight until the forward pass ends.
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


class ScaledLoss(FullPrecision):
    """What every fp16 precision has: the loss is scaled so that small gradients do not vanish.

    Args:
        init_scale: loss scale at the start; halved whenever a gradient overflows.
        growth_interval: optimizer steps without overflow after which the scale doubles.

    Raises:
        Refused: in `unscale`, when the gradients overflow at whatever scale.
    """

    scales_loss = True

    def __init__(self, device: str = "cpu", init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__(device=device)
        self.loss_scale = LossScale(init_scale, growth_interval)

    def pre_backward(self, tensor: Tensor, module) -> Tensor:
        self.gradient_scale = self.loss_scale.value  # and remains that of this window while the next one's is decided
        return super().pre_backward(tensor * self.gradient_scale, module)

    def state_dict(self) -> dict:
        return self.loss_scale.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.loss_scale.load_state_dict(state_dict)


class Float16Autocast(ScaledLoss, BFloat16Autocast):
    """Matrix products in fp16, weights in fp32. Args, Raises: those of `ScaledLoss`."""

    dtype = torch.float16

    def unscale(self, optimizer: Optimizer) -> bool:
        grads = gradients(optimizer)
        finite = self.loss_scale.update(bool(norm(grads).isfinite()))
        if finite:
            torch._foreach_mul_(grads, 1.0 / self.gradient_scale)
        self.gradient_scale = 1.0
        return finite


def gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for _, p in with_gradient(optimizer)]


def with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict, nn.Parameter]]:
    """(group, parameter) of every parameter that has a gradient."""
    return ((group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def step_one(optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
    """Any optimizer's step on one parameter: its state is kept by parameter, so a group of one is enough.

    The step is that of a second optimizer which shares the state, so that the groups of the first stay as they are for
    whoever reads or schedules them meanwhile.
    """
    alone = object.__new__(type(optimizer))
    alone.__dict__ |= {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    alone.param_groups = [{**group, "params": [p]}]
    alone.step()
