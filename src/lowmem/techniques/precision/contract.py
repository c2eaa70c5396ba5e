"""The interface of a precision, which determines the dtypes of weights and matrix products, and the loss scale.

A precision is a Lightning plugin. Code that does not know the kind of precision uses only the attributes and methods of
`BasePrecision`, which are listed in the order in which a run uses them. The defaults are for fp32 weights: a new
precision sets `dtype`, and overrides the methods whose default does not fit. It can be derived from these classes:

    BasePrecision         this module
      FullPrecision, TensorFloat32, Autocast    `fp32_weights.py`: weights in fp32
      SixteenBitWeights                         `weights_16bit.py`: 16-bit weights, updated in fp32
      Float16Master, BFloat16Master             `masters.py`: 16-bit weights, with fp32 masters in `MasterWeights`
      ScaledLoss                                `loss_scale.py`: a mixin, the first base class of each fp16 precision

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
    """Base class of all precisions. Args: device: type of the device that runs forward and backward, cpu or cuda."""

    device = "cpu"
    dtype: torch.dtype  # dtype of the inputs of matrix products
    # dtype of the model's own weights if they are trained, or of their masters if there are masters; None: `dtype`
    weights_dtype: torch.dtype | None = torch.float32
    tf32 = False  # True: on a card with TF32, inputs of fp32 matrix products keep 10 mantissa bits
    scales_loss = False  # True: the loss is scaled, and only the end of a window shows whether a gradient overflowed
    lowered_scale = False  # True: the last window's gradients overflowed, and the loss scale was halved
    gradient_scale = 1.0  # the loss scale by which the current window's gradients are multiplied
    # True: steps draw random numbers, so the strategy must keep the copies of a weight in several processes equal
    draws = False
    # when the optimizer runs on the host (`offload/master_weights.py`); "if streamed": only with weights=streamed
    steps_on_host: Literal["never", "if streamed", "always"] = "never"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._on_converted: list[Callable[[nn.Module], None]] = []
        self._run = ExitStack()

    # --- before the first step ------------------------------------------------------------------------------------

    def when_converted(self, call: Callable[[nn.Module], None]) -> None:
        """Registers a function that `convert_module` calls at its end, with the module as argument. Lightning has no
        callback hook between loading the weights and moving them to the device. Registering a function a second time
        has no effect, because a trainer may run more than once, and each run registers its functions."""
        if call not in self._on_converted:
            self._on_converted.append(call)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the module in place and returns it. The base class only replaces CPU kernels (`widened`) and calls
        the registered functions. Lightning calls this method after the weights have been loaded or restored from a
        checkpoint, and before the weights move to the device. Overrides must keep the parameter objects, and may
        replace only their data. An override that changes settings of the process must add a callback or context manager
        to `_run`, with which `teardown` restores the settings."""
        if self._run.enter_context(widened(self.dtype, self.device)):
            log.info(
                f"This CPU has no {NAMES[self.dtype]} matrix products: they are computed in fp32, and each result is "
                "rounded once."
            )
        for call in self._on_converted:
            call(module)
        return module

    def optimizer(self, inner: Optimizer, model: nn.Module, global_norm: GlobalNorm) -> DeviceOptimizer:
        """Returns the wrapper with which `inner` updates the weights. Not called if a `HostOptimizer` updates them.
        Args: see `DeviceOptimizer`."""
        return DeviceOptimizer(inner, model, global_norm)

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list) -> tuple:
        """Checks the optimizers. Lightning calls this method before the first step, and with an empty list before an
        evaluation.

        Raises:
            Refused: an optimizer is not a `WindowOptimizer`, so it would not unscale gradients or update 16-bit weights
                in fp32.
        """
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
        """Returns the tensors that the precision itself stores on the device. The memory meter reports them as
        optimizer state, and may call this method at any time."""
        return ()

    # --- each micro-batch -----------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager:
        """Returns the context that Lightning enters for the full training step: a no-op, because autocast in this
        context would also affect backward and the optimizer."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager:
        """Returns a context for a forward pass, such as autocast. Lightning enters it for each step of an evaluation.
        In training, and for samples and checks, the code that calls the model must enter it."""
        return nullcontext()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Returns the tensor on which `backward` is called: the loss, multiplied by the loss scale if the precision has
        a loss scale. Also calls the hooks `on_before_backward` with this tensor. Lightning or `Pipeline` calls this
        method with the loss of each micro-batch, divided by the window's weight."""
        return super().pre_backward(tensor, module)

    # --- each window ----------------------------------------------------------------------------------------------

    def update_scale(self, finite: bool) -> None:
        """Sets the loss scale of the next window; a no-op without a loss scale. Args: finite: True if all gradients of
        this window are finite."""

    def optimizer_step(self, optimizer: Optimizer, model: LightningModule, closure: object, **kwargs: object) -> None:
        """Steps the optimizer. Lightning's version would also call callbacks and clip gradients, but
        `CausalLM.training_step` has already done both."""
        optimizer.step()

    # --- after steps ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Returns the tensors and numbers of the precision that a bit-exact resume needs. Lightning calls this method
        for each checkpoint, and stores the result under the name of the class."""
        return {}

    def teardown(self) -> None:
        """Undoes changes of process settings, such as replaced kernels, by closing `_run`. Lightning calls this method
        at the end of a run."""
        self._run.close()
