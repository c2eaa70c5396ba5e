"""Estimates how many seconds an optimizer step takes, from a trace of its work and the rates of a machine. The planner
ranks recipes by this time.

A machine with a card has five resources that work at the same time. So a phase takes as long as its busiest resource
(a copy to the host also slows a simultaneous copy to the card, see `Load.seconds`):

            compute     up (to the card)         down          host           drive
forward     operators   weights                  block inputs                 weights (read)
backward    operators   weights, block inputs    gradients     sums           weights (read)
update                  updated weights                        norm, update   masters, state (read, written)

Block inputs are copied if activation checkpointing offloads them. All entries except operators and block inputs apply
only to streamed weights, host masters and CPU offload. The drive is used only with weights.drive. With
weights.drive_holds=all, the 16-bit weights are also on the drive: passes read them, and the update reads and writes
them.

- With early updates of host masters (`Run.early`), the norm and the update overlap with the last backward pass.
- With host masters but without early updates, the host first computes the norm of all gradients. Then the update
  overlaps with the first forward pass of the next window.
- An update on the card, or on the host with CPU offload, does not overlap with a pass.
- If the device is a CPU, only two resources overlap with each other: the host (sums and updates) and the drive (reads
  and writes). All other work is sequential.
- An asynchronous exchange between devices overlaps with the pass that starts it. During a synchronous exchange, the
  device waits.
"""

from collections.abc import Mapping
from typing import NamedTuple

from lowmem.config.cards import LinkBandwidth
from lowmem.config.settle import Run
from lowmem.plan.cost.machine import COMPUTE, Machine
from lowmem.plan.tracing.traces import WorkTrace
from lowmem.plan.tracing.traffic import EARLIER, NODE, by_phase, how_often

PASSES, STEP = ("forward", "backward"), ("sum", "step", "update")  # phases in the work of a trace
TRAVEL = "travel"  # phase in the work of some traces: copies between host and device, for example of streamed weights
SUM_BYTES = 4  # bytes per element of summed gradients (fp32)
REACHED = 0.65  # share of a card's peak FLOP/s that forward and backward reach (published: 0.5 to 0.9)


class WindowTime(NamedTuple):
    """Estimated seconds of a window.

    Args:
        passes: the time of the operators of all forward and backward passes.
        transfers: the time of copies, host work and exchanges during the passes, without the part that overlaps with
            operators.
        step: the time of gradient norm and update, without the part that overlaps with a pass.
    """

    passes: float
    transfers: float
    step: float

    @property
    def seconds(self) -> float:
        return sum(self)


class Load(NamedTuple):
    """Seconds for which each resource is busy during a phase."""

    compute: float = 0.0
    up: float = 0.0
    down: float = 0.0
    host: float = 0.0
    drive: float = 0.0

    def __add__(self, other: "Load") -> "Load":
        return Load(*map(sum, zip(self, other, strict=True)))

    def seconds(self, link: LinkBandwidth | None) -> float:
        """Returns the seconds until all resources have finished. While the link copies to the host, copies to the card
        reach only the share `link.duplex` of their full rate. Without a link, the device is a CPU: `down` is ignored,
        and only the host and the drive overlap with each other."""
        if link is None:
            return self.compute + self.up + max(self.host, self.drive)
        return max(*self, self.up + (1 - link.duplex) * self.down)


def of_trace(machine: Machine, run: Run, trace: WorkTrace, node: int = NODE) -> WindowTime:
    """Returns the time of the run's largest window. Args: node: devices per node."""
    return window(machine, run, trace, seconds(machine, trace), run.windows.largest, node)


def seconds(machine: Machine, trace: WorkTrace) -> dict[str, float]:
    """Returns the seconds of a trace's operators in each phase. If the optimizer runs on the host, the seconds of the
    phases in STEP follow from the host's rates. All other seconds follow from the device's rates."""
    host = machine.host if (trace.steps_on_host or trace.waits_on_host) and machine.host else machine
    durations = dict.fromkeys((*PASSES, *STEP), 0.0)
    for (phase, work), times in trace.work.items():
        durations[phase] = durations.get(phase, 0.0) + times * (host if phase in STEP else machine).operator(work)
    return durations


