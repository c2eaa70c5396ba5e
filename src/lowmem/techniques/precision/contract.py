"""Defines the contract of a precision: the dtypes of weights and products, and how gradients become an update.

A precision is a Lightning plugin. Code that trains, measures or plans uses the attributes and methods below, which
stand in the order of a run, and no others; each does here what suits plain fp32 weights that the optimizer steps
itself. So a new precision is a class that sets `dtype` and overrides what it does differently. It derives from the kind
that it belongs to:

    BasePrecision         here
      FullPrecision, TensorFloat32, Autocast    `fp32_weights.py`: weights in fp32
      SixteenBitWeights                         `weights_16bit.py`: 16-bit weights; `widen`, `round`, `new_extra_state`
      HostMasters                               `host_masters.py`: weights in 16 bits, their fp32 masters on the host
      ScaledLoss                                `loss_scale.py`: a mixin, placed first, for any of them in fp16

Lightning's own plugins do not unscale for fused optimizers, refuse to clip for them, and count a step that the loss
scaler skipped as a step; on a CPU they turn fp16 into bf16. These do none of that.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import MethodType

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.ledger import Side
from lowmem.techniques.arithmetic.gradients import finite, norm_of, norm_of_all
from lowmem.techniques.precision.cpu_products import NAMES, widened
from lowmem.techniques.weights.link import Link

log = logging.getLogger(__name__)


class BasePrecision(Precision):
    """The base class of all precisions. Args: device: the type of the device that computes, cpu or cuda."""

    dtype: torch.dtype  # of the matrix products
    tf32 = False  # True: on a card, fp32 products read 10 bits of each factor's mantissa
    scales_loss = False  # True: gradients have no meaning before the whole window's are unscaled
    lowered_scale = False  # True: this window's gradients overflowed, and the next one has a smaller loss scale
    gradient_scale = 1.0  # after `unscale`, a stored gradient is the true one times this
    optimizer_side: Side = "device"  # where the optimizer's state is
    link: Link | None = None  # carries gradients and weights if the optimizer is on the other side
    global_norm: Callable[[Iterable[nn.Parameter]], Tensor] = staticmethod(norm_of_all)  # over all processes
    draws = False  # True: a step draws random numbers, and another process with the same weight draws others
    keeps_buffers = False  # True: the memory of a window's gradients is kept for the next window's

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._used_up: dict[str, Tensor] = {}  # norms of gradients that stepped in backward, by name
        self._run = ExitStack()

    # --- before the first step ------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the module in place and returns it. Lightning calls this once the weights are loaded or restored,
        before they move to the device and before anything is computed or tracked; it calls `teardown` in the end,
        come what may. A parameter keeps its identity for the whole run."""
        if self._run.enter_context(widened(self.dtype, self.device)):
            log.info(
                f"This CPU has no {NAMES[self.dtype]} matrix products: they are computed in fp32, and each result is "
                "rounded once."
            )
        return module

    def load_rests(self, rests: Mapping[str, Tensor]) -> None:
        """Is called before `convert_module`, on a resume, with what parameters in 16 bits lack of their masters, by
        name (`techniques/arithmetic/fp32_halves.py`)."""

    def master(self, p: nn.Parameter) -> nn.Parameter:
        """Returns the parameter that is stepped in place of this one. The module calls it when it makes its
        optimizer."""
        return p

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns the optimizer, with another `step` (`with_step`) if each parameter is not stepped as it is. The
        module calls this with its new optimizer, before the schedule sees it."""
        return optimizer

    def stored_beside(self, optimizer: Optimizer) -> Iterable[tuple[nn.Parameter, str, dict[str, object]]]:
        """Returns (weight, its name, what the host stores of it beside its 16 bits) for each weight that it steps."""
        return ()

    def restored(self, optimizer: Optimizer, p: nn.Parameter) -> None:
        """Is called with each stepped parameter as soon as a checkpoint has restored its state, one after the other."""

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores what `state_dict` returned. Lightning calls this on a resume, with the weights on the device."""

    def device_tensors(self) -> Iterable[Tensor]:
        """Returns tensors on the device besides weights, gradients and the optimizer's state; the memory meter counts
        them as optimizer state. It may ask at any time."""
        return ()

    def host_tensors(self) -> Iterable[Tensor]:
        """Returns tensors that are in host memory instead of on the device, besides the optimizer's state; the memory
        meter counts them as other. It may ask at any time."""
        return ()

    # --- each micro-batch -----------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager:
        """Returns a context that Lightning enters for the full training step, backward and optimizer included: it must
        do nothing."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager:
        """Returns a context that the module enters for each forward pass alone, and Lightning for each step of an
        evaluation."""
        return nullcontext()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Returns the tensor where backward starts. Lightning calls this with each micro-batch's loss; it calls
        callbacks, too."""
        return super().pre_backward(tensor, module)

    def collect(self, p: nn.Parameter) -> None:
        """Is called with a parameter whose gradient backward has just made, which may leave the device now."""

    # --- each window ----------------------------------------------------------------------------------------------

    def unscale(self, optimizer: Optimizer) -> bool:
        """Brings gradients to their true size, or sets `gradient_scale`. The module calls this after a window's last
        backward pass, before anything reads the gradients. Returns: False: they overflowed, skip this step."""
        return True

    def use_up(self, name: str, gradient: Tensor) -> None:
        """Is called with a parameter's name and gradient when it steps inside backward, before `update`: stores its
        norm for `norm` and `first_not_finite`, without waiting for it."""
        self._used_up[name] = norm_of(gradient)

    def norm(self, model: nn.Module) -> Tensor | None:
        """Returns the global norm of the true gradients, before any limit; None if gradients were stepped and freed
        before their norm was read. The module calls this after `unscale`."""
        # The sum is in the model's order, not that of the optimizer's groups: other loops use this order, and get the
        # same bits.
        if parameters := [p for p in model.parameters() if p.grad is not None]:
            return self.global_norm(parameters) / self.gradient_scale
        return torch.linalg.vector_norm(torch.stack([*self._used_up.values()])) if self._used_up else None

    def first_not_finite(self, module: nn.Module) -> str | None:
        """Returns the first parameter whose gradient is not finite, if any. The module calls this when a loss or a norm
        is not finite."""
        tensors = {name: p.grad for name, p in module.named_parameters()} | self._used_up
        return next((name for name, tensor in tensors.items() if tensor is not None and not finite(tensor)), None)

    def forget(self) -> None:
        """Is called in place of a step that is skipped because of gradients that are not finite: gradients that are
        stored elsewhere than at the parameters must not count in the next window."""

    def clip(self, model: nn.Module, value: float | None, largest: float | None, total: Tensor | None) -> None:
        """Limits each element of the true gradients to +-value, then their global norm to `largest`; None: off. The
        module calls this between the callbacks and the step. Args: total: the result of `norm`."""
        parameters = [p for p in model.parameters() if p.grad is not None]
        if not parameters:
            return
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value * self.gradient_scale)
            total = self.norm(model)
        if largest is not None:
            nn.utils.clip_grads_with_norm_(parameters, largest, total)

    def update(self, optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
        """Steps a single parameter with the options of `group` and drops its gradient. It is called in place of the
        optimizer's `step` for steps inside backward."""
        step_one(optimizer, group, p)
        p.grad = None

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Frees all gradients. The module calls this after each step, done or skipped."""
        optimizer.zero_grad(set_to_none=True)
        self._used_up.clear()

    def mark_used(self, early: bool) -> None:
        """Marks gradients as used without a step: the planner calls this, so that the memory that stays is what a step
        keeps. Args: early: each was stepped inside backward."""

    # --- after steps ----------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Returns when each weight is that of the last step. It is called before weights are read outside of a forward
        pass."""

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns a weight as it was last stepped, wherever it is; it is called after `arrived`. The parameter of a
        weight that streams holds no values while its block does not compute."""
        return p.data

    def state_dict(self) -> dict:
        """Returns tensors and plain numbers without which a resumed run would have other bits. Lightning calls this for
        each checkpoint and saves them under the class's name."""
        return {}

    def full_precision(self, p: nn.Parameter) -> Tensor:
        """Returns a weight at its full precision; if the host stores it in another form, a copy. Exports and
        checkpoints call it, after `arrived`."""
        return p.data

    def teardown(self) -> None:
        """Undoes all changes to the process. Lightning calls this in the end."""
        self._run.close()


def with_step(optimizer: Optimizer, step: Callable[[Optimizer], None]) -> Optimizer:
    """Replaces an optimizer's `step`. Lightning, the schedule and others that call or watch it need not know that a
    precision steps in its own way."""

    def called(optimizer: Optimizer, closure: Callable = lambda: None) -> None:
        closure()  # Lightning's: callbacks look at the gradients, then they are clipped
        step(optimizer)

    optimizer.step = MethodType(called, optimizer)
    return optimizer


def with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict, nn.Parameter]]:
    """Yields (group, parameter) for every parameter that has a gradient."""
    return ((group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def step_one(optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
    """Steps one parameter with any optimizer, as a group of one: optimizers keep state by parameter.

    A second optimizer object that shares the state does it, so that code which reads or schedules the first one's
    groups finds them complete.
    """
    alone = object.__new__(type(optimizer))
    alone.__dict__ |= {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    alone.param_groups = [{**group, "params": [p]}]
    alone.step()
