"""The interface of a precision: the dtypes of weights and matrix products, and the loss scale.

A precision is a Lightning plugin. Other code uses only the attributes and methods below, which are in the order in
which a run uses them. The defaults are for fp32 weights: a new precision sets `dtype`, and overrides the methods whose
default does not fit. The base class of a new precision is one of these classes:

    BasePrecision         this module
      FullPrecision, TensorFloat32, Autocast    `fp32_weights.py`: weights in fp32
      SixteenBitWeights                         `weights_16bit.py`: 16-bit weights, updated in fp32
      Float16Master, BFloat16Master             `masters.py`: 16-bit weights, with fp32 masters in `MasterWeights`
      ScaledLoss                                `loss_scale.py`: a mixin for fp16 precisions, the first base class

On a CPU, Lightning's own plugins replace fp16 by bf16; these precisions do not.
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
    """Base class of all precisions. Args: device: the type of the device that computes, cpu or cuda."""

    device = "cpu"  # the type of the device that computes
    dtype: torch.dtype  # dtype of matrix products
    # dtype in which weights are loaded: the dtype of the trained weights, or of their masters; None: `dtype`
    weights_dtype: torch.dtype | None = torch.float32
    tf32 = False  # True: on a card, inputs of fp32 matrix products keep 10 mantissa bits
    scales_loss = False  # True: the loss is scaled, and only the end of a window shows whether a gradient overflowed
    lowered_scale = False  # True: this window's gradients overflowed, and the loss scale was halved
    gradient_scale = 1.0  # the loss scale by which this window's gradients are multiplied
    draws = False  # True: a step draws random numbers; processes with copies of a weight must draw equal numbers
    # when the optimizer runs on the host (`offload/master_weights.py`)
    steps_on_host: Literal["never", "if streamed", "always"] = "never"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._on_converted: list[Callable[[nn.Module], None]] = []
        self._run = ExitStack()

    # --- before the first step ------------------------------------------------------------------------------------

    def when_converted(self, call: Callable[[nn.Module], None]) -> None:
        """Registers a function that `convert_module` calls at its end, with the module. Lightning has no callback hook
        at this point, between loading weights and moving them to the device. Registering a function again is a no-op,
        since a trainer may run more than once."""
        if call not in self._on_converted:
            self._on_converted.append(call)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the module in place and returns it. Lightning calls this method after the weights have been loaded
        or restored from a checkpoint, before the weights move to the device, and before any computation or memory
        tracking. Changes to the process may be registered in `_run`, since `teardown` always undoes them at the end of
        the run. Parameter objects must stay the same during the run."""
        if self._run.enter_context(widened(self.dtype, self.device)):
            log.info(
                f"This CPU has no {NAMES[self.dtype]} matrix products: they are computed in fp32, and each result is "
                "rounded once."
            )
        for call in self._on_converted:
            call(module)
        return module

    def optimizer(self, inner: Optimizer, model: nn.Module, global_norm: GlobalNorm) -> DeviceOptimizer:
        """Returns the optimizer of a run in which no `HostOptimizer` updates the weights. Args: see
        `DeviceOptimizer`."""
        return DeviceOptimizer(inner, model, global_norm)

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list) -> tuple:
        """Refuses an optimizer that is not a `WindowOptimizer`, because other optimizers would apply gradients that are
        still multiplied by the loss scale. Lightning calls this method before the first step, and with an empty list
        before an evaluation. Raises: Refused."""
        if not all(isinstance(optimizer, WindowOptimizer) for optimizer in optimizers):
            raise Refused(
                f"{type(self).__name__} cannot train {type(model).__name__}: only the optimizer of "
                "`precision_plugin.optimizer(...)` unscales gradients and updates in fp32. Return it from "
                "configure_optimizers, as CausalLM does, or use Lightning's Trainer(precision=...)."
            )
        return super().connect(model, optimizers, lr_schedulers)

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores the values that `state_dict` returned. Lightning calls this on a resume, with the weights on the
        device."""

    def device_tensors(self) -> Iterable[Tensor]:
        """Returns further tensors on the device, besides weights, gradients and optimizer state. The memory meter
        counts these tensors as optimizer state, and may call this method at any time."""
        return ()

    # --- each micro-batch -----------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager:
        """Returns the context that Lightning enters for the full training step. It does nothing, because autocast at
        this point would also cover backward and the optimizer."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager:
        """Returns the context of a forward pass, such as autocast. Lightning enters this context for each step of an
        evaluation. In training, and for samples and checks, the code that calls the model enters it."""
        return nullcontext()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Calls callbacks, and returns the tensor on which Lightning calls `backward`: the loss, multiplied by the loss
        scale if the precision has one. Lightning calls this method with the loss of each micro-batch."""
        return super().pre_backward(tensor, module)

    # --- each window ----------------------------------------------------------------------------------------------

    def update_scale(self, finite: bool) -> None:
        """Sets the loss scale of the next window. Args: finite: True if all gradients of this window are finite."""

    def optimizer_step(self, optimizer: Optimizer, model: LightningModule, closure: object, **kwargs: object) -> None:
        """Steps the optimizer. Unlike Lightning's version, this method does not call callbacks or clip gradients,
        because `CausalLM.training_step` has already done both."""
        optimizer.step()

    # --- after steps ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Returns the tensors and numbers that a bit-exact resume needs. Lightning calls this for each checkpoint, and
        stores the result under the name of the class."""
        return {}

    def teardown(self) -> None:
        """Undoes all changes to the process. Lightning calls this at the end of a run."""
        self._run.close()
