"""Steps weights on the host: gradients are summed there, clipped, and step fp32 masters (`host_weight.py`).

Each gradient leaves the device as soon as backward has made it. On the host gradients are summed over the micro-batches
in fp32; with a window of one micro-batch they stay in 16 bits. A stepped master is rounded into the device's 16-bit
weight, or into the weight in host memory that streams. The bus carries 2 bytes per parameter and micro-batch of
gradients, and 2 per step of weights that stay on the device; the step runs at the host's speed.

With `step_early` a master steps inside backward, as soon as its last gradient of the window has arrived: nothing can be
clipped by the global norm then, and nothing can be undone.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.tracker import belongs, host_side
from lowmem.offload.host_weight import HostWeight
from lowmem.offload.link import Link, Take
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.step.gradients import Gradients, Reading, finite, norm_of
from lowmem.step.one_weight import Step
from lowmem.step.optimizer import WindowOptimizer
from lowmem.system.errors import NotFinite


class HostOptimizer(WindowOptimizer):
    """An optimizer of weights that the host steps.

    On a card autograd's thread calls `collect`, `collect_and_step` and `step_early`, the link's host thread `_step` and
    `step_one`, and the training thread all others.

    Args:
        inner: the optimizer of the masters' fp32 parameters; it steps one of them at a time.
        masters: weight -> what the host stores of it.
        weights: where 16-bit weights are that no block needs now.
        link: carries gradients to the host, and stepped weights back.
    """

    def __init__(
        self, inner: Optimizer, masters: Mapping[nn.Parameter, HostWeight], weights: WeightsOnDevice, link: Link
    ) -> None:
        super().__init__(inner)
        self.masters, self.weights, self.link = masters, weights, link
        self._group = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        self._reading = Reading()  # how to read this window's gradients
        self._norms: list[Tensor] = []  # of the true gradients of this window
        self._steps_early = False  # True: gradients of this run are stepped inside backward
        self._not_finite: str | None = None  # the parameter whose gradient prevented the last step

    # --- inside backward ------------------------------------------------------------------------------------------

    def collect(self, p: nn.Parameter) -> None:
        """Sends a gradient that backward has just made to the host, and frees it; with weights.order=by_layer once all
        micro-batches have added theirs."""
        self._fetch(p, self.masters[p].add)

    def collect_and_step(self, p: nn.Parameter, clip_value: float | None) -> None:
        """Sends the last gradient of a window to the host, which steps the master as soon as it has arrived. Args:
        clip_value: the largest absolute element of a gradient; None: off.

        Raises:
            NotFinite: the gradient is not finite, and masters that were stepped before it cannot be stepped back.
        """
        master = self.masters[p]
        self._fetch(p, master.add if self.link.lends else master.use)
        self.step_early(p, clip_value)

    def step_early(self, p: nn.Parameter, clip_value: float | None) -> None:
        """Steps a parameter whose gradients of this window have all left for the host. Raises: NotFinite."""
        self._steps_early = True
        self._submit(self.masters[p], _limited(Reading(), clip_value), early=True)

    def _fetch(self, p: nn.Parameter, take: Take) -> None:
        gradient = self.weights.take_gradient(p)
        if gradient is not None:
            belongs(gradient, "gradients")
            self.link.fetch(gradient, take)

    # --- after backward -------------------------------------------------------------------------------------------

    def finish(self, loss: Tensor, scale: float = 1.0) -> Gradients:
        """Waits until all gradients are on the host. `MasterWeights` has read the loss before the first early step."""
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
        """Changes how the gradients are read, not the stored gradients."""
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
        """Gives all masters that have not stepped inside backward to the host thread. Before the device reads a weight,
        it waits for that weight (`MasterWeights`)."""
        for master in self._collected():
            self._submit(master, self._reading)

    def drop_gradients(self, stepped: bool) -> None:
        """Forgets gradients of a skipped step. The host thread frees the others once they are used."""
        for master in () if stepped else self._collected():
            master.complete = False

    def _collected(self) -> list[HostWeight]:
        """Returns masters with a gradient of this window, in the order in which the next forward pass reads their
        weights."""
        return [master for master in self.masters.values() if master.complete]

    # --- one master -----------------------------------------------------------------------------------------------

    def _submit(self, master: HostWeight, reading: Reading, early: bool = False) -> None:
        # A copy of the group: the schedule may change it while the host still steps.
        group = {**self.param_groups[self._group[master.wide]]}
        step = partial(self._step, master, group, reading, early)
        if master.host_block is None:
            self.link.update(master.weight, step)
        else:
            self.link.update_block(master.host_block, step)

    def _step(
        self, master: HostWeight, group: dict, reading: Reading, early: bool, narrow: Tensor | None = None
    ) -> None:
        """Steps a weight, in the link's host thread. Args: early: inside backward; narrow: receives its 16 bits; None:
        they are stepped where they are."""
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
        """Waits for the host thread, which may still be stepping."""
        self.link.finish()
        return super().state_dict()

    def masters_on_host(self) -> Iterator[Tensor]:
        for master in self.masters.values():
            yield from master.tensors()

    def gradients_on_host(self) -> Iterator[Tensor]:
        sums = (master.sum for master in self.masters.values())  # each is read once: the host's thread may drop it
        return (buffer for buffer in sums if buffer is not None)

    def stored_beside(self) -> Iterator[tuple[nn.Parameter, str, dict[str, object]]]:
        """Yields (parameter, name, host tensors: master or remainder, and optimizer state)."""
        return map(self._stored_beside, self.masters.values())

    def _stored_beside(self, master: HostWeight) -> tuple[nn.Parameter, str, dict[str, object]]:
        return master.weight, master.name, master.master_tensors() | self.state.get(master.wide, {})

    def mark_used(self, early: bool) -> None:
        """Marks gradients as used without a step: the planner calls this, so that the memory that stays is what a step
        keeps. Args: early: each was stepped inside backward."""
        for master in self._collected():
            master.used(early)


def _limited(reading: Reading, value: float | None) -> Reading:
    return reading._replace(limit=float("inf") if value is None else value)
