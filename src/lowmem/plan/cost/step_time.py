"""Computes the seconds of an optimizer step: its passes, plus the transfers and the update that they do not hide.

The same things overlap as in a run. Offloaded boundaries leave during a forward pass and come back during a backward
pass (`techniques/gradient_checkpointing/boundary.py`). Gradients of masters leave during backward, which waits for a
slot if the link, or the host that sums them, is slower (`offload/link.py`). With an early step the host
updates during the last backward pass; else it waits for all gradients and their norm, and updates during the next
window's first forward pass. Weights that wait on the host (`techniques/weights/streamed.py`) come for every pass while
other data leaves: a link has two directions, which on many machines slow each other down (`_both_ways`). They are
stepped on the host, and do not travel again after the step. An update takes at least as long as a drive that holds
masters and state. With weights.order=by_layer the passes of a window are one:
weights come once for all of its forward passes and once for all of its backward passes. On a CPU everything is done one
after the other. Exchanges between devices hide behind the pass in which an engine sends them. Sums that the next
operator needs do not hide, and a pass waits at its end for exchanges that are still under way.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lowmem.config.settle import Run
from lowmem.plan.cost.drive_time import drive_rates
from lowmem.plan.cost.machine import Machine
from lowmem.plan.cost.update_time import pace_of_update
from lowmem.plan.tracing.trace import Trace
from lowmem.plan.tracing.traffic import EARLIER, NODE, by_phase, how_often

PASSES, STEP = ("forward", "backward"), ("sum", "step", "update")  # phases of a trace's work
TRAVEL = "travel"  # one more phase, which not every trace has: copies of weights for a pass
SUM_BYTES = 4  # of an element of a sum of gradients
REACHED = 0.65  # share of a card's rate of matrix products that a transformer's pass reaches: reports say 0.5 to 0.9


class Window(NamedTuple):
    """Holds the seconds of a window: its passes, and the transfers and the step that they do not hide."""

    passes: float
    transfers: float
    step: float

    @property
    def seconds(self) -> float:
        return sum(self)


def seconds(machine: Machine, trace: Trace) -> dict[str, float]:
    """Returns the seconds of a trace's operators by phase, each counted on the side where it runs."""
    host = machine.host if (trace.steps_on_host or trace.waits_on_host) and machine.host else machine
    taken = dict.fromkeys((*PASSES, *STEP), 0.0)
    for (phase, work), times in trace.work.items():
        taken[phase] = taken.get(phase, 0.0) + times * (host if phase in STEP else machine).operator(work)
    return taken


def of_trace(machine: Machine, run: Run, trace: Trace) -> Window:
    """Returns the window of a run that was traced itself, not derived."""
    return window(machine, run, trace, seconds(machine, trace), run.windows.largest)


def window(
    machine: Machine,
    run: Run,
    trace: Trace,
    taken: Mapping[str, float],
    micro_batches: int,
    node: int = NODE,
) -> Window:
    """Computes a window. Args: taken: seconds by phase of the trace's work; forward, backward and sum are of one
    micro-batch, or of the full window if its micro-batches overlap; node: devices per node."""
    alone = _alone(machine, run, trace, taken, micro_batches)
    if not trace.sent:
        return alone
    waits = 0.0
    for (phase, at_once), received in by_phase(trace.sent, node).items():
        hidden = 0.0 if at_once else taken.get(phase.removeprefix(EARLIER), 0.0)
        waits += how_often(phase, micro_batches) * _beyond(hidden, machine.exchange(received))
    return alone._replace(transfers=alone.transfers + waits)


