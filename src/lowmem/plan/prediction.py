"""Predicts the memory that a run needs on the device, on the host and on a drive, from a trace of the run on fake
tensors. `predict` is called when a run starts (`at_start.py`), by plan.py (`job.py`), and for the recipes of a search
(`search/recipes.py`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter

from lowmem.config.cards import COMMUNICATOR
from lowmem.config.declarations import choice
from lowmem.config.settle import Run
from lowmem.plan.column import DeviceBytes, DriveBytes, HostBytes
from lowmem.plan.cost.allocator import Allocator, replay, smallest_limit
from lowmem.plan.host_bytes import by_row, host_phases, mapped, of_host
from lowmem.plan.target import Target
from lowmem.plan.tracing.elsewhere import NotTraced
from lowmem.plan.tracing.trace import trace, untraceable
from lowmem.plan.tracing.traces import Trace
from lowmem.plan.tracing.traffic import NOTHING, Traffic, of_window
from lowmem.system import process
from lowmem.system.errors import Refused

COMPILED = "compiled blocks cannot be traced, so this plan is for compile=none, which stores more."
PHASES = ("load", "forward", "backward", "step", "evaluation", "save", "resume")
TRACED = ("forward", "backward", "step", "evaluation")
# Extrapolated traces (`search/extend.py`) have no allocations to replay. So two sizes are estimated as multiples of the
# allocated peak: the bytes that torch reserves (RESERVED), and the smallest number of bytes that torch must be able to
# reserve (LEAST_RESERVED). Full traces of seventeen recipes (four models) had factors of 1.03 to 1.20 for RESERVED, and
# of 1.00 to 1.07 for LEAST_RESERVED. For peaks below 1 GiB, where segments of 20 MiB are coarse, the factors for
# LEAST_RESERVED were up to 1.11.
RESERVED, LEAST_RESERVED = 1.1, 1.07


class NotPredicted(Refused):
    """The run cannot be traced, so its memory cannot be predicted. Args: why: the reason, a sentence that begins with a
    lowercase letter."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The memory of this run cannot be predicted: {why} Type plan=off memory.limit=10GiB (or another limit) to "
            "train without a prediction."
        )


@dataclass(frozen=True)
class Need:
    """Predicted peak bytes of one phase in one process. The run's summary compares both peaks with measurements."""

    device: int
    host: int  # resident memory of the process; on a CPU it includes `device`


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a run, in bytes."""

    phases: Mapping[str, Need]
    device: DeviceBytes
    host: HostBytes
    drive: DriveBytes
    reserved: int  # bytes that torch's caching allocator reserves if the card has enough room; 0 on a CPU
    parameters: int
    on_card: bool
    estimate: str | None = None  # why the prediction is only an estimate; None: it is not an estimate
    # why training uses the math kernel of attention, and which override helps; None: it does not
    advice: str | None = None
    trace: Trace | None = None  # input of `cost/step_time.py`, which estimates the time
    mapped: int = 0  # bytes of memory-mapped weight files: resident while loading, dropped if memory is short
    paged: int = 0  # bytes of optimizer state that CUDA pages: on the card if there is room, otherwise on the host
    paged_on_host: int = 0  # the part of `paged` that does not fit on the target's card
    # Bytes read from the drive per optimizer step, with the largest window of the run. The update reads all data on the
    # drive that it changes. With weights.drive_holds=all, forward and backward passes also read the 16-bit weights of
    # the blocks.
    drive_read: int = 0
    drive_written: int = 0  # bytes written to the drive per optimizer step
    devices: int = 1  # number of devices; `device` is for the device that needs the most memory
    node: int = 1  # maximum number of devices per host
    traffic: Traffic = NOTHING  # bytes that a device receives from other devices in a step with the largest window
    extended: bool = False  # the trace was extrapolated from traces of short models

    @property
    def on_host(self) -> int:
        """Returns the number of processes per host."""
        return min(self.devices, self.node)

    @property
    def allocated(self) -> int:
        """Returns the highest predicted number of allocated device bytes, for comparison with the measured peak."""
        return self.phases[self.device.phase].device

    def based_on(self, libraries: int) -> "Prediction":
        """Returns a copy in which the host memory of Python and its libraries has a measured value. Args: libraries:
        measured resident bytes of one process before its model is built."""
        more = libraries - self.host.libraries // self.on_host
        phases = {name: Need(need.device, need.host + more) for name, need in self.phases.items()}
        return replace(self, phases=phases, host=self.host.plus(libraries=self.on_host * more))

    def fits(self, target: Target) -> bool:
        sizes = (target.device_memory, target.host_memory, target.drive and target.drive.size)
        needs = (self.device.total, self.host.total, self.drive.total)
        return all(size is None or need <= size for need, size in zip(needs, sizes, strict=True))

    def as_dict(self) -> dict:
        return {
            "device": self.device.as_dict(),
            "host": self.host.as_dict(),
            "drive": self.drive.as_dict(),
            "allocated": self.allocated,
            "reserved": self.reserved,
            "paged_bytes": self.paged,
            "drive_bytes_per_step": {"read": self.drive_read, "written": self.drive_written},
            "phases": {name: asdict(need) for name, need in self.phases.items()},
            "parameters": self.parameters,
            "devices": self.devices,
            "devices_of_a_host": self.on_host,
            "exchanged_bytes_per_step": {k: round(v) for k, v in self.traffic._asdict().items()},
            "estimate": self.estimate,
            "advice": self.advice,
        }


def predict(
    run: Run, target: Target, other: Callable[..., Trace] | None = None, libraries: int | None = None
) -> Prediction:
    """Predicts the memory of a run; with several devices, for the device that needs the most.

    Args:
        run: resolved settings, with a number for batch_size.
        target: the device, host and drive.
        other: a function that is called instead of `trace`, with the arguments of `trace`.
        libraries: resident bytes of a process after its imports, before the model is built; None: the resident bytes of
            this process now.

    Raises:
        NotPredicted: the model cannot be traced, or `other` has raised NotTraced.
        Refused: see `trace`.
        Exception: a bug in lowmem, see `untraceable`.
    """
    compiled, libraries = run.compiles_blocks, process.rss_bytes() if libraries is None else libraries
    if compiled:
        run = run.replacing("compile", choice("compile", "none") | {"declares": {"generates_code": True}})
    traces = partial(other or trace, run, on_card=target.on_card, capability=target.capability)
    with not_predicted():
        rank_0 = traces()
        by_rank = [rank_0, *(traces(rank=rank) for rank in rank_0.neediest if rank)]
    needed = (needs(traced, run, target, libraries) for traced in by_rank)
    most = max(needed, key=attrgetter("device.total"))
    return replace(most, estimate=COMPILED) if compiled else most


@contextmanager
def not_predicted() -> Iterator[None]:
    """Converts an error of tracing to `NotPredicted`, except `Refused`. Raises: Exception: a bug in lowmem, see
    `untraceable`."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise NotPredicted(str(error) if isinstance(error, NotTraced) else untraceable(error)) from error


