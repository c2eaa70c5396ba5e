"""Measures how many times longer an optimizer's update takes on this machine's processors than its counted operators.

The factor was 0.4 to 16 on one machine: a library's pass over the state may be slow, and operators that follow each
other read from a cache. So the real update of one matrix is timed, and the operators of the same update are traced and
counted.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256

import torch
from torch import nn

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.offload.master_weights import MasterWeights
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.plan.cost.machine import Machine, fastest, others_compute
from lowmem.plan.tracing.shapes import ShapeMode
from lowmem.plan.tracing.stand_in import stand_in
from lowmem.step.gradients import norm_of_all
from lowmem.techniques.optim.build import MakeOptimizer
from lowmem.training import build

MATRIX = (1024, 4096)  # a typical size in a model
ANY = ("_target_", "_partial_", "lr", "declares", "in_backward")  # keys that change no time, or that `_kind` names


def knows_update(machine: Machine, run: Run) -> bool:
    """Returns whether no update has to be timed: an update on a card is only counted."""
    if machine.link is not None and not run.masters:
        return True
    here = machine.host or machine
    return _kind(run) in here.updates | here.busy


def pace_of_update(machine: Machine, run: Run) -> float:
    """Returns measured over counted seconds of an update. Args: machine: the rates of this machine's processors."""
    kind = _kind(run)
    if kind not in machine.updates | machine.busy:
        quiet = not others_compute("cpu")
        pace = timed(run) / counted(machine, run)
        if quiet and not others_compute("cpu"):
            machine.updates[kind] = pace
            machine.save()
        else:
            machine.busy[kind] = pace
    return (machine.busy | machine.updates)[kind]


def timed(run: Run) -> float:
    with _update(run, build.optimizer(run)) as update:
        return fastest(update, "cpu")


def counted(machine: Machine, run: Run) -> float:
    make, mode = build.optimizer(run), ShapeMode()
    if not run.any("steps_on_shapes"):
        make = stand_in(make, one_kernel=True, pages=False)
    with mode, _update(run, make) as update:
        update()  # creates the state
        mode.phase = "update"
        update()
    return sum(machine.operator(work) * times for (_, work), times in mode.work.items())


@contextmanager
def _update(run: Run, make: MakeOptimizer) -> Iterator[Callable[[], None]]:
    """Yields a function that updates one matrix in host memory, as the precision does once per window."""
    precision = instantiate(run.trainer.plugins.precision, device="cpu")
    probe = nn.Linear(*MATRIX, bias=False, dtype=getattr(torch, run.weights_dtype))
    masters = MasterWeights() if run.masters else None
    if masters is not None:
        masters.connect(precision, WeightsOnDevice())
    try:
        precision.convert_module(probe)  # also replaces products that this CPU lacks, which optim=muon computes
        optimizer = masters.optimizer(make, probe) if masters else precision.optimizer(make(probe), probe, norm_of_all)
        gradient = torch.full_like(probe.weight, 1e-3)

        def update() -> None:
            probe.weight.grad = gradient
            if masters is not None:
                optimizer.collect(probe.weight)
            optimizer.step()

        yield update
    finally:
        precision.teardown()


def _kind(run: Run) -> str:
    """Returns a name for what an update's time depends on: the optimizer, a digest of its arguments, and whether it
    steps masters, or fp32 weights, or 16-bit weights that are widened and rounded."""
    stepped = "masters" if run.masters else "float32"
    if run.weights_dtype != "float32":
        stepped = f"{run.trainer.plugins.precision.target}{' on the host' * run.masters}"
    arguments = {key: value for key, value in run.optim.plain().items() if key not in ANY}
    digest = sha256(json.dumps(arguments, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{run.optim.target} ({digest}) of {stepped}"
