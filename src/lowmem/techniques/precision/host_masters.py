"""Keeps 16-bit weights on the device and everything else on the host: small updates are exact, at 2 bytes each on the
card.

The device holds the weights in 16 bits (with weights=streamed those of the blocks that compute) and what the current
backward pass needs. The host holds what the optimizer steps (`host_weight.py`: fp32 masters, or another form of weights
that stream), its state, and the window's gradients. Each gradient leaves for the host as soon as backward has made it
(`host_masters_callback.py`). There gradients are summed over the micro-batches in fp32; with a window of one
micro-batch they stay in 16 bits. After the last one the host clips, steps each master and rounds it into the device's
weight, or into the weight in host memory that streams. The bus carries 2 bytes per parameter and micro-batch of
gradients, and 2 per step of weights that stay on the device; the step runs at the host's speed.

Masters are the loaded weights themselves, taken before they are rounded. They are stored by parameter, so tied weights
stay tied; a frozen weight has none, and is rounded once. Source: Micikevicius et al. 2018, arXiv 1710.03740, for
masters; Ren et al. 2021, arXiv 2101.06840, for keeping them on the host.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.ledger import Side
from lowmem.memory.tracker import belongs, host_side
from lowmem.system.errors import NotFinite
from lowmem.techniques.arithmetic.gradients import Reading, finite, norm_of
from lowmem.techniques.optim.contract import Step
from lowmem.techniques.precision.contract import BasePrecision, with_step
from lowmem.techniques.precision.host_weight import HostWeight, SplitHostWeight
from lowmem.techniques.precision.loss_scale import ScaledLoss
from lowmem.techniques.weights.link import Link, Take, link_to
from lowmem.techniques.weights.resident import Resident


class HostMasters(BasePrecision):
    """Weights in `dtype`, on the device or streaming to it, which the host steps. `host_masters_callback.py` calls
    `collect` and `collect_and_step` from backward, and waits on `link` before each block."""

    optimizer_side: Side = "host"
    keeps_buffers = True

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.masters: dict[int, HostWeight] = {}  # by id of the weight
        self.link: Link = link_to(torch.device(device))
        self.weights = Resident()  # the place of weights that no block needs now; the callback sets the run's own
        self._groups: dict[int, int] = {}  # id of a master -> index of its group
        self.reading = Reading()  # how to read this window's gradients
        self._rests: Mapping[str, Tensor] = {}  # the lower halves of weights that were loaded in 16 bits
        self._stepped_early = False  # True if gradients of this run are stepped inside backward
        self.not_finite: str | None = None  # the parameter whose gradient prevented the last step

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Makes the masters. Lightning calls this once the weights are loaded or restored, before they move to the
        device."""
        module = super().convert_module(module)
        for name, p in module.named_parameters():  # a tied parameter is listed once
            if not p.requires_grad:
                p.data = p.data.to(self.dtype)
            elif id(p) not in self.masters:
                self.masters[id(p)] = master = self.new_host_weight(name, p)
                if name in self._rests:
                    master.rest.copy_(self._rests[name])
                self.weights.bring_in(p)
                self.weights.put(p, name, master.master_tensors())
        self._rests = {}
        self.weights.move_in(torch.device(self.device))
        for master in self.masters.values():
            master.moved(self.weights.home(master.weight))
        return module

    def load_rests(self, rests: Mapping[str, Tensor]) -> None:
        self._rests = rests

    def new_host_weight(self, name: str, p: nn.Parameter) -> HostWeight:
        """Makes the host's form of a parameter, whose weight gets 16 bits."""
        return HostWeight(name, p, self.dtype)

    def master(self, p: nn.Parameter) -> nn.Parameter:
        return self.masters[id(p)].wide if p.requires_grad else p

    def host_tensors(self) -> Iterator[Tensor]:
        for master in self.masters.values():
            yield from master.tensors()
        yield from self.weights.host_tensors()

    def stored(self, p: nn.Parameter) -> Tensor:
        return self.masters[id(p)].narrow if id(p) in self.masters else self.weights.stored(p)

    # --- gradients ------------------------------------------------------------------------------------------------

    def collect(self, p: nn.Parameter) -> None:
        """Sends a gradient that backward has just made to the host, and frees it; with weights.order=by_layer once all
        micro-batches have added theirs."""
        self._fetch(p, self.masters[id(p)].add)

    def collect_and_step(self, p: nn.Parameter, optimizer: Optimizer, clip_value: float | None) -> None:
        """Sends the last gradient of a window to the host, which steps the master as soon as it has arrived.

        Raises:
            NotFinite: the gradient is not finite, and masters that were stepped before it cannot be stepped back.
        """
        master = self.masters[id(p)]
        self._fetch(p, master.add if self.link.lends else master.use)
        self.step_early(p, optimizer, clip_value)

    def step_early(self, p: nn.Parameter, optimizer: Optimizer, clip_value: float | None) -> None:
        """Steps a parameter whose gradients of this window have all left for the host. Raises: NotFinite."""
        self._stepped_early = True
        self._update(optimizer, self.masters[id(p)], Reading(limit=_limit(clip_value)), early=True)

    def _fetch(self, p: nn.Parameter, take: Take) -> None:
        gradient = self.weights.take_gradient(p)
        if gradient is not None:
            belongs(gradient, "gradients")
            self.link.fetch(gradient, take)

    def unscale(self, optimizer: Optimizer) -> bool:
        """Returns True if all gradients are finite; if not, none will be used."""
        self.link.finish()
        collected = self._collected()
        self.reading = Reading(1 / self.gradient_scale)
        with host_side():
            self._norms = [norm_of(master.sum) / self.gradient_scale for master in collected]
        infinite = (m.name for m, norm in zip(collected, self._norms, strict=True) if not norm.isfinite())
        self.not_finite = next(infinite, None)
        if self.not_finite is not None:
            self.forget()
        return self._usable(self.not_finite is None)

    def norm(self, model: nn.Module) -> Tensor | None:
        if self._stepped_early or not self._norms:  # nobody has read the norm of a gradient that was stepped early
            return None
        with host_side():
            return torch.linalg.vector_norm(torch.stack(self._norms))

    def first_not_finite(self, module: nn.Module) -> str | None:
        return self.not_finite

    def forget(self) -> None:
        for master in self._collected():
            master.complete = False

    def _usable(self, finite: bool) -> bool:
        return finite

    def _collected(self) -> list[HostWeight]:
        """Returns masters with a gradient of this window, in the order in which the next forward pass reads their
        weights."""
        return [master for master in self.masters.values() if master.complete]

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Does nothing: the host frees each gradient once it is used, which may be later, and `unscale` those of a
        skipped step."""

    def mark_used(self, early: bool) -> None:
        for master in self._collected():
            master.used(early)

    def clip(self, model: nn.Module, value: float | None, largest: float | None, total: Tensor | None) -> None:
        collected = self._collected()
        self.reading = self.reading._replace(limit=_limit(value))
        if largest is None or not collected:
            return
        with host_side():
            if value is not None:
                self._norms = [norm_of(self.reading(master.sum)) for master in collected]
                total = self.norm(model)
            factor = torch.clamp(largest / (total + 1e-6), max=1.0)  # like torch's clip_grad_norm_
        self.reading = self.reading._replace(clip=factor.item())

    # --- the step -------------------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return with_step(optimizer, self._step_all)

    def _step_all(self, optimizer: Optimizer) -> None:
        for master in self._collected():
            self._update(optimizer, master, self.reading)

    def _update(self, optimizer: Optimizer, master: HostWeight, reading: Reading, early: bool = False) -> None:
        if not self._groups:
            self._groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        # A copy of the group: the schedule may change it while the host still steps.
        group = {**optimizer.param_groups[self._groups[id(master.wide)]]}
        step = partial(self._step, optimizer, master, Wanted(group, reading, early))
        if master.home is None:
            self.link.update(master.weight, step)
        else:
            self.link.at_home(master.home, step)

    def _step(self, optimizer: Optimizer, master: HostWeight, wanted: "Wanted", narrow: Tensor | None = None) -> None:
        """Steps a weight on the host. Args: narrow: receives its 16 bits; None: they are stepped where they wait."""
        gradient = master.gradient()
        if wanted.early and not finite(gradient):
            raise NotFinite(
                f"The gradient of {master.name} is not finite; other weights may already have been updated in this "
                "step, so it is not saved. With clip=1.0 all gradients are checked before any update, and "
                "on_nonfinite=skip works."
            )
        self.weights.bring_in(master.weight)
        with host_side(), torch.no_grad():
            narrow = master.narrow if narrow is None else narrow
            master.step(optimizer, Step(gradient, wanted.group, master.wide, wanted.reading, narrow))
        self.weights.put(*self._stored_beside(optimizer, master))
        master.used(wanted.early)

    def stored_beside(self, optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, str, dict[str, object]]]:
        """Yields (weight, name, what the host stores of it beside its 16 bits)."""
        return (self._stored_beside(optimizer, master) for master in self.masters.values())

    def _stored_beside(self, optimizer: Optimizer, master: HostWeight) -> tuple[nn.Parameter, str, dict[str, object]]:
        return master.weight, master.name, master.master_tensors() | optimizer.state.get(master.wide, {})

    def restored(self, optimizer: Optimizer, p: nn.Parameter) -> None:
        master = next(master for master in self.masters.values() if master.wide is p)
        self.weights.bring_in(master.weight)
        self.weights.put(master.weight, master.name, optimizer.state[p])

    def arrived(self) -> None:
        self.link.finish()
        self.weights.finish()
        for master in self.masters.values():
            self.link.wait(master.weight)

    def full_precision(self, p: nn.Parameter) -> Tensor:
        return self.masters[id(p)].full_precision if id(p) in self.masters else self.weights.stored(p)

    def teardown(self) -> None:
        super().teardown()
        self.link.close()


class BFloat16Master(HostMasters):
    """bf16 weights on the device, without loss scaling: bf16 has fp32's range."""

    dtype = torch.bfloat16

    def new_host_weight(self, name: str, p: nn.Parameter) -> HostWeight:
        kind = SplitHostWeight if self.weights.waits_on_host(p) else HostWeight
        return kind(name, p, self.dtype)


class Float16Master(ScaledLoss, HostMasters):
    """fp16 weights on the device, with a loss scale. Args: those of `ScaledLoss`."""

    dtype = torch.float16

    def _usable(self, finite: bool) -> bool:
        return self.loss_scale.update(finite)


class Wanted(NamedTuple):
    """Describes a step that was asked for. Args: group: the options of the weight's group at that time; reading: how to
    read the gradient; early: whether it is stepped inside backward."""

    group: dict
    reading: Reading
    early: bool


def _limit(value: float | None) -> float:
    return float("inf") if value is None else value
