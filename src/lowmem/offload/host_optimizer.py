"""Runs the optimizer on the CPU: sums gradients in host memory, clips them as they are applied, and updates the weights
or their fp32 masters (`host_weight.py`).

    device    backward computes a gradient        next forward pass reads the 16-bit weight
                       | 2 bytes per parameter               ^ 2 bytes per parameter and window,
                       | and micro-batch                     | for weights that stay on the device
    host      sum over micro-batches -> clip -> update the fp32 master -> round to 16 bits

Each gradient is sent to the host as soon as backward has computed it, and the host sums gradients over micro-batches in
fp32. The exception is weights.order=by_layer: then the device sums the gradients of a block's weights, and sends an
fp32 sum once per window (`by_layer.py`). With a single micro-batch per window the gradients stay in 16 bits. An update
rounds the new master to 16 bits: the result is copied to the weight on the device, or stored in host memory if the
weight is streamed. `host_weight.py` describes weights without a full fp32 master.

With early updates (`step_early`) the host updates a master while backward still runs, as soon as the last gradient of
its weight in this window is on the host. Then gradients cannot be clipped by their global norm, and if a later gradient
of the window is not finite, the step cannot be skipped.
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
    """An optimizer that updates weights on the CPU, one at a time.

    In training on a card, several threads call the methods:

        autograd's thread             `collect`, `collect_and_step`, `step_early`; with weights.order=by_layer the
                                      thread of the micro-batch calls them
        the link's host thread        `_step`, `step_one`
        the training thread           all other public methods; with weights.order=by_layer the memory meter also calls
                                      `masters_on_host` and `gradients_on_host` in the threads of micro-batches

    Args:
        inner: the torch optimizer. Its parameters are `HostWeight.wide`; each call of its `step` updates one of them.
        masters: weight -> its `HostWeight`, which stores the master and the summed gradient.
        weights: stores the 16-bit weights, on the device or in host memory.
        link: copies gradients to the host and updated weights to the device.
    """

    def __init__(
        self, inner: Optimizer, masters: Mapping[nn.Parameter, HostWeight], weights: WeightsOnDevice, link: Link
    ) -> None:
        super().__init__(inner)
        self.masters, self.weights, self.link = masters, weights, link
        self._group = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        self._reading = Reading()  # unscales and clips this window's gradients when they are applied
        # L2 norm of each unscaled gradient of this window that was not applied inside backward
        self._norms: list[Tensor] = []
        self._steps_early = False  # True: this run updates masters inside backward
        self._not_finite: str | None = None  # name of the first parameter whose gradient was not finite in `finish`

    # --- inside backward ------------------------------------------------------------------------------------------

    def collect(self, p: nn.Parameter) -> None:
        """Sends `p.grad`, which backward has just computed, to the host, and frees the gradient on the device. With
        weights.order=by_layer the gradient of a block's weight is added to a sum on the device, and only the last
        micro-batch sends this sum."""
        self._fetch(p, self.masters[p].add)

    def collect_and_step(self, p: nn.Parameter, clip_value: float | None) -> None:
        """Sends a parameter's last gradient of the window to the host, and queues the update of the master. On a CPU
        the update runs before this method returns.

        Args:
            p: the weight on the device.
            clip_value: clamps gradient elements to this absolute value; None: off.

        Raises:
            NotFinite: the gradient is not finite, and earlier updates of this window cannot be undone.
            DriveFailed: a drive that stores the master or the optimizer state failed.

        On a card these errors occur in the host thread. They are then raised by a later call that sends a gradient, or
        that waits for the link or for the weight.
        """
        master = self.masters[p]
        self._fetch(p, master.add if self.link.lends else master.use)
        self.step_early(p, clip_value)

    def step_early(self, p: nn.Parameter, clip_value: float | None) -> None:
        """Queues the update of a parameter whose gradients of this window have all been sent. Args and Raises: see
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
        """Waits until all gradients are on the host and all early updates are done, and computes the norms of the
        gradients that were not applied inside backward. Discards these gradients if one of them is not finite. With
        early updates the global norm is None, and the loss counts as finite, because `MasterWeights` has already
        checked the loss. Raises: NotFinite, DriveFailed: an earlier update failed."""
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
        """Returns the global norm of the window's gradients; None with early updates, or if there are no gradients."""
        if self._steps_early or not self._norms:
            return None
        with host_side():
            return torch.linalg.vector_norm(torch.stack(self._norms))

    def first_not_finite(self) -> str | None:
        return self._not_finite

    def clip(self, norm: Tensor | None, value: float | None, largest: float | None) -> None:
        """Stores the clip value and the clip factor in `_reading`. Each update applies them to its gradient; the
        gradients in host memory do not change."""
        collected, self._reading = self._collected(), _limited(self._reading, value)
        if largest is None or not collected:
            return
        with host_side():
            if value is not None:
                self._norms = [norm_of(self._reading(master.sum)) for master in collected]
                norm = self._norm()
            factor = torch.clamp(largest / (norm + 1e-6), max=1.0)  # the formula of torch's clip_grad_norm_
        self._reading = self._reading._replace(clip=factor.item())

    def step(self) -> None:
        """Queues the updates of all weights that have a gradient and were not updated inside backward. On a card the
        host thread runs these updates, and this method returns immediately; on a CPU this method runs them. The next
        forward pass waits for each updated weight when it needs the weight (`MasterWeights`, `StreamedWeights`)."""
        for master in self._collected():
            self._submit(master, self._reading)

    def drop_gradients(self, stepped: bool) -> None:
        """Discards the gradients of a skipped step. After a step this is a no-op, because each update ends with
        `HostWeight.used`, which marks the gradient as applied."""
        for master in () if stepped else self._collected():
            master.complete = False

    def _collected(self) -> list[HostWeight]:
        """Returns the masters whose gradient of this window has not been applied yet. They are in the model's order, so
        that the weights that the next forward pass reads first are updated first."""
        return [master for master in self.masters.values() if master.complete]

    # --- one master -----------------------------------------------------------------------------------------------

    def _submit(self, master: HostWeight, reading: Reading, early: bool = False) -> None:
        # Copy the group, since the learning rate schedule may change the group before the host thread runs the update.
        group = {**self.param_groups[self._group[master.wide]]}
        step = partial(self._step, master, group, reading, early)
        if master.host_block is None:
            self.link.update(master.weight, step)
        else:
            self.link.update_block(master.host_block, step)

    def _step(
        self, master: HostWeight, group: dict, reading: Reading, early: bool, narrow: Tensor | None = None
    ) -> None:
        """Updates one weight; runs in the link's host thread, or on a CPU in the calling thread.

        Args:
            master: the weight to update.
            group: options of the weight's parameter group.
            reading: unscales and clips the gradient.
            early: True: this is an early update, inside backward.
            narrow: host tensor that receives the new 16-bit weight; None: the weight is streamed, and is updated in its
                `HostBlock`.

        Raises:
            NotFinite: the gradient of an early update is not finite.
            DriveFailed: a drive that stores the master or the optimizer state failed.
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
        """Waits for all queued updates, and returns the inner optimizer's state."""
        self.link.finish()
        return super().state_dict()

    def masters_on_host(self) -> Iterator[Tensor]:
        for master in self.masters.values():
            yield from master.tensors()

    def gradients_on_host(self) -> Iterator[Tensor]:
        # read each `sum` only once, since the host thread may set `sum` to None at any time
        sums = (master.sum for master in self.masters.values())
        return (buffer for buffer in sums if buffer is not None)

    def stored_beside(self) -> Iterator[tuple[nn.Parameter, str, dict[str, object]]]:
        """Yields for each weight (parameter, name, host values). The host values, by name, are the master or its lower
        half, and the optimizer state."""
        return map(self._stored_beside, self.masters.values())

    def _stored_beside(self, master: HostWeight) -> tuple[nn.Parameter, str, dict[str, object]]:
        return master.weight, master.name, master.master_tensors() | self.state.get(master.wide, {})

    def mark_used(self, early: bool) -> None:
        """Marks the gradients as applied, and frees the gradients that a step would free, but updates no weight. The
        planner calls this method to compute the memory that remains allocated after a step. Args: early: True: as if
        the gradients were applied inside backward."""
        for master in self._collected():
            master.used(early)


def _limited(reading: Reading, value: float | None) -> Reading:
    return reading._replace(limit=float("inf") if value is None else value)
