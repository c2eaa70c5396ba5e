"""Runs the optimizer on the CPU: sums and clips gradients in host memory, and steps fp32 masters (`host_weight.py`).

    device    backward computes a gradient        next forward pass reads the 16-bit weight
                       | 2 bytes per parameter               ^ 2 bytes per parameter and step,
                       | and micro-batch                     | for weights that stay on the device
    host      sum over micro-batches -> clip -> step the fp32 master -> round to 16 bits

Each gradient is sent to the host as soon as backward has computed it. The host sums gradients over micro-batches in
fp32; with a single micro-batch per window they stay in 16 bits. A stepped master is rounded into the device's 16-bit
weight, or into the 16-bit weight in host memory from which the weight streams. The step takes as long as the CPU needs.

With `step_early` the host steps a master inside backward, as soon as the last gradient of the window has arrived for
its weight. Then gradients cannot be clipped by their global norm, and a step cannot be undone.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.tracker import belongs, host_side
from lowmem.offload.host_weight import HostWeight
from lowmem.offload.link import Link, Receive
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.step.gradients import Gradients, Reading, finite, norm_of
from lowmem.step.one_weight import Step
from lowmem.step.optimizer import WindowOptimizer
from lowmem.system.errors import NotFinite


class HostOptimizer(WindowOptimizer):
    """An optimizer that steps weights on the CPU, one at a time.

    On a card three threads call the methods. Autograd's thread: `collect`, `collect_and_step` and `step_early`. The
    link's host thread: `_step` and `step_one`. The training thread: all other methods.

    Args:
        inner: the optimizer whose parameters are `HostWeight.wide`; steps one parameter at a time.
        masters: weight -> its `HostWeight`, which stores master and summed gradient.
        weights: stores the 16-bit weights that are not in use.
        link: copies gradients to the host and stepped weights to the device.
    """

    def __init__(
        self, inner: Optimizer, masters: Mapping[nn.Parameter, HostWeight], weights: WeightsOnDevice, link: Link
    ) -> None:
        super().__init__(inner)
        self.masters, self.weights, self.link = masters, weights, link
        self._group = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        self._reading = Reading()  # how to read this window's gradients
        self._norms: list[Tensor] = []  # norm of each unscaled gradient of this window
        self._steps_early = False  # True: this run steps masters inside backward
        self._not_finite: str | None = None  # name of the parameter whose gradient prevented the last step

    # --- inside backward ------------------------------------------------------------------------------------------

    def collect(self, p: nn.Parameter) -> None:
        """Sends a gradient that backward has just computed to the host, and frees the device's copy. With
        weights.order=by_layer only the sum over all micro-batches is sent."""
        self._fetch(p, self.masters[p].add)

    def collect_and_step(self, p: nn.Parameter, clip_value: float | None) -> None:
        """Sends a parameter's last gradient of the window to the host, which steps the master once it has arrived.

        Args:
            p: the weight on the device.
            clip_value: clamps gradient elements to this absolute value; None: off.

        Raises:
            NotFinite: a gradient is not finite, and earlier steps of this window cannot be undone. On a card, where the
                host thread steps, a later call raises the error.
        """
        master = self.masters[p]
        self._fetch(p, master.add if self.link.lends else master.use)
        self.step_early(p, clip_value)

    def step_early(self, p: nn.Parameter, clip_value: float | None) -> None:
        """Queues the step of a parameter whose gradients of this window have all been sent. Args and Raises: see
        `collect_and_step`."""
        self._steps_early = True
        self._submit(self.masters[p], _limited(Reading(), clip_value), early=True)

    def _fetch(self, p: nn.Parameter, receive: Receive) -> None:
        gradient = self.weights.take_gradient(p)
        if gradient is not None:
            belongs(gradient, "gradients")
            self.link.fetch(gradient, receive)

    # --- after backward -------------------------------------------------------------------------------------------

    def finish(self, loss: Tensor, scale: float = 1.0) -> Gradients:
        """Waits until all gradients are on the host, and computes their norms. If masters step early, `MasterWeights`
        has already checked that the loss is finite."""
        self.link.finish()
        collected, self._reading = self._collected(), Reading(1 / scale)
        with host_side():
            self._norms = [norm_of(master.sum) / scale for master in collected]
        infinite = (m.name for m, norm in zip(collected, self._norms, strict=True) if not norm.isfinite())
        self._not_finite = next(infinite, None)
        if self._not_finite is not None:
            self.drop_gradients(stepped=False)
        return Gradients(self._norm(), self._not_finite is None, self._steps_early or bool(loss.isfinite()))

    def _norm(self) -> Tensor | None:
        if self._steps_early or not self._norms:
            return None
        with host_side():
            return torch.linalg.vector_norm(torch.stack(self._norms))

    def first_not_finite(self) -> str | None:
        return self._not_finite

    def clip(self, norm: Tensor | None, value: float | None, largest: float | None) -> None:
        """Stores the limit and the factor in `_reading`, which each step applies. The stored gradients do not
        change."""
        collected, self._reading = self._collected(), _limited(self._reading, value)
        if largest is None or not collected:
            return
        with host_side():
            if value is not None:
                self._norms = [norm_of(self._reading(master.sum)) for master in collected]
                norm = self._norm()
            factor = torch.clamp(largest / (norm + 1e-6), max=1.0)  # like torch's clip_grad_norm_
        self._reading = self._reading._replace(clip=factor.item())

    def step(self) -> None:
        """Queues all masters that have not stepped inside backward for the host thread, and returns immediately. Each
        module waits for its own weights before its next forward pass (`MasterWeights`)."""
        for master in self._collected():
            self._submit(master, self._reading)

    def drop_gradients(self, stepped: bool) -> None:
        """Discards the gradients of a skipped step. After a step this does nothing: the host thread frees each gradient
        once it has been applied."""
        for master in () if stepped else self._collected():
            master.complete = False

    def _collected(self) -> list[HostWeight]:
        """Returns the masters that have a gradient of this window, in the model's order: weights that the next forward
        pass reads first are stepped first."""
        return [master for master in self.masters.values() if master.complete]

    # --- one master -----------------------------------------------------------------------------------------------

    def _submit(self, master: HostWeight, reading: Reading, early: bool = False) -> None:
        # A copy of the group: the learning-rate schedule may change the group while the host still steps.
        group = {**self.param_groups[self._group[master.wide]]}
        step = partial(self._step, master, group, reading, early)
        if master.host_block is None:
            self.link.update(master.weight, step)
        else:
            self.link.update_block(master.host_block, step)

    def _step(
        self, master: HostWeight, group: dict, reading: Reading, early: bool, narrow: Tensor | None = None
    ) -> None:
        """Steps one weight; runs in the link's host thread.

        Args:
            master: the weight to step.
            group: options of its parameter group.
            reading: how to unscale and clip the gradient.
            early: the step runs inside backward.
            narrow: host tensor that receives the new 16-bit weight; None: the weight's own host memory.
        """
        gradient = master.gradient()
        if early and not finite(gradient):
            raise NotFinite(
                f"The gradient of {master.name} is not finite; other weights may already have been updated in this "
                "step, so it is not saved. With clip=1.0 all gradients are checked before any update, and "
                "on_nonfinite=skip works."
            )
        self.weights.bring_in(master.weight)
        with host_side(), torch.no_grad():
            narrow = master.narrow if narrow is None else narrow
            master.step(self, Step(gradient, group, master.wide, reading, narrow))
        self.weights.put(*self._stored_beside(master))
        master.used(early)

    # --- what the host stores -------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Returns the inner optimizer's state, once the host thread has done all queued steps."""
        self.link.finish()
        return super().state_dict()

    def masters_on_host(self) -> Iterator[Tensor]:
        for master in self.masters.values():
            yield from master.tensors()

    def gradients_on_host(self) -> Iterator[Tensor]:
        sums = (master.sum for master in self.masters.values())  # read each once: the host thread may set it to None
        return (buffer for buffer in sums if buffer is not None)

    def stored_beside(self) -> Iterator[tuple[nn.Parameter, str, dict[str, object]]]:
        """Yields (parameter, name, host tensors: master or remainder, and optimizer state)."""
        return map(self._stored_beside, self.masters.values())

    def _stored_beside(self, master: HostWeight) -> tuple[nn.Parameter, str, dict[str, object]]:
        return master.weight, master.name, master.master_tensors() | self.state.get(master.wide, {})

    def mark_used(self, early: bool) -> None:
        """Releases gradients as a step would, without a step. The planner calls this to measure the memory that remains
        after a step. Args: early: gradients were applied inside backward."""
        for master in self._collected():
            master.used(early)


def _limited(reading: Reading, value: float | None) -> Reading:
    return reading._replace(limit=float("inf") if value is None else value)