def window(
    machine: Machine, run: Run, trace: WorkTrace, durations: Mapping[str, float], micro_batches: int, node: int = NODE
) -> WindowTime:
    """Returns the time of a window.

    Args:
        machine: the rates.
        run: the settings.
        trace: the traced work.
        durations: the result of `seconds`. The phases "forward", "backward" and "sum" are for one micro-batch, or for
            the full window if micro-batches overlap (`Run.overlaps`).
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
    """Returns the loads of a forward pass and of a backward pass: for the full window if micro-batches overlap,
    otherwise for one micro-batch."""
    up, down = (1 / machine.link.up, 1 / machine.link.down) if machine.link else (0.0, 0.0)
    read = 1 / machine.drive_read if run.reads_weights else 0.0
    boundaries, head = trace.offloaded, trace.head * (micro_batches if run.overlaps else 1)
    again = max(0, trace.streamed - trace.blocks[1])  # backward begins with the last block, still on the device
    gradients = _gradients(run, trace, micro_batches) if trace.steps_on_host else 0
    if trace.waits_on_host and not trace.steps_on_host:  # CPU offload copies all weights for each pass
        head, gradients = head + trace.gradients, trace.gradients
    copied = 0.0 if machine.link else durations.get(TRAVEL, 0.0)  # seconds of both passes together
    forward = Load(durations["forward"], up * (trace.streamed + head) + copied, down * boundaries)
    backward = Load(durations["backward"], up * (boundaries + again + head), down * gradients, durations["sum"])
    return forward._replace(drive=read * trace.streamed), backward._replace(drive=read * again)


def _step(
    machine: Machine, run: Run, trace: WorkTrace, durations: Mapping[str, float], passes: tuple[Load, Load]
) -> float:
    """Returns the seconds of gradient norm and update that do not overlap with a pass. Args: passes: the result of
    `_passes`."""
    norm, update, link = durations["step"], durations["update"], machine.link
    if link is None or trace.steps_on_host or trace.waits_on_host:
        update *= run.technique("optim").cpu_factor
    stepped = trace.drive.stepped if run.drive_folder else 0
    # the update overlaps with the drive's accesses, but the drive is assumed not to read and write at the same time
    drive = stepped / machine.drive_read + stepped / machine.drive_written
    if link is None or not trace.steps_on_host:
        # paged state is not in the traced work; the update reads and writes the full paged state once
        return norm + max(update, drive) + 2 * trace.paged / machine.bandwidth
    # bytes that are copied to the card after the update: the resident weights (passes copy streamed weights)
    copied = max(0, run.product_bytes * trace.trained_parameters - trace.streamed - trace.outside)
    update += 2 * copied / (machine.host or machine).bandwidth  # the host copies the weights into pinned buffers
    load = Load(up=copied / link.up, host=update + norm if run.early else update, drive=drive)
    hides = passes[1] if run.early else passes[0]
    # The update of the embedding cannot overlap with the backward pass, which computes the embedding's gradient last,
    # or with the next forward pass, which needs the embedding first. The largest weight is assumed to be the embedding.
    exposed = max(update, drive) * trace.largest_trained / trace.trained_parameters
    beyond = (hides + load).seconds(link) - hides.seconds(link)
    return max(exposed, beyond) + (0.0 if run.early else norm)


def _gradients(run: Run, trace: WorkTrace, micro_batches: int) -> int:
    """Returns the bytes of gradients that a backward pass copies to the host. With weights.order=by_layer, returns the
    bytes that all backward passes of a window copy: in a window of several micro-batches, the gradients of each block
    are summed on the card in fp32, and only the sums are copied. Gradients of other weights are copied for each
    micro-batch."""
    element, in_blocks = run.product_bytes, trace.trained_in_blocks
    if not run.by_layer or micro_batches == 1:
        return element * trace.trained_parameters
    return SUM_BYTES * in_blocks + micro_batches * element * (trace.trained_parameters - in_blocks)


def free_from(machine: Machine, products: str) -> float:
    """Returns the smallest number of tokens per micro-batch (with weights.order=by_layer, per window) with which
    streamed weights cost no extra time. In a forward pass, each parameter takes 2 FLOPs per token, and its 2 bytes are
    copied to the card once.

    For a mixture of experts, divide the result by the share of active parameters.

    Args:
        machine: a machine with a `link`.
        products: dtype of matrix products.

    Raises:
        Refused: see `Machine.rate`.
    """
    return REACHED / COMPUTE * machine.rate(products) / machine.link.up
