"""Defines the contract of a precision: the dtypes of weights and products, and the loss scale.

A precision is a Lightning plugin. Code that trains, measures or plans uses the attributes and methods below, which
stand in the order of a run, and no others; each does here what suits plain fp32 weights. So a new precision is a class
that sets `dtype` and overrides what it does differently. It derives from the kind that it belongs to:

    BasePrecision         here
      FullPrecision, TensorFloat32, Autocast    `fp32_weights.py`: weights in fp32
      SixteenBitWeights                         `weights_16bit.py`: 16-bit weights; `widen`, `round`, `new_extra_state`
      Float16Master, BFloat16Master             `masters.py`: 16-bit weights, whose fp32 masters `MasterWeights` holds
      ScaledLoss                                `loss_scale.py`: a mixin, placed first, for any of them in fp16

On a CPU Lightning's own plugins turn fp16 into bf16; these do not.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.step.optimizer import DeviceOptimizer, GlobalNorm, WindowOptimizer
from lowmem.system.errors import Refused
from lowmem.techniques.precision.cpu_products import NAMES, widened

log = logging.getLogger(__name__)


class BasePrecision(Precision):
    """The base class of all precisions. Args: device: the type of the device that computes, cpu or cuda."""

    device = "cpu"  # the type of the device that computes
    dtype: torch.dtype  # of the matrix products
    # of the trained weights, or of their masters: that in which a model's files are read; None: `dtype`
    weights_dtype: torch.dtype | None = torch.float32
    tf32 = False  # True: on a card, fp32 products read 10 bits of each factor's mantissa
    scales_loss = False  # True: gradients have no meaning before the whole window's are unscaled
    lowered_scale = False  # True: this window's gradients overflowed, and the next one has a smaller loss scale
    gradient_scale = 1.0  # backward's gradients are the true ones times this
    draws = False  # True: a step draws random numbers, and another process with the same weight draws others
    # whether the optimizer runs on the host (`offload/master_weights.py`)
    steps_on_host: Literal["never", "if streamed", "always"] = "never"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._on_converted: list[Callable[[nn.Module], None]] = []
        self._run = ExitStack()

    # --- before the first step ------------------------------------------------------------------------------------

    def when_converted(self, call: Callable[[nn.Module], None]) -> None:
        """Registers a function that each `convert_module` calls with the module in the end. Lightning has no hook for
        callbacks between loaded weights and their move to the device. A second registration of a function is a no-op:
        a trainer may run more than once."""
        if call not in self._on_converted:
            self._on_converted.append(call)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the module in place and returns it. Lightning calls this once the weights are loaded or restored,
        before they move to the device and before anything is computed or tracked; it calls `teardown` in the end,
        come what may. A parameter keeps its identity for the whole run."""
        if self._run.enter_context(widened(self.dtype, self.device)):
            log.info(
                f"This CPU has no {NAMES[self.dtype]} matrix products: they are computed in fp32, and each result is "
                "rounded once."
            )
        for call in self._on_converted:
            call(module)
        return module

    def optimizer(self, inner: Optimizer, model: nn.Module, global_norm: GlobalNorm) -> DeviceOptimizer:
        """Returns the optimizer of weights on the device. Args: see `DeviceOptimizer`."""
        return DeviceOptimizer(inner, model, global_norm)

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list) -> tuple:
        """Refuses an optimizer that is not from `optimizer`: it would step scaled gradients. Lightning calls this
        before the first step, with no optimizers for an evaluation."""
        if not all(isinstance(optimizer, WindowOptimizer) for optimizer in optimizers):
            raise Refused(
                f"{type(self).__name__} cannot train {type(model).__name__}: only the optimizer of "
                "`precision_plugin.optimizer(...)` unscales gradients and updates in fp32. Return it from "
                "configure_optimizers, as CausalLM does, or use Lightning's Trainer(precision=...)."
            )
        return super().connect(model, optimizers, lr_schedulers)

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores what `state_dict` returned. Lightning calls this on a resume, with the weights on the device."""

    def device_tensors(self) -> Iterable[Tensor]:
        """Returns tensors on the device besides weights, gradients and the optimizer's state; the memory meter counts
        them as optimizer state. It may ask at any time."""
        return ()

    # --- each micro-batch -----------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager:
        """Returns a context that Lightning enters for the full training step. It does nothing: autocast here would also
        cover backward and the optimizer."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager:
        """Returns a context that the module enters for each forward pass alone, and Lightning for each step of an
        evaluation."""
        return nullcontext()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Returns the tensor where backward starts. Lightning calls this with each micro-batch's loss; it calls
        callbacks, too."""
        return super().pre_backward(tensor, module)

    # --- each window ----------------------------------------------------------------------------------------------

    def update_scale(self, finite: bool) -> None:
        """Sets the loss scale of the next window. Args: finite: all gradients of this window were finite."""

    def optimizer_step(self, optimizer: Optimizer, model: LightningModule, closure: object, **kwargs: object) -> None:
        """Steps. Lightning's own calls callbacks and clips in here; `CausalLM.training_step` has done so before."""
        optimizer.step()

    # --- after steps ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Returns tensors and plain numbers without which a resumed run would have other bits. Lightning calls this for
        each checkpoint and saves them under the class's name."""
        return {}

    def teardown(self) -> None:
        """Undoes all changes to the process. Lightning calls this in the end."""
        self._run.close()
