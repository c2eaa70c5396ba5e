"""Computes from a trace how much memory a run needs, on the device, on its host and on a drive."""

from collections.abc import Callable, Mapping
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

COMPILED = "compiled blocks cannot be traced. They store less than compile=none would, which is counted."
PHASES = ("load", "forward", "backward", "step", "evaluation", "save", "resume")
TRACED = ("forward", "backward", "step", "evaluation")
# The single allocations of an extended trace are not known. Its reserved bytes, and the least that must be reserved,
# are taken as these multiples of the peak that is allocated. In seventeen traced recipes of four models they were 1.03
# to 1.20, and 1.00 to 1.07; below a GiB, where segments of 20 MiB are coarse, up to 1.11.
RESERVED, LEAST_RESERVED = 1.1, 1.07


class NotPredicted(Refused):
    """The model cannot be traced. Args: why: a sentence, without its capital."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The memory of this run cannot be predicted: {why} Type plan=off memory.limit=10GiB (or another limit) to "
            "train without a prediction."
        )


@dataclass(frozen=True)
class Need:
    """Holds the peak bytes of one phase, as a run measures them in one process."""

    device: int
    host: int  # resident memory of the process; on a CPU this includes the device's bytes


@dataclass(frozen=True)
class Prediction:
    """Holds the memory that a run needs, in bytes."""

    phases: Mapping[str, Need]
    device: DeviceBytes
    host: HostBytes
    drive: DriveBytes
    reserved: int  # reserved by CUDA's allocator if there is room; 0 on a CPU
    parameters: int
    on_card: bool
    estimate: str | None = None  # why this is only an estimate
    advice: str | None = None  # what to type if attention takes the math kernel
    trace: Trace | None = None  # its work tells the time
    mapped: int = 0  # bytes of files while they are loaded: resident in that phase, and given up if memory is short
    paged: int = 0  # bytes of optimizer state that CUDA moves: to the card if there is room, else to the host
    paged_on_host: int = 0  # of these, bytes for which the target's card has no room
    drive_read: int = 0  # bytes that a step reads: what it changes, and 16-bit weights on the drive also for each pass
    drive_written: int = 0  # bytes that a step writes: what it changes
    devices: int = 1  # devices of the run; `device` is for the one that needs most
    node: int = 1  # at most so many of them share a host
    traffic: Traffic = NOTHING  # what a device receives in an optimizer step
    extended: bool = False  # from traces of a few blocks

    @property
    def on_host(self) -> int:
        """Returns how many processes share a host."""
        return min(self.devices, self.node)

    @property
    def allocated(self) -> int:
        """Returns the highest bytes that torch has allocated, as a run measures them."""
        return self.phases[self.device.phase].device

    def based_on(self, libraries: int) -> "Prediction":
        """Returns the prediction with `libraries` bytes measured, not predicted, before the model was built."""
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
    """Predicts the needs of the device that needs most.

    Args: run: resolved, with a number for batch_size; other: called instead of `trace`, with its arguments; libraries:
    resident bytes of a process that has imported what the run will import; None: the bytes of this process.

    Raises:
        NotPredicted: the model cannot be traced.
        Refused: the run itself would be refused for the same reason.
    """
    compiled, libraries = run.compiles_blocks, process.rss_bytes() if libraries is None else libraries
    if compiled:
        run = run.replacing("compile", choice("compile", "none") | {"declares": {"compiles_blocks": True}})
    traces = partial(other or trace, run, on_card=target.on_card, capability=target.capability)
    try:
        rank_0 = traces()
        by_rank = [rank_0, *(traces(rank=rank) for rank in rank_0.neediest if rank)]
    except Refused:
        raise
    except Exception as error:
        raise NotPredicted(str(error) if isinstance(error, NotTraced) else untraceable(error)) from error
    needed = (needs(traced, run, target, libraries) for traced in by_rank)
    most = max(needed, key=attrgetter("device.total"))
    return replace(most, estimate=COMPILED) if compiled else most


def needs(trace: Trace, run: Run, target: Target, libraries: int) -> Prediction:
    """Computes the needs of a traced run. Args: libraries: resident bytes after imports, before anything is built."""
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
    """Returns the bytes on a card of what is being copied: gradients to the host, or shards in both directions."""
    if trace.waits_on_host:  # a block's shard on its way to the card, and its gradient's on the way back
        return 2 * trace.blocks[1]
    if not trace.steps_on_host:
        return 0
    return trace.leaves + trace.ahead if trace.streamed else trace.largest_trained * run.product_bytes


def _device_phases(trace: Trace, on_card: bool, in_flight: int, free: Allocator | None) -> dict[str, DeviceBytes]:
    """Returns the bytes that torch has allocated at the peak of each phase. Args: free: see `_beside_tensors`."""
    traced = {name: DeviceBytes(name, **by_row(trace.phases[name].bytes)) for name in TRACED}
    scratch = 0 if trace.steps_on_host or trace.waits_on_host or not on_card else trace.unseen
    traced["backward"] = traced["backward"].plus(in_flight=in_flight)
    traced["step"] = traced["step"].plus(temporaries=scratch)
    resting = DeviceBytes("save", trace.weights, optimizer=traced["evaluation"].optimizer)  # between two windows
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
    """Returns the device's column without the context. Args: least: bytes that torch must be able to reserve."""
    more = min(in_flight - peak.in_flight, least - peak.total)
    return peak.plus(in_flight=more, fragments=least - peak.total - more)


def _communicators(trace: Trace, run: Run) -> int:
    """Returns NCCL's bytes, which torch does not count: each process group allocates them at its first exchange."""
    groups = {sent.ranks for _, sent in trace.sent} or {None}  # an engine that was not traced has at least one group
    return len(groups) * COMMUNICATOR if run.devices > 1 else 0


def read_by_passes(run: Run, trace: Trace) -> int:
    """Returns the bytes of 16-bit weights that the passes of a window read from a drive. When backward begins, the last
    block is still on the device, and when the next micro-batch begins, the first is."""
    if not run.reads_weights:
        return 0
    turns, block = 1 if run.overlaps else run.windows.largest, trace.blocks[1]
    return 2 * turns * (trace.streamed - block) + block


def pages_on_host(paged: int, taken: int, gpu: int | None) -> int:
    """Returns the bytes of paged state for which a card of `gpu` bytes has no room; None: there is always room.

    Pages leave when torch asks for memory, so torch never has to give back idle segments for them. Args: taken: bytes
    that torch reserves, and the context.
    """
    return 0 if gpu is None else min(paged, max(0, paged + taken - gpu))


def _beside_tensors(trace: Trace, free: Allocator | None) -> dict[str, int]:
    """Returns the bytes that CUDA's allocator counts as allocated besides tensors: cuBLAS's workspaces, and rests of
    blocks that are too small to be divided from them. Args: free: the replayed allocator; None: no event is known."""
    tensors = max(trace.phases[name].total for name in ("forward", "backward", "step"))
    rests = 0 if free is None else max(0, free.allocated_peak - tensors - trace.workspace)
    return {"workspaces": trace.workspace, "fragments": rests}


def _by_the_allocator(trace: Trace, free: Allocator | None, device_peak: int, leaving: int) -> tuple[int, int]:
    """Returns (bytes reserved if there is room, the least bytes that must be reserved)."""
    if free is None:
        return round(device_peak * RESERVED), round(device_peak * LEAST_RESERVED)
    # The events lack the scratch of generated code, hence the comparison with the peak.
    smallest = smallest_limit(trace.events, free)
    return max(free.reserved + leaving, device_peak), max(smallest + leaving, device_peak)
