"""Seconds of an optimizer step: its passes, what they do not hide of the transfers, and what they do not of the step.

What overlaps in a run overlaps here. Offloaded boundaries leave during a forward pass and come back during a backward
pass (`offload/boundary.py`). Gradients of masters leave during backward, which waits for a slot where the link or the
host that sums them is slower (`offload/link.py`). With an early step the host updates during the last backward pass;
else it waits for all gradients and their norm, and updates during the next window's first forward pass. Weights that
wait on the host (`offload/streamed.py`) come for every pass, beside what leaves: a link has two directions. They are
stepped where they wait, and do not travel once more after the step. On a CPU all of it is done one after the other.
What devices exchange hides behind the pass in which an engine sends it; sums that the next operator needs do not, and
what is still under way when a pass ends is waited for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lowmem.plan.links import EARLIER, NODE, by_phase, how_often
from lowmem.plan.machine import Machine
from lowmem.plan.trace import Trace
from lowmem.plan.update import knows_update, pace_of_update
from lowmem.settle import Run

PASSES, STEP = ("forward", "backward"), ("sum", "step", "update")  # phases of a trace's work
TRAVEL = "travel"  # another: copies of weights that come for a pass, where there are any
LONG = 0.1  # seconds of a step: in a shorter one the training loop itself takes its part
REACHED = 0.65  # of a card's rate of matrix products, in a pass of a transformer: what people see is from 0.5 to 0.9


class Window(NamedTuple):
    """Seconds."""

    passes: float
    transfers: float
    step: float

    @property
    def seconds(self) -> float:
        return sum(self)


def seconds(machine: Machine, shapes: Trace) -> dict[str, float]:
    """By phase, of a trace's operators, on the side where they are."""
    host = machine.host if (shapes.steps_on_host or shapes.waits_on_host) and machine.host else machine
    taken = dict.fromkeys((*PASSES, *STEP), 0.0)
    for (phase, work), times in shapes.work.items():
        taken[phase] = taken.get(phase, 0.0) + times * (host if phase in STEP else machine).operator(work)
    return taken


def of_trace(machine: Machine, run: Run, shapes: Trace) -> Window:
    """Of a run that was traced as it is."""
    return window(machine, run, shapes, seconds(machine, shapes), run.windows.largest)


def window(
    machine: Machine,
    run: Run,
    shapes: Trace,
    taken: Mapping[str, float],
    micro_batches: int,
    node: int = NODE,
) -> Window:
    """Args: taken: by phase of the trace's work; forward, backward and sum are of one micro-batch; node: devices of
    one."""
    alone = _alone(machine, run, shapes, taken, micro_batches)
    if not shapes.sent:
        return alone
    pace, waits = machine.pace(run.multiplies_in), 0.0
    for (phase, at_once), part in by_phase(shapes.sent, node).items():
        hidden = 0.0 if at_once else pace * taken.get(phase.removeprefix(EARLIER), 0.0)
        waits += how_often(phase, micro_batches) * _beyond(hidden, machine.exchange(part))
    return alone._replace(transfers=alone.transfers + waits)


def _alone(machine: Machine, run: Run, shapes: Trace, taken: Mapping[str, float], micro_batches: int) -> Window:
    """Without what devices exchange."""
    pace = machine.pace(run.multiplies_in)
    forward, backward, update = pace * taken["forward"], pace * taken["backward"], taken["update"]
    passes = micro_batches * (forward + backward)
    if machine.link is None:
        update *= pace_of_update(machine, run)
        return Window(passes, micro_batches * (taken.get(TRAVEL, 0.0) + taken["sum"]), taken["step"] + update)
    offloaded = sum(shapes.pinned) / machine.link
    if not shapes.steps_on_host:
        travel = shapes.gradients / machine.link if shapes.waits_on_host else 0.0  # of all weights once
        waits = _beyond(forward, offloaded + travel) + _beyond(backward, offloaded + 2 * travel)
        update += 2 * shapes.paged / machine.bandwidth  # no operator that is traced touches it
        return Window(passes, micro_batches * waits, taken["step"] + update)

    element = run.product_bytes
    host, travel = machine.host or machine, element * shapes.trained_parameters / machine.link
    # weights that are brought to the device after a step
    kept = max(0, shapes.trained_parameters - (shapes.streamed + shapes.outside) // element)
    update *= pace_of_update(host, run)
    update += 2 * element * kept / host.bandwidth  # read and written again: into the link's slots
    # The last block is where the forward pass has left it when backward begins.
    comes = (shapes.streamed + shapes.head) / machine.link
    again = (max(0, shapes.streamed - shapes.blocks[1]) + shapes.head) / machine.link
    forward_takes = max(forward, offloaded, comes)
    backward_takes = max(backward, offloaded + again, travel, taken["sum"])
    waits = (forward_takes - forward) + (backward_takes - backward)
    # The embeddings, first in a model and last in backward, are most often its largest: nothing hides their update.
    first = update * shapes.largest_trained / shapes.trained_parameters
    if run.early:
        taken_by_host, up = taken["sum"] + taken["step"] + update, offloaded + again + element * kept / machine.link
        step = max(first, _beyond(backward_takes, taken_by_host), _beyond(backward_takes, up))
    else:
        up = comes + element * kept / machine.link
        step = taken["step"] + max(first, _beyond(forward_takes, update), _beyond(forward_takes, up))
    return Window(passes, micro_batches * waits, step)


def free_from(machine: Machine, products: str) -> float:
    """Tokens of a micro-batch from which weights come from the host while nobody waits: each takes two operations per
    token of the forward pass, and two bytes of the link, whatever the model."""
    return REACHED * machine.flops[products] / machine.link


def refine(machine: Machine, run: Run, shapes: Trace, measured: float) -> float | None:
    """The machine learns from a run how long passes of its dtype take: what of a step is not counted for transfers or
    the update is taken to be theirs.

    Args: measured: seconds of a step.

    Returns: those that were counted; None: it is not known what such an update takes here.
    """
    if not knows_update(machine, run):
        return None
    counted, kind = of_trace(machine, run, shapes), run.multiplies_in
    if measured >= LONG:
        rest = measured - counted.transfers - counted.step
        machine.learn(kind, rest / (counted.passes / machine.pace(kind)))
    return counted.seconds


def _beyond(hidden: float, whole: float) -> float:
    """What remains of it after so many seconds beside something else."""
    return max(0.0, whole - hidden)