def needs(trace: Trace, run: Run, target: Target, libraries: int) -> Prediction:
    """Computes the memory of a run from the trace of one rank. Args: trace: the trace; run, target, libraries: see
    `predict`."""
    on_card = target.on_card
    free = replay(trace.events) if on_card and trace.events else None
    in_flight = _in_flight(trace, run) if on_card else 0
    phases = _device_phases(trace, on_card, in_flight, free)
    peak = max(phases.values(), key=attrgetter("total"))
    reserved, least = _by_the_allocator(trace, free, peak.total, in_flight) if on_card else (0, peak.total)
    context = target.context_bytes + _communicators(trace, run) if on_card else 0
    paged_on_host = pages_on_host(trace.paged, reserved + context, target.device_memory)
    on_host, pages = host_phases(trace, run, phases, on_card, libraries), mapped(run, trace.parameters)
    first = on_host["load"].weights - (0 if on_card else trace.weights) if run.loads_once else 0
    on_drive = run.drive_folder is not None
    windows = run.windows if run.several else None
    return Prediction(
        phases={n: Need(phases[n].total, on_host[n].total + (pages if n == "load" else 0)) for n in PHASES},
        device=_device(peak, in_flight, least).plus(context=context),
        host=of_host(on_host, min(run.devices, target.node), first, paged_on_host),
        drive=DriveBytes(trace.drive.files - trace.drive.weights, trace.drive.weights) if on_drive else DriveBytes(),
        reserved=reserved,
        parameters=trace.parameters,
        on_card=on_card,
        advice=trace.advice,
        trace=replace(trace, events=[], places={}),
        mapped=pages,
        paged=trace.paged,
        paged_on_host=paged_on_host,
        drive_read=trace.drive.stepped + read_by_passes(run, trace) if on_drive else 0,
        drive_written=trace.drive.stepped if on_drive else 0,
        estimate=trace.estimate,
        devices=run.devices,
        node=target.node,
        traffic=of_window(
            trace.sent, windows.largest if windows and not run.strategy_class.overlaps_micro_batches else 1, target.node
        ),
        extended=not trace.events,
    )


