"""Wraps a library's optimizer as `training_step` uses it: finish a window's gradients, clip, step, drop them.

    WindowOptimizer         here: what all have in common
      DeviceOptimizer       here: fp32 weights on the device, whose gradients are at the parameters
        NarrowOptimizer     `techniques/precision/weights_16bit.py`: 16-bit weights on the device
      HostOptimizer         `offload/host_optimizer.py`: weights that the host steps

Each has the parameter groups and the state of the library's optimizer, so schedules, loggers and checkpoints see one
optimizer. Lightning's own gradient handling (unscaling, clipping) is not used: it does not unscale for fused
optimizers, refuses to clip for them, and counts a step that the loss scaler skipped as a step.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.step.gradients import Gradients, finite, norm_of, norm_of_all

GlobalNorm = Callable[[Iterable[nn.Parameter]], Tensor]  # over all processes


class WindowOptimizer(Optimizer):
    """Shares the parameter groups and the state of a library's optimizer. `CausalLM.training_step` calls `finish`,
    `clip`, `step` and `drop_gradients`, in this order. Args: inner: the library's optimizer."""

    scale = 1.0  # after `finish`, a stored gradient is the true one times this

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state
        # Lightning's LearningRateMonitor and others show the name of the optimizer's class.
        self.__class__ = type(type(inner).__name__, (type(self),), {})

    def finish(self, loss: Tensor, scale: float = 1.0) -> Gradients:
        """Completes a window's gradients after its last backward pass.

        This is where a window reads the device: one number says whether loss and gradients are finite.

        Args: loss: (), the window's mean loss; scale: the loss scale of its gradients.
        """
        raise NotImplementedError

    def first_not_finite(self) -> str | None:
        """Returns the first parameter whose gradient is not finite, if any."""
        raise NotImplementedError

    def clip(self, norm: Tensor | None, value: float | None, largest: float | None) -> None:
        """Limits each element of the true gradients to +-value, then their global norm to `largest`; None: off.

        Args: norm: that of `finish`.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Steps all parameters that have a gradient."""
        raise NotImplementedError

    def drop_gradients(self, stepped: bool) -> None:
        """Frees the window's gradients. Args: stepped: False: the step was skipped."""
        raise NotImplementedError

    def masters_on_host(self) -> Iterable[Tensor]:
        """Returns the master weights in host memory."""
        return ()

    def gradients_on_host(self) -> Iterable[Tensor]:
        """Returns the sums of gradients in host memory."""
        return ()

    def step_one(self, group: dict, p: nn.Parameter) -> None:
        """Steps a single parameter, whose state the optimizer keeps by parameter. Args: group: its options."""
        self.inner.param_groups = [{**group, "params": [p]}]
        self.inner.step()

    def state_dict(self) -> dict:
        self.inner.param_groups = self.param_groups
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.inner.param_groups = self.param_groups
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


class DeviceOptimizer(WindowOptimizer):
    """Steps parameters on the device.

    Args:
        inner: the library's optimizer.
        model: its `named_parameters` are those that are stepped, and frozen ones, in the model's order.
        global_norm: parameters with a gradient -> the L2 norm over all processes.
    """

    def __init__(self, inner: Optimizer, model: nn.Module, global_norm: GlobalNorm = norm_of_all) -> None:
        super().__init__(inner)
        self.model, self.global_norm = model, global_norm
        self._parameters = list(model.parameters())  # once: walking the modules of a deep model takes milliseconds
        self._stepped_norms: dict[str, Tensor] = {}  # of gradients that were stepped inside backward, by name

    def finish(self, loss: Tensor, scale: float = 1.0) -> Gradients:
        self.scale = scale
        self._unscale()
        norm = self._norm()
        watched = loss if norm is None else loss + norm
        fine = bool(watched.isfinite())
        loss_is_finite = fine or bool(loss.isfinite())
        are_finite = fine or norm is None or bool(norm.isfinite())
        return Gradients(None if norm is None else norm / self.scale, are_finite, loss_is_finite)

    def _norm(self) -> Tensor | None:
        """Returns the global norm of the gradients as they are stored; None: there are none."""
        # The sum is in the model's order, not that of the optimizer's groups: other loops use this order, and get the
        # same bits.
        if parameters := [p for p in self._parameters if p.grad is not None]:
            return self.global_norm(parameters)
        return torch.linalg.vector_norm(torch.stack([*self._stepped_norms.values()])) if self._stepped_norms else None

    def _unscale(self) -> None:
        """Brings stored gradients to their true size."""
        if self.scale != 1.0:
            for _, p in self.with_gradient():
                p.grad.mul_(1.0 / self.scale)
            self.scale = 1.0

    def first_not_finite(self) -> str | None:
        tensors = {name: p.grad for name, p in self.model.named_parameters()} | self._stepped_norms
        return next((name for name, tensor in tensors.items() if tensor is not None and not finite(tensor)), None)

    def clip(self, norm: Tensor | None, value: float | None, largest: float | None) -> None:
        parameters = [p for p in self._parameters if p.grad is not None]
        if not parameters:
            return
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value * self.scale)
            norm = self.global_norm(parameters) / self.scale
        if largest is not None:
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)

    def step(self) -> None:
        self.inner.param_groups = self.param_groups
        self.inner.step()

    def drop_gradients(self, stepped: bool) -> None:
        self.zero_grad(set_to_none=True)
        self._stepped_norms.clear()

    def use_up(self, name: str, gradient: Tensor) -> None:
        """Stores the norm of a gradient that is stepped inside backward, for `finish`, without waiting for it."""
        self._stepped_norms[name] = norm_of(gradient)

    def with_gradient(self) -> Iterator[tuple[dict, nn.Parameter]]:
        """Yields (group, parameter) for every parameter that has a gradient."""
        return ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)