def _alone(machine: Machine, run: Run, trace: Trace, taken: Mapping[str, float], micro_batches: int) -> Window:
    """Computes a window without the exchanges between devices."""
    forward, backward, update = taken["forward"], taken["backward"], taken["update"]
    turns = 1 if run.overlaps else micro_batches
    passes = turns * (forward + backward)
    if machine.link is None:
        update = max(update * pace_of_update(machine, run), _of_drive(run, trace))
        travels = turns * (taken.get(TRAVEL, 0.0) + taken["sum"])
        if run.reads_weights:  # the thread that computes reads them
            travels += (2 * trace.streamed - trace.blocks[1]) * turns / drive_rates(run.drive_folder).read
        return Window(passes, travels, taken["step"] + update)
    offloaded = trace.offloaded / machine.link
    if not trace.steps_on_host:
        travel = trace.gradients / machine.link if trace.waits_on_host else 0.0  # all weights, once
        waits = _beyond(forward, offloaded + travel) + _beyond(backward, offloaded + 2 * travel)
        update += 2 * trace.paged / machine.bandwidth  # no traced operator touches paged state
        return Window(passes, turns * waits, taken["step"] + update)

    element = run.product_bytes
    host, head = machine.host or machine, trace.head * micro_batches // turns
    travel = _gradients(run, trace, micro_batches) / machine.link
    # elements that are copied to the device after a step
    copied = max(0, trace.trained_parameters - (trace.streamed + trace.outside) // element)
    update *= pace_of_update(host, run)
    update += 2 * element * copied / host.bandwidth  # the host reads and writes them again: into the link's slots
    update = max(update, _of_drive(run, trace))
    # When backward begins, the last block is still on the device from the forward pass.
    rate = min(machine.link, drive_rates(run.drive_folder).read) if run.reads_weights else machine.link
    comes = trace.streamed / rate + head / machine.link
    again = max(0, trace.streamed - trace.blocks[1]) / rate + head / machine.link
    forward_takes = max(forward, _both_ways(machine, up=comes, down=offloaded))
    backward_takes = max(backward, _both_ways(machine, up=offloaded + again, down=travel), taken["sum"])
    waits = (forward_takes - forward) + (backward_takes - backward)
    # Backward reaches the embeddings last, and they are most often the largest: nothing hides their update.
    exposed = update * trace.largest_trained / trace.trained_parameters
    back = element * copied / machine.link
    if run.early:
        taken_by_host = taken["sum"] + taken["step"] + update
        moved = _both_ways(machine, up=offloaded + again + back, down=travel)
        step = max(exposed, _beyond(backward_takes, taken_by_host), _beyond(backward_takes, moved))
    else:
        moved = _both_ways(machine, up=comes + back, down=offloaded)
        step = taken["step"] + max(exposed, _beyond(forward_takes, update), _beyond(forward_takes, moved))
    return Window(passes, turns * waits, step)


def _of_drive(run: Run, trace: Trace) -> float:
    """Returns the seconds of a drive, which reads ahead of the update and writes behind it."""
    size = trace.drive.stepped
    return 0.0 if run.drive_folder is None else drive_rates(run.drive_folder).seconds(read=size, written=size)


def _gradients(run: Run, trace: Trace, micro_batches: int) -> int:
    """Returns the bytes of gradients that leave in a backward pass. If the micro-batches of a window pass through a
    block together, its gradients leave once, as sums in fp32."""
    element, in_blocks = run.product_bytes, trace.trained_in_blocks
    if not run.by_layer or micro_batches == 1:
        return element * trace.trained_parameters
    return SUM_BYTES * in_blocks + micro_batches * element * (trace.trained_parameters - in_blocks)


def free_from(machine: Machine, products: str) -> float:
    """Returns the tokens from which streaming weights costs no time, per micro-batch or, with weights.order=by_layer,
    per window: for any model, each weight takes two operations per token of the forward pass, and two bytes over the
    link."""
    return REACHED * machine.rate(products) / machine.link


def _both_ways(machine: Machine, up: float, down: float) -> float:
    """Returns the seconds in which both directions of a link have moved what each would move alone in `up` and `down`
    seconds. While bytes come down at their full rate, those that go up have a share of theirs: on PCIe 4 about half
    (NVIDIA/nvbandwidth issues 11, 15 and 53)."""
    share = 1.0 if machine.against is None else machine.against
    return max(down, up + (1 - share) * down)


def _beyond(hidden: float, needed: float) -> float:
    """Returns the seconds that remain of `needed` after `hidden` seconds of overlap."""
    return max(0.0, needed - hidden)
