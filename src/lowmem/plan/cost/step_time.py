"""Estimates the seconds of an optimizer step: the passes, and the part of copies and update that does not overlap with
them.

Five resources of a machine work at the same time. So a phase takes as long as the busiest resource:

            compute     up (to the card)       down          host           drive
forward     operators   weights                boundaries                   weights (read)
backward    operators   weights, boundaries    gradients     sums           weights (read)
update                  updated weights                      norm, update   masters and state (read, written)

Boundaries are offloaded block inputs. All entries except operators and boundaries apply only to streamed weights, host
masters and CPU offload. If host masters are updated as their gradients arrive (`Run.early`), the norm and the update
overlap with the last backward pass. Otherwise the host computes the norm of all gradients first, and the update
overlaps with the first forward pass of the next window. An update on the card, or on the host with CPU offload, does
not overlap with a pass. On a CPU only the drive works at the same time as other resources. An asynchronous exchange
between devices overlaps with the pass that starts it; the device waits for other exchanges.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lowmem.config.cards import LinkBandwidth
from lowmem.config.settle import Run
from lowmem.plan.cost.machine import COMPUTE, Machine
from lowmem.plan.tracing.traces import WorkTrace
from lowmem.plan.tracing.traffic import EARLIER, NODE, by_phase, how_often

PASSES, STEP = ("forward", "backward"), ("sum", "step", "update")  # phases of a trace's work
TRAVEL = "travel"  # an additional phase of some traces: copies of weights for a pass
SUM_BYTES = 4  # bytes per element of a sum of gradients
REACHED = 0.65  # share of a card's peak FLOP/s that a full pass reaches; published values are 0.5 to 0.9


class WindowTime(NamedTuple):
    """Seconds of a window.

    Args:
        passes: the operators of all forward and backward passes.
        transfers: the part of copies, host work and exchanges in the passes that does not overlap with operators.
        step: the part of gradient norm and update that does not overlap with a pass.
    """

    passes: float
    transfers: float
    step: float

    @property
    def seconds(self) -> float:
        return sum(self)


class Load(NamedTuple):
    """Seconds for which each resource is busy."""

    compute: float = 0.0
    up: float = 0.0
    down: float = 0.0
    host: float = 0.0
    drive: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(*map(sum, zip(self, other, strict=True)))

    def seconds(self, link: LinkBandwidth | None) -> float:
        """Returns the seconds until all resources are done. While the link copies down at its full rate, copies up have
        only the share `link.duplex` of their rate. Without a link all work except the drive's is sequential."""
        if link is None:
            return self.compute + self.up + max(self.host, self.drive)
        return max(*self, self.up + (1 - link.duplex) * self.down)


def of_trace(machine: Machine, run: Run, trace: WorkTrace, node: int = NODE) -> WindowTime:
    """Returns the seconds of the run's largest window. Args: node: devices per node."""
    return window(machine, run, trace, seconds(machine, trace), run.windows.largest, node)


def seconds(machine: Machine, trace: WorkTrace) -> dict[str, float]:
    """Returns the seconds of a trace's operators by phase. Phases in STEP have the rates of the host if the optimizer
    runs on the host; all other work has the rates of the device."""
    host = machine.host if (trace.steps_on_host or trace.waits_on_host) and machine.host else machine
    durations = dict.fromkeys((*PASSES, *STEP), 0.0)
    for (phase, work), times in trace.work.items():
        durations[phase] = durations.get(phase, 0.0) + times * (host if phase in STEP else machine).operator(work)
    return durations


def window(
    machine: Machine, run: Run, trace: WorkTrace, durations: Mapping[str, float], micro_batches: int, node: int = NODE
) -> WindowTime:
    """Returns the seconds of a window.

    Args:
        machine: rates.
        run: the settings.
        trace: the traced work.
        durations: the result of `seconds`. "forward", "backward" and "sum" are for one micro-batch, or for the full
            window if its micro-batches overlap.
        micro_batches: number of micro-batches of the window.
        node: devices per node.
    """
    turns, link = 1 if run.overlaps else micro_batches, machine.link
    forward, backward = _passes(machine, run, trace, durations, micro_batches)
    passes = turns * (forward.compute + backward.compute)
    transfers = turns * (forward.seconds(link) + backward.seconds(link)) - passes
    for (phase, at_once), received in by_phase(trace.sent, node).items():
        hidden = 0.0 if at_once else durations.get(phase.removeprefix(EARLIER), 0.0)
        transfers += how_often(phase, micro_batches) * max(0.0, machine.exchange(received) - hidden)
    return WindowTime(passes, transfers, _step(machine, run, trace, durations, (forward, backward)))


