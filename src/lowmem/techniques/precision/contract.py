"""The contract of a precision: in which dtype weights are held and products computed, how gradients become an update.

A precision is a Lightning plugin. Whoever trains, measures or plans asks it through the attributes and hooks below, in
the order in which a run does, and through no other name; each has the answer of plain fp32 weights that the optimizer
steps itself. So a new precision is a class that sets `dtype` and overrides what it does otherwise. It derives from
what it is a kind of:

    BasePrecision         here
      FullPrecision, TensorFloat32, Autocast    `fp32_weights.py`: weights in fp32
      SixteenBitWeights                         `weights_16bit.py`: 16-bit weights; `widen`, `round`, `new_extra_state`
      HostMasters                               `host_masters.py`: weights in 16 bits, their fp32 masters on the host
      ScaledLoss                                `loss_scale.py`: a mixin, placed first, for any of them in fp16

Lightning's own plugins do not unscale for fused optimizers, refuse to clip for them, and count a step that the loss
scaler skipped as a step; on a CPU they turn fp16 into bf16. These do none of that.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
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
    """Args: device: the type of the device that computes, cpu or cuda."""

    dtype: torch.dtype  # of the matrix products
    tf32 = False  # whether fp32 products read 10 bits of each factor's mantissa, on a card that can
    scales_loss = False  # gradients mean nothing until the whole window's are unscaled
    gradient_scale = 1.0  # after `unscale`, a gradient is stored as its true size times this
    optimizer_side: Side = "device"  # where the optimizer's state lies
    link: Link | None = None  # over which gradients and weights travel, where the optimizer is not on the device's side
    global_norm: Callable[[Iterable[nn.Parameter]], Tensor] = staticmethod(norm_of_all)  # over all processes
    draws = False  # whether a step draws random numbers: who else holds the same weight draws others
    keeps_buffers = False  # whether the memory of a window's gradients is held for the next window's

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._used_up: dict[str, Tensor] = {}  # of gradients that stepped in backward: parameter -> norm
        self._run = ExitStack()

    # --- before the first step ------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Lightning calls this once the weights are loaded or restored, before they move to the device and before
        anything is computed or tracked; and `teardown` in the end, come what may. Returns: the module, changed in
        place. A parameter keeps its identity for the whole run."""
        if self._run.enter_context(widened(self.dtype, self.device)):
            log.info(f"This CPU has no {NAMES[self.dtype]} products: they are computed in fp32 and rounded once.")
        return module

    def master(self, p: nn.Parameter) -> nn.Parameter:
        """Asked by the module when it makes its optimizer. Returns: what is stepped in the place of a parameter."""
        return p

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The module calls this with the optimizer that it has made, before the schedule sees it. Returns: it, with a
        `step` of its own (`with_step`) where it is not enough that each parameter is stepped as it is."""
        return optimizer

    def load_state_dict(self, state_dict: dict) -> None:
        """Lightning calls this on a resume, with what `state_dict` returned and the weights on the device."""

    def device_tensors(self) -> Iterable[Tensor]:
        """Asked by the memory meter, at any time. Returns: what is held on the device beside weights, gradients and the
        optimizer's state. It counts as optimizer state."""
        return ()

    def host_tensors(self) -> Iterable[Tensor]:
        """Asked by the memory meter, at any time. Returns: what is held in host memory instead of on the device, beside
        the optimizer's state. It counts as other."""
        return ()

    # --- each micro-batch -----------------------------------------------------------------------------------------

    def train_step_context(self) -> AbstractContextManager:
        """Lightning wraps the whole training step in this, backward and optimizer included: nothing belongs there."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager:
        """The module enters this around each forward pass alone, and Lightning around each step of an evaluation."""
        return nullcontext()

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Lightning calls this with each micro-batch's loss, and the callbacks from within. Returns: what backward
        starts from."""
        return super().pre_backward(tensor, module)

    def collect(self, p: nn.Parameter) -> None:
        """Called with a parameter whose gradient backward has just made: it may leave the device."""

    # --- each window ----------------------------------------------------------------------------------------------

    def unscale(self, optimizer: Optimizer) -> bool:
        """The module calls this after the window's last backward pass, before anyone looks at the gradients: they are
        brought to their true size, or `gradient_scale` tells it. Returns: False: they overflowed, skip this step."""
        return True

    def use_up(self, name: str, gradient: Tensor) -> None:
        """Called with a parameter's name and gradient by whoever steps inside backward, before `update`: its norm is
        kept for `norm` and `first_not_finite`, and nothing waits for it."""
        self._used_up[name] = norm_of(gradient)

    def norm(self, model: nn.Module) -> Tensor | None:
        """The module calls this after `unscale`. Returns: the global norm of the true gradients, before any limit;
        None: nothing is known of them any more."""
        # In the model's order, not the optimizer's groups': a sum in the order of every other loop has the same bits.
        if found := [p for p in model.parameters() if p.grad is not None]:
            return self.global_norm(found) / self.gradient_scale
        return torch.linalg.vector_norm(torch.stack([*self._used_up.values()])) if self._used_up else None

    def first_not_finite(self, module: nn.Module) -> str | None:
        """The module calls this when a loss or a norm is not finite. Returns: the first parameter whose gradient is not
        either, if any."""
        read = {name: p.grad for name, p in module.named_parameters()} | self._used_up
        return next((name for name, tensor in read.items() if tensor is not None and not finite(tensor)), None)

    def forget(self) -> None:
        """The module calls this in the place of a step that is skipped for such a fault: gradients that are held
        elsewhere than at the parameters are not of the next window."""

    def clip(self, model: nn.Module, value: float | None, largest: float | None, total: Tensor | None) -> Tensor | None:
        """The module calls this between the callbacks and the step: limit each element of the true gradients to
        +-value, then their global norm to `largest`; None: off. total: what `norm` returned.

        Returns:
            The global norm before it was limited, where it was asked for.
        """
        parameters = [p for p in model.parameters() if p.grad is not None]
        if not parameters:
            return None
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value * self.gradient_scale)
            total = self.norm(model)
        if largest is None:
            return None
        nn.utils.clip_grads_with_norm_(parameters, largest, total)
        return total

    def update(self, optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
        """Called in the place of the optimizer's `step` by whoever steps inside backward: step a single parameter with
        the options of `group`, and drop its gradient."""
        step_one(optimizer, group, p)
        p.grad = None

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """The module calls this after each step, and after each that was skipped."""
        optimizer.zero_grad(set_to_none=True)
        self._used_up.clear()

    def mark_used(self, early: bool) -> None:
        """The planner calls this where a step would have used the gradients that backward made: what is kept of their
        memory is what a step keeps. Args: early: each was stepped inside backward."""

    # --- after steps ----------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Called before weights are read other than by a forward pass: return when each is that of the last step."""

    def stored(self, p: nn.Parameter) -> Tensor:
        """Asked after `arrived`. Returns: a weight as it was last stepped, wherever it lies: one that streams is no
        number while its block does not compute."""
        return p.data

    def state_dict(self) -> dict:
        """Lightning calls this for each checkpoint and saves the result under the name of the class. Returns: tensors
        and plain numbers without which a resumed run would have other bits."""
        return {}

    def full_precision(self, p: nn.Parameter) -> Tensor:
        """Asked by the export and by checkpoints, after `arrived`. Returns: a weight at its full precision; of one that
        the host holds in another form, a copy that is made now."""
        return p.data

    def teardown(self) -> None:
        """Lightning calls this in the end: take back whatever was changed in the process."""
        self._run.close()


def with_step(optimizer: Optimizer, step: Callable[[Optimizer], None]) -> Optimizer:
    """Replace an optimizer's `step`. Lightning, the schedule and whoever else calls or watches it need not know that a
    precision steps in its own way."""

    def called(optimizer: Optimizer, closure: Callable = lambda: None) -> None:
        closure()  # Lightning's: callbacks look at the gradients, then they are clipped
        step(optimizer)

    optimizer.step = MethodType(called, optimizer)
    return optimizer


def with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict, nn.Parameter]]:
    """(group, parameter) of every parameter that has a gradient."""
    return ((group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def step_one(optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
    """Any optimizer's step on one parameter: its state is kept by parameter, so a group of one is enough.

    A second optimizer that shares the state does it: the first one's groups stay whole for whoever reads or schedules
    them meanwhile.
    """
    alone = object.__new__(type(optimizer))
    alone.__dict__ |= {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    alone.param_groups = [{**group, "params": [p]}]
    alone.step()