def _in_flight(trace: Trace, run: Run) -> int:
    """Returns how many bytes of card memory the tensors in flight take: with host masters, gradients on their way to
    the host; with CPU offload, gradients on their way to the host and weights on their way to the card. Returns 0 for
    all other runs."""
    if trace.waits_on_host:  # CPU offload: the weights and the gradients of one block
        return 2 * trace.blocks[1]
    if not trace.steps_on_host:
        return 0
    return trace.leaves + trace.ahead if trace.streamed else trace.largest_trained * run.product_bytes


def _device_phases(trace: Trace, on_card: bool, in_flight: int, free: Allocator | None) -> dict[str, DeviceBytes]:
    """Returns the allocated device memory of each phase at its peak. Args: in_flight: the result of `_in_flight`; free:
    see `_beside_tensors`."""
    traced = {name: DeviceBytes(name, **by_row(trace.phases[name].bytes)) for name in TRACED}
    scratch = 0 if trace.steps_on_host or trace.waits_on_host or not on_card else trace.unseen
    traced["backward"] = traced["backward"].plus(in_flight=in_flight)
    traced["step"] = traced["step"].plus(temporaries=scratch)
    resting = DeviceBytes("save", trace.weights, optimizer=traced["evaluation"].optimizer)  # memory between two steps
    if on_card:
        resting = resting.plus(workspaces=trace.workspace)
        traced = {name: phase.plus(**_beside_tensors(trace, free)) for name, phase in traced.items()}
    return {
        "load": DeviceBytes("load", trace.weights),
        **traced,
        "save": resting,
        "resume": replace(resting, phase="resume"),
    }


def _device(peak: DeviceBytes, in_flight: int, least: int) -> DeviceBytes:
    """Returns the device's report without the CUDA context: the rows of the highest peak, and as many added bytes as it
    takes to reach a sum of `least`. The added bytes are copies in flight (up to `in_flight` in total) and fragments.

    Args:
        peak: the phase with the highest peak.
        in_flight: the result of `_in_flight`.
        least: the smallest number of bytes that torch must be able to reserve.
    """
    more = min(in_flight - peak.in_flight, least - peak.total)
    return peak.plus(in_flight=more, fragments=least - peak.total - more)


def _communicators(trace: Trace, run: Run) -> int:
    """Returns the bytes of device memory of NCCL's communicators, which torch's allocator does not count; 0 for one
    device. Each process group creates a communicator at its first collective."""
    groups = {sent.ranks for _, sent in trace.sent} or {None}  # an untraced strategy has one group
    return len(groups) * COMMUNICATOR if run.devices > 1 else 0


def read_by_passes(run: Run, trace: Trace) -> int:
    """Returns the bytes of 16-bit weights that the forward and backward passes of a window read from a drive; 0 if the
    16-bit weights are not on a drive. Each pass except the first begins with the block with which the previous pass of
    the window ended. This block is still on the device, so it is not read again."""
    if not run.reads_weights:
        return 0
    turns, block = 1 if run.overlaps else run.windows.largest, trace.blocks[1]
    return 2 * turns * (trace.streamed - block) + block


def pages_on_host(paged: int, in_use: int, gpu: int | None) -> int:
    """Returns the bytes of paged optimizer state that do not fit on the card.

    When torch reserves memory on a full card, CUDA moves pages of this state to the host. So paged state never makes
    torch release cached segments.

    Args:
        paged: bytes of paged state.
        in_use: bytes of torch's reserved memory and of the CUDA context.
        gpu: bytes of the card's memory; None: unlimited.
    """
    return 0 if gpu is None else min(paged, max(0, paged + in_use - gpu))


def _beside_tensors(trace: Trace, free: Allocator | None) -> dict[str, int]:
    """Returns the bytes that torch's caching allocator counts as allocated in addition to tensors, by row of the
    report: cuBLAS workspaces, and the unused ends of blocks, which are too small to be split off. Args: free: an
    allocator without a limit, after a replay of the trace's events; None: the trace has no events."""
    tensors = max(trace.phases[name].total for name in ("forward", "backward", "step"))
    rests = 0 if free is None else max(0, free.allocated_peak - tensors - trace.workspace)
    return {"workspaces": trace.workspace, "fragments": rests}


def _by_the_allocator(trace: Trace, free: Allocator | None, device_peak: int, leaving: int) -> tuple[int, int]:
    """Returns two sizes in bytes: the memory that torch reserves if the card has enough room, and the smallest amount
    of memory that torch must be able to reserve.

    Args:
        free: see `_beside_tensors`.
        device_peak: bytes of the highest peak of all phases.
        leaving: the result of `_in_flight`.
    """
    if free is None:
        return round(device_peak * RESERVED), round(device_peak * LEAST_RESERVED)
    # The events do not contain temporary memory inside compiled code, so `device_peak` may be higher.
    smallest = smallest_limit(trace.events, free)
    return max(free.reserved + leaving, device_peak), max(smallest + leaving, device_peak)