def _passes(
    machine: Machine, run: Run, trace: WorkTrace, durations: Mapping[str, float], micro_batches: int
) -> tuple[Load, Load]:
    """Returns the loads of a forward and of a backward pass. If micro-batches overlap, each load is for the full
    window; otherwise each load is for one micro-batch."""
    up, down = (1 / machine.link.up, 1 / machine.link.down) if machine.link else (0.0, 0.0)
    read = 1 / machine.drive_read if run.reads_weights else 0.0
    boundaries, head = trace.offloaded, trace.head * (micro_batches if run.overlaps else 1)
    again = max(0, trace.streamed - trace.blocks[1])  # the last block is still on the device when backward begins
    gradients = _gradients(run, trace, micro_batches) if trace.steps_on_host else 0
    if trace.waits_on_host and not trace.steps_on_host:  # CPU offload copies all weights for each pass
        head, gradients = head + trace.gradients, trace.gradients
    copied = 0.0 if machine.link else durations.get(TRAVEL, 0.0)  # seconds, for both passes
    forward = Load(durations["forward"], up * (trace.streamed + head) + copied, down * boundaries)
    backward = Load(durations["backward"], up * (boundaries + again + head), down * gradients, durations["sum"])
    return forward._replace(drive=read * trace.streamed), backward._replace(drive=read * again)


def _step(
    machine: Machine, run: Run, trace: WorkTrace, durations: Mapping[str, float], passes: tuple[Load, Load]
) -> float:
    """Returns the seconds that the gradient norm and the update add to a window: the part that does not overlap with a
    pass."""
    norm, update, link = durations["step"], durations["update"], machine.link
    if link is None or trace.steps_on_host or trace.waits_on_host:
        update *= run.technique("optim").cpu_factor
    stepped = trace.drive.stepped if run.drive_folder else 0
    # the update overlaps with reads and writes, but the drive is assumed to read and write in turn
    drive = stepped / machine.drive_read + stepped / machine.drive_written
    if link is None or not trace.steps_on_host:
        # the traced work does not include paged state, which is read and written once
        return norm + max(update, drive) + 2 * trace.paged / machine.bandwidth
    # bytes of updated weights that are copied to the card after the update; streamed weights are copied in the passes
    copied = max(0, run.product_bytes * trace.trained_parameters - trace.streamed - trace.outside)
    update += 2 * copied / (machine.host or machine).bandwidth  # copied by the host into pinned buffers
    load = Load(up=copied / link.up, host=update + norm if run.early else update, drive=drive)
    hides = passes[1] if run.early else passes[0]
    # The backward pass computes the embedding's gradient last, and the embedding is usually the largest weight: its
    # update cannot overlap with a pass.
    exposed = max(update, drive) * trace.largest_trained / trace.trained_parameters
    beyond = (hides + load).seconds(link) - hides.seconds(link)
    return max(exposed, beyond) + (0.0 if run.early else norm)


def _gradients(run: Run, trace: WorkTrace, micro_batches: int) -> int:
    """Returns the bytes of gradients that a backward pass sends to the host. With weights.order=by_layer the gradients
    of a block are sent once per window, as fp32 sums."""
    element, in_blocks = run.product_bytes, trace.trained_in_blocks
    if not run.by_layer or micro_batches == 1:
        return element * trace.trained_parameters
    return SUM_BYTES * in_blocks + micro_batches * element * (trace.trained_parameters - in_blocks)


def free_from(machine: Machine, products: str) -> float:
    """Returns the number of tokens from which streaming weights takes no extra time, per micro-batch or, with
    weights.order=by_layer, per window. In a forward pass, each weight needs two FLOPs per token and is copied over the
    link in 2 bytes.

    The number is for a dense model. For a mixture of experts, divide the result by the share of active weights.
    """
    return REACHED / COMPUTE * machine.rate(products) / machine.link.up
