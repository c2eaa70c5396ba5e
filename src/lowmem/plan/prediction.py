"""Computes from a trace how much memory a run needs, on the device, on its host and on a drive."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lowmem.config.cards import COMMUNICATOR
from lowmem.config.declarations import choice
from lowmem.config.settle import Run
from lowmem.data.opening import source_class
from lowmem.memory.tracker import Point
from lowmem.model.blocks import stack_of
from lowmem.model.loading import describe
from lowmem.model.trainable import packed, parameters, trainable
from lowmem.offload.drive import Sizes
from lowmem.plan.column import DeviceBytes, DriveBytes, HostBytes
from lowmem.plan.cost.allocator import Allocator, replay, smallest_limit
from lowmem.plan.host_bytes import by_row, host_phases, mapped, of_host
from lowmem.plan.target import Target
from lowmem.plan.tracing.as_card import workspaces
from lowmem.plan.tracing.elsewhere import NotTraced
from lowmem.plan.tracing.stand_in import state_bytes_per_parameter
from lowmem.plan.tracing.trace import Trace, trace, untraceable
from lowmem.plan.tracing.traffic import NOTHING, Traffic, of_window
from lowmem.system import process
from lowmem.system.errors import Refused
from lowmem.system.units import CATEGORIES, HOST_CATEGORIES
from lowmem.techniques.optim.build import PAGED_FROM
from lowmem.training import build

COMPILED = "compiled blocks cannot be traced. They store less than compile=none would, which is counted."
PHASES = ("load", "forward", "backward", "step", "evaluation", "save", "resume")
TRACED = ("forward", "backward", "step", "evaluation")
# The single allocations of a derived recipe are not known. Its reserved bytes, and the least that must be reserved, are
# taken as these multiples of the peak that is allocated. In seventeen traced recipes of four models they were 1.03 to
# 1.20, and 1.00 to 1.07; below a GiB, where segments of 20 MiB are coarse, up to 1.11.
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


def predict(run: Run, target: Target, other: Callable[..., Trace] | None = None) -> Prediction:
    """Predicts the needs of the device that needs most.

    Args: run: resolved, with a number for batch_size; other: traces instead of `trace`, in another process.

    Raises:
        NotPredicted: the model cannot be traced.
        Refused: the run itself would be refused for the same reason.
    """
    compiled, libraries = run.any("compiles_blocks"), process.rss_bytes()  # imported is what the run will import
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
            trace.sent, windows.largest if windows and not run.any("overlaps_micro_batches") else 1, target.node
        ),
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


def outline(run: Run, target: Target) -> Trace:
    """Estimates a model that cannot be traced: counts weights, gradients and state, divided as the strategy divides
    them, and the activations of a transformer of the same dimensions."""
    on_card = target.on_card
    config = describe(run, plans=True).grown
    text = config.get_text_config(decoder=True)
    network = outlined(run, config)
    every, own = list(network.parameters()), [p for _, p in trainable(network)]
    sizes, buffers = [p.numel() for p in own], sum(buffer.nbytes for buffer in network.buffers())
    element = run.product_bytes
    count, narrow = sum(sizes), element * sum(p.numel() for p in every)
    on_host = run.masters
    streamed = [element * sum(p.numel() for p in block.parameters()) for block in stack_of(network) if run.streams]
    narrow += run.weights.arguments.get("slots", 0) * max(streamed, default=0) - sum(streamed)
    rate, pageable = state_bytes_per_parameter(build.optimizer(run))
    paged = round(pageable * sum(n for n in sizes if n >= PAGED_FROM)) if on_card else 0
    weights = buffers + (narrow if on_host else sum(p.nbytes for p in every))
    state = round(count * rate) - paged
    gradients = 0 if on_host else sum(p.nbytes for p in own)
    rows = source_class(run.data.target).example(run.data.arguments, run.batch_size, 1).input_ids
    tokens, layers = len(rows) * run.seq_len, getattr(text, "num_hidden_layers", 1)
    if run.saves_parts:
        weights, gradients, state = (size // run.devices for size in (weights, gradients, state))
    feature_bytes = tokens * element
    boundary = feature_bytes * getattr(text, "hidden_size", 1024)
    blocks = 1 if run.technique("gradient_checkpointing").saves else layers
    columns = min(text.vocab_size, run.loss.arguments.get("columns", text.vocab_size))
    logits = 3 * 4 * min(tokens, run.loss.arguments.get("rows", tokens)) * columns
    activations = boundary * layers + feature_bytes * _kept_per_token(text) * blocks + logits
    master = getattr(torch, run.weights_dtype).itemsize
    host = dict.fromkeys(HOST_CATEGORIES, 0)
    if on_host:
        sums = count * (4 if run.accumulates else element)
        host |= {"masters": count * master, "gradients": sums, "optimizer": state}
    beside = count * (master - element) + state if run.streams else 0
    if run.any("offloads"):  # shards wait and are stepped on the host
        host |= {"weights": weights, "gradients": gradients, "optimizer": state}
        weights, gradients, state = 0, 0, 0

    def point(phase: str, gradients: int, activations: int) -> Point:
        by_category = {"weights": weights, "gradients": gradients, "optimizer": 0 if on_host else state}
        return Point(phase, dict.fromkeys(CATEGORIES, 0) | by_category | {"activations": activations}, host)

    phases = {name: point(name, gradients, activations) for name in ("forward", "backward")}
    phases |= {"step": point("step", gradients, 0), "evaluation": point("evaluation", 0, boundary + logits)}
    return Trace(
        parameters=parameters(network),
        largest=max(*(p.numel() for p in every), *packed(network)),
        trained_parameters=count,
        largest_trained=max(sizes),
        weights=weights,
        gradients=gradients,
        steps_on_host=on_host,
        phases=phases,
        paged=paged,
        workspace=sum(workspaces(run, target.capability)) if on_card else 0,
        host_bytes=count * master if on_host else 0,
        streamed=sum(streamed),
        drive=Sizes(beside, beside, 2 * beside // layers, beside),  # parts of two blocks are in memory
    )


def outlined(run: Run, config: PretrainedConfig) -> PreTrainedModel:
    """Returns the run's model without memory or numbers, with the same parameters frozen."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, run.loaded_in))
        build.choose_trained(run, network)
    return network


def _kept_per_token(text: PretrainedConfig) -> int:
    """Returns the elements that a block keeps for each token, as Korthikanti et al. 2022 count them (arXiv 2205.05198).

    Outside the MLP they are 9 x hidden. Inside an MLP with a gate they are four times its width, for each of a token's
    experts, plus the input and output of each expert.
    """
    hidden = getattr(text, "hidden_size", 1024)
    sizes = (getattr(text, key, None) for key in ("moe_intermediate_size", "intermediate_size", "n_inner"))
    width = next((size for size in sizes if isinstance(size, int)), 4 * hidden)
    used = (getattr(text, key, None) for key in ("num_experts_per_tok", "moe_topk", "top_k"))
    experts = next((count for count in used if isinstance(count, int)), 0)
    return 9 * hidden + max(1, experts) * 4 * width + 2 * experts * hidden
