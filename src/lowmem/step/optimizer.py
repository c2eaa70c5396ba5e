"""Wraps a torch optimizer, so that all kinds of weights have one interface for the update at the end of a window.

A window is the group of micro-batches of one optimizer step. `CausalLM.training_step` calls these methods of the
wrapper, in this order:

    finish            wait for the gradients, compute their norm, check that loss and gradients are finite
    clip              by value, then by global norm
    step              update the weights
    drop_gradients    discard the gradients

`clip` and `step` are not called if the step is skipped. None of the methods is called if no token of the window counts
in the loss.

The classes of wrappers:

    WindowOptimizer         this module: the interface
      DeviceOptimizer       this module: fp32 weights, with gradients in `p.grad`
        NarrowOptimizer     `techniques/precision/weights_16bit.py`: 16-bit weights, with gradients in `p.grad`
      HostOptimizer         `offload/host_optimizer.py`: masters or streamed weights in host memory, updated on the CPU

A wrapper shares the parameter groups and the state of the inner optimizer, so schedules, loggers and checkpoints see a
single optimizer. Lightning's own gradient handling (unscaling, clipping) is not used: it does not unscale for fused
optimizers, refuses to clip for them, and counts a step that the loss scaler skipped as a step.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.step.gradients import Gradients, finite, norm_of, norm_of_all

GlobalNorm = Callable[[Iterable[nn.Parameter]], Tensor]  # returns the norm of the gradients over all processes


class WindowOptimizer(Optimizer):
    """Base class of wrappers: shares the parameter groups and the state of the inner optimizer. Args: inner: the
    wrapped optimizer."""

    scale = 1.0  # loss scale by which `p.grad` is still multiplied after `finish`; not used by `HostOptimizer`

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state
        # Loggers such as Lightning's LearningRateMonitor show the class name of the optimizer.
        self.__class__ = type(type(inner).__name__, (type(self),), {})

    def finish(self, loss: Tensor, scale: float = 1.0) -> Gradients:
        """Returns the norm of a window's gradients, and whether loss and gradients are finite. Called after the
        window's last backward pass. The calling thread waits until the loss and all gradients are computed.

        Args:
            loss: (), the window's mean loss.
            scale: the loss scale by which the gradients are multiplied.
        """
        raise NotImplementedError

    def first_not_finite(self) -> str | None:
        """Returns the name of the first parameter whose gradient is not finite; None: all gradients are finite."""
        raise NotImplementedError

    def clip(self, norm: Tensor | None, value: float | None, largest: float | None) -> None:
        """Clips the gradients by value, then by global norm, or lets `step` clip them. All arguments refer to unscaled
        gradients.

        Args:
            norm: the global norm that `finish` has returned; None: see `Gradients`.
            value: clamps each element to +-value; None: off.
            largest: maximum global norm; None: off.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Updates all parameters that have a gradient, or queues their updates."""
        raise NotImplementedError

    def drop_gradients(self, stepped: bool) -> None:
        """Discards the window's gradients. Args: stepped: False if the step was skipped."""
        raise NotImplementedError

    def masters_on_host(self) -> Iterable[Tensor]:
        """Returns the tensors that `HostWeight.tensors` yields, for all weights; empty if the optimizer is not a
        `HostOptimizer`."""
        return ()

    def gradients_on_host(self) -> Iterable[Tensor]:
        """Returns the buffers in host memory in which gradients are summed; empty if the optimizer is not a
        `HostOptimizer`."""
        return ()

    def step_one(self, group: dict, p: nn.Parameter) -> None:
        """Updates a single parameter with the inner optimizer. Args: group: options of the parameter's group; p: the
        parameter, whose gradient is `p.grad`."""
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
    """Updates parameters whose gradients are in `p.grad`. The update runs where the parameters are stored: on the
    device, or with strategy=fsdp_offload in host memory.

    Args:
        inner: the wrapped optimizer.
        model: the model with the trained parameters. The global norm sums over gradients in the model's order.
        global_norm: returns the L2 norm of the given parameters' gradients over all processes. If the model is sharded,
            this is a collective call, so all processes must call `finish` and `clip`.
    """

    def __init__(self, inner: Optimizer, model: nn.Module, global_norm: GlobalNorm = norm_of_all) -> None:
        super().__init__(inner)
        self.model, self.global_norm = model, global_norm
        self._parameters = list(model.parameters())  # listed once: in a deep model this takes milliseconds
        self._stepped_norms: dict[str, Tensor] = {}  # name -> norm of a gradient that was applied inside backward

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
        """Returns the global norm of the stored gradients, or of the gradients that were applied inside backward.
        Stored gradients, and so their norm, are still multiplied by `scale`; a run with gradients that were applied
        inside backward has no loss scale. Returns None if the window has no gradients."""
        # Sum in the order of the model's parameters, not of the parameter groups. Plain PyTorch loops use the model's
        # order too, so their norms are bit-identical.
        if parameters := [p for p in self._parameters if p.grad is not None]:
            return self.global_norm(parameters)
        return torch.linalg.vector_norm(torch.stack([*self._stepped_norms.values()])) if self._stepped_norms else None

    def _unscale(self) -> None:
        """Divides stored gradients by the loss scale, in place, and sets `scale` to 1."""
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
        """Stores the norm of a gradient that is applied inside backward, for `finish`. The norm stays on the device, so
        the host does not wait. Args: name: the parameter's name; gradient: its gradient."""
        self._stepped_norms[name] = norm_of(gradient)

    def with_gradient(self) -> Iterator[tuple[dict, nn.Parameter]]:
        """Yields (group, parameter) for every parameter that has a gradient."""
        return ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)
