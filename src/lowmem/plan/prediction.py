"""Computes from a trace how much memory a run needs, phase by phase, on the device and on the host."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lowmem.config.cards import COMMUNICATOR
from lowmem.config.declarations import choice
from lowmem.config.settle import Run
from lowmem.data.opening import source_class
from lowmem.memory.tracker import Point
from lowmem.model.blocks import stack_of
from lowmem.model.loading import describe, read_in, stored_in, stored_narrower
from lowmem.model.trainable import packed, parameters, trainable
from lowmem.offload.drive import Sizes
from lowmem.offload.link import SLOT_BYTES, SLOTS
from lowmem.plan.cost.allocator import Allocator, replay, smallest_limit
from lowmem.plan.target import Target
from lowmem.plan.tracing.as_card import workspaces
from lowmem.plan.tracing.elsewhere import NotTraced
from lowmem.plan.tracing.stand_in import state_bytes_per_parameter
from lowmem.plan.tracing.trace import Trace, trace, untraceable
from lowmem.plan.tracing.traffic import NOTHING, Traffic, of_window
from lowmem.saving.export import FILE_BYTES
from lowmem.system import process
from lowmem.system.errors import Refused
from lowmem.system.units import CATEGORIES, GIB, MIB
from lowmem.techniques.optim.build import PAGED_FROM
from lowmem.training import build

BY_HOST = ("load", "save", "resume")  # phases without paged state, or with all of it read or written by the host
OUTLINED = (
    "This counts a transformer of the same widths, which in small runs was from a third too little to a fifth too much."
)
PHASES = ("load", "forward", "backward", "step", "evaluation", "save", "resume")
CUDA_ON_HOST = GIB  # host memory of CUDA's libraries: a margin, not a measurement
# Host memory of code and threads that the first step wakes: 12 to 20 MiB on two cores, in runs of 10M to 60M parameters
WOKEN = 12 * MIB
GENERATOR = GIB // 8  # host memory of torch.compile: 60 to 110 MiB with its first kernels, 5 to 10 for each more
# The single allocations of a derived recipe are not known. Its reserved bytes, and the least that must be reserved, are
# taken as these multiples of the peak that is allocated. In seventeen traced recipes of four models they were 1.03 to
# 1.20, and 1.00 to 1.07; below a GiB, where segments of 20 MiB are coarse, up to 1.11.
RESERVED, LEAST_RESERVED = 1.1, 1.07


@dataclass(frozen=True)
class Need:
    """Holds the peak bytes of one phase."""

    device: int
    host: int  # resident memory of the process; on a CPU this includes the device's bytes


@dataclass(frozen=True)
class Prediction:
    """Holds the memory that a run needs, in bytes."""

    phases: Mapping[str, Need]
    by_category: Mapping[str, int]  # device bytes at the peak
    host_categories: Mapping[str, int]  # host bytes at the peak: libraries, tensors, staging
    reserved: int  # reserved by CUDA's allocator if there is room; 0 on a CPU
    smallest: int  # the least that the allocator must be able to reserve: if memory is short it frees idle segments
    parameters: int
    on_card: bool
    estimate: str | None = None  # why this is only an estimate
    context_bytes: int = 0  # bytes of a card that torch cannot reserve: the context, unless the card's size excludes it
    advice: str | None = None  # what to type if attention takes the math kernel
    trace: Trace | None = None  # its work tells the time
    mapped: int = 0  # bytes of a file while it is loaded: resident in that phase, and given up if memory is short
    paged: int = 0  # bytes of optimizer state that CUDA moves: to the card if there is room, else to the host
    drive: int = 0  # bytes on a drive
    drive_read: int = 0  # bytes that a step reads: what it changes, and 16-bit weights on the drive also for each pass
    drive_written: int = 0  # bytes that a step writes: what it changes
    devices: int = 1  # devices of the run; all figures are for the one that needs most
    node: int = 1  # at most so many of them share a host
    first: int = 0  # host bytes of the load phase that only rank 0 needs
    traffic: Traffic = NOTHING  # what a device receives in an optimizer step

    @property
    def device_peak(self) -> int:
        return max(need.device for need in self.phases.values())

    @property
    def host_peak(self) -> int:
        return max(need.host for need in self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase].device)

    @property
    def device_need(self) -> int:
        """Returns the bytes that a card must have: the least that torch must reserve, and what torch cannot reserve.

        Paged state does not count: the step of a parameter brings its state in pages of 2 MiB or less, and if there is
        no room for a page, another page leaves.
        """
        return self.smallest + self.context_bytes if self.on_card else self.device_peak

    def paged_on_host(self, gpu: int | None) -> int:
        """Returns the bytes of paged state for which a card of `gpu` bytes has no room; None: there is always room.

        Pages leave when torch asks for memory, so torch never has to give back idle segments for them.
        """
        return 0 if gpu is None else min(self.paged, max(0, self.paged + self.reserved + self.context_bytes - gpu))

    def host_need(self, gpu: int | None) -> int:
        """Returns the bytes that a host with cards of `gpu` bytes must have, for all processes on it.

        Each process needs as much, but only rank 0 needs `first` while it loads.
        """
        pages = self.paged_on_host(gpu)
        more = dict.fromkeys(BY_HOST, 0) | {"load": -self.mapped}
        each = {name: need.host + more.get(name, pages) for name, need in self.phases.items()}
        every = {name: self.on_host * size for name, size in each.items()}
        every["load"] -= (self.on_host - 1) * self.first
        return max(every.values())

    @property
    def on_host(self) -> int:
        """Returns how many processes share a host."""
        return min(self.devices, self.node)

    def based_on(self, libraries: int) -> "Prediction":
        """Returns the prediction with `libraries` bytes measured, not predicted, before the model was built."""
        more = libraries - self.host_categories["libraries"]
        phases = {name: Need(need.device, need.host + more) for name, need in self.phases.items()}
        return replace(self, phases=phases, host_categories={**self.host_categories, "libraries": libraries})

    def fits(self, target: Target) -> bool:
        gpu, ram = target.device_memory, target.host_memory
        on_drive = target.drive is None or self.drive <= target.drive.size
        return on_drive and (gpu is None or self.device_need <= gpu) and (ram is None or self.host_need(gpu) <= ram)

    def as_dict(self) -> dict:
        return {
            "device_peak_bytes": self.device_peak,
            "reserved_peak_bytes": self.reserved,
            "smallest_cap_bytes": self.smallest,
            "device_need_bytes": self.device_need,
            "paged_bytes": self.paged,
            "drive_bytes": self.drive,
            "drive_bytes_per_step": {"read": self.drive_read, "written": self.drive_written},
            "host_peak_bytes": self.host_peak,
            "peak_phase": self.peak_phase,
            "peak_bytes_by_category": dict(self.by_category),
            "host_bytes_by_category": dict(self.host_categories),
            "phases": {name: asdict(need) for name, need in self.phases.items()},
            "parameters": self.parameters,
            "devices": self.devices,
            "devices_of_a_host": self.on_host,
            "host_need_bytes": self.host_need(None),
            "exchanged_bytes_per_step": {k: round(v) for k, v in self.traffic._asdict().items()},
            "estimate": self.estimate,
            "advice": self.advice,
        }


def predict(run: Run, target: Target, other: Callable[..., Trace] | None = None) -> Prediction:
    """Predicts the needs of the device that needs most.

    Args: run: resolved, with a number for batch_size; other: traces instead of `trace`, in another process.

    Raises:
        Refused: the run itself would be refused for the same reason.
    """
    traces = partial(other or trace, on_card=target.on_card, capability=target.capability)
    libraries = process.rss_bytes()  # this process has imported what the run will import
    if run.any("compiles_blocks"):
        run = run.replacing("compile", choice("compile", "none") | {"declares": {"compiles_blocks": True}})
        why = "compiled blocks cannot be traced. They store less than compile=none would, which is counted."
        return replace(needs(traces(run), run, target, libraries), estimate=why)
    try:
        rank_0 = traces(run)
        by_rank = [rank_0, *(traces(run, rank=rank) for rank in rank_0.neediest if rank)]
        return max((needs(traced, run, target, libraries) for traced in by_rank), key=lambda need: need.device_peak)
    except Refused:
        raise
    except NotTraced as error:
        why = f"{error} {OUTLINED}"
        return replace(needs(outline(run, target), run, target, libraries), estimate=why)
    except Exception as error:
        why, estimated = f"{untraceable(error)} {OUTLINED}", outline(run, target)
        return replace(needs(estimated, run, target, libraries), estimate=why)


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
    host = count * (master + (4 if run.accumulates else element)) + state if on_host else 0
    beside = count * (master - element) + state if run.streams else 0
    if run.any("offloads"):  # shards wait and are stepped on the host
        host, weights, gradients, state = weights + gradients + state, 0, 0, 0

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


def _communicators(trace: Trace, run: Run) -> int:
    """Returns NCCL's bytes, which torch does not count: each process group allocates them at its first exchange."""
    groups = {sent.ranks for _, sent in trace.sent} or {None}  # an engine that was not traced has at least one group
    return len(groups) * COMMUNICATOR if run.devices > 1 else 0


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


def needs(trace: Trace, run: Run, target: Target, libraries: int) -> Prediction:
    """Computes the needs of a traced run. Args: libraries: resident bytes after imports, before anything is built."""
    on_card = target.on_card
    size, loaded = (getattr(torch, name).itemsize for name in (run.weights_dtype, run.loaded_in))
    maps = False
    if run.drive_folder is not None or _packs(run):
        described = describe(run, plans=True)
        read = read_in(run, described, plans=True)
        loaded, maps = read.itemsize, stored_in(described, plans=True) == read
    elif run.widens_as_sent:
        wide = getattr(torch, run.loaded_in)
        maps = stored_narrower(run, describe(run, plans=True), wide, plans=True) is not None
    windows = run.windows if run.several else None
    steps_beside_card = on_card and trace.steps_on_host
    # bytes of a gradient on its way to the host
    largest = trace.leaves + trace.ahead if trace.streamed else trace.largest_trained * run.product_bytes
    leaving = largest if steps_beside_card else 0
    if on_card and trace.waits_on_host:  # a block's shard on its way to the card, and its gradient's on the way back
        leaving = 2 * trace.blocks[1]
    built_on = {
        "libraries": libraries,
        "cuda": CUDA_ON_HOST if on_card else 0,
        "generator": GENERATOR if trace.generated else 0,
        "staging": (2 * SLOTS + 2 * run.reads_weights) * SLOT_BYTES if steps_beside_card else 0,
    }
    base = sum(built_on.values())
    device = _device_bytes(trace, on_card, leaving)
    free = replay(trace.events) if on_card and trace.events else None
    beside = _beside_tensors(trace, free) if on_card else 0
    more = {"load": 0, "save": trace.workspace, "resume": trace.workspace}
    device = {name: some + more.get(name, beside) for name, some in device.items()}
    reserved, smallest = _by_the_allocator(trace, free, max(device.values()), leaving) if on_card else (0, 0)
    host = _host_bytes(trace, run, on_card, size, loaded, maps)
    host["save"] += _merged(run, trace, on_card)
    mapped = _mapped(run, trace.parameters, loaded)
    host = {name: some + (mapped if name == "load" else WOKEN) for name, some in host.items()}
    phases = {name: Need(device[name], base + host[name] + (0 if on_card else device[name])) for name in PHASES}
    top = max((trace.phases[name] for name in ("forward", "backward", "step", "evaluation")), key=lambda p: p.total)
    return Prediction(
        phases=phases,
        by_category={category: top.bytes[category] + beside * (category == "other") for category in CATEGORIES},
        host_categories=built_on | {"tensors": max(need.host for need in phases.values()) - base},
        reserved=reserved,
        smallest=smallest,
        parameters=trace.parameters,
        on_card=on_card,
        context_bytes=target.context_bytes + _communicators(trace, run) if on_card else 0,
        advice=trace.advice,
        trace=replace(trace, events=[], places={}),
        mapped=mapped,
        paged=trace.paged,
        drive=0 if run.drive_folder is None else trace.drive.files,
        drive_read=0 if run.drive_folder is None else trace.drive.stepped + read_by_passes(run, trace),
        drive_written=0 if run.drive_folder is None else trace.drive.stepped,
        estimate=trace.estimate,
        devices=run.devices,
        node=target.node,
        first=host["load"] - trace.largest * loaded - mapped if run.loads_once else 0,
        traffic=of_window(
            trace.sent, windows.largest if windows and not run.any("overlaps_micro_batches") else 1, target.node
        ),
    )


def read_by_passes(run: Run, trace: Trace) -> int:
    """Returns the bytes of 16-bit weights that the passes of a window read from a drive. When backward begins, the last
    block is still on the device, and when the next micro-batch begins, the first is."""
    if not run.reads_weights:
        return 0
    turns, block = 1 if run.overlaps else run.windows.largest, trace.blocks[1]
    return 2 * turns * (trace.streamed - block) + block


def _device_bytes(trace: Trace, on_card: bool, leaving: int) -> dict[str, int]:
    """Returns the peak device bytes of the tensors of each phase."""
    traced = {name: point.total for name, point in trace.phases.items()}
    resting = trace.weights + trace.phases["evaluation"].bytes["optimizer"]  # memory between two windows
    return {
        "load": trace.weights,
        "forward": traced["forward"],
        "backward": traced["backward"] + leaving,
        "step": traced["step"] + (0 if trace.steps_on_host or trace.waits_on_host or not on_card else trace.unseen),
        "evaluation": traced["evaluation"],
        "save": resting,
        "resume": resting,
    }


def _packs(run: Run) -> bool:
    """Returns whether the model's own weights are packed into fewer bits, one by one, once they have been loaded."""
    return "weights" in run.technique("adapter").saves


def _host_bytes(trace: Trace, run: Run, on_card: bool, size: int, loaded: int, maps: bool) -> dict[str, int]:
    """Returns, by phase, the bytes of tensors that lie only on the host.

    Args: size: bytes per element of a trainable weight; loaded: bytes per element of the weights as they are read;
    maps: these are pages of their files, which the system gives up.
    """
    traced = {name: point.host for name, point in trace.phases.items()}
    read = 0 if maps and (_packs(run) or run.widens_as_sent) else trace.parameters * loaded
    largest, weights = trace.largest * loaded, max(read, trace.weights)
    masters = trace.trained_parameters * size if trace.steps_on_host else 0
    # on a CPU weights are loaded where they stay, and frozen ones are narrowed there
    load = masters + weights if on_card else max(masters, weights - trace.weights)
    if trace.streamed:  # none of these is on the device yet, and weights are split one at a time
        load = trace.host_bytes + (trace.weights if on_card else 0)
        load = max(load, weights - (0 if on_card else trace.weights)) if _packs(run) else load
    if not on_card:
        copies = 0
    else:  # a checkpoint's tensors are copied one after the other, and an export's file by file
        alone = run.technique("adapter").freezes_base and run.model.pretrained and not run.merge
        exported = trace.trained_parameters if alone else trace.parameters
        copies = max(trace.largest * size, min(FILE_BYTES, exported * size))
    by_phase = {
        "load": largest + load,
        "forward": traced["forward"] + trace.rounding,
        "backward": traced["backward"] + trace.rounding,
        "step": traced["step"] + trace.rounding + (0 if on_card and not trace.steps_on_host else trace.unseen),
        "evaluation": traced["evaluation"],
        "save": traced["evaluation"] + copies + trace.paged,  # paged state moves when it is read: no copy
        "resume": traced["evaluation"] + trace.largest_trained * size + trace.paged,
    }
    if run.drive_folder is None:
        return by_phase
    # Masters leave block by block while they are made of the weights that were loaded, all at once. Weights that go
    # there too, in their files' dtype, are pages of those files until then, which the system gives up. A base is packed
    # before any of it leaves.
    if run.reads_weights and maps:
        read -= trace.streamed
    load = load if _packs(run) else read - (0 if on_card else trace.weights)
    loads = {"load": largest + load + trace.drive.room}
    return {name: some + trace.drive.room - trace.drive.tensors for name, some in by_phase.items()} | loads


def _merged(run: Run, trace: Trace, on_card: bool) -> int:
    """Returns the bytes of host memory that a model takes when an adapter is merged into it: the model comes from the
    card, and a base stored in fewer bits grows."""
    if not run.merge:
        return 0
    merged = trace.parameters * getattr(torch, run.export_dtype or "float32").itemsize
    return max(trace.weights, merged) - (0 if on_card and not run.saves_parts else trace.weights)


def _mapped(run: Run, parameters: int, size: int) -> int:
    """Returns the bytes of a folder's weight files if they are copied into elements of another size, or packed.

    Their pages then stay resident until all are read; else the pages become the tensors' own memory. The sizes of a
    hub's files are not known beforehand.
    """
    folder = Path(run.model.name).expanduser()
    if not (run.model.pretrained and folder.is_dir()):
        return 0
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return stored if _packs(run) or round(stored / parameters) != size else 0


def _beside_tensors(trace: Trace, free: Allocator | None) -> int:
    """Returns the bytes that CUDA's allocator counts as allocated besides tensors: cuBLAS's workspaces, and rests of
    blocks that are too small to be divided from them. Args: free: the replayed allocator; None: no event is known."""
    if free is None:
        return trace.workspace
    tensors = max(trace.phases[name].total for name in ("forward", "backward", "step"))
    return max(trace.workspace, free.allocated_peak - tensors)


def _by_the_allocator(trace: Trace, free: Allocator | None, device_peak: int, leaving: int) -> tuple[int, int]:
    """Returns (bytes reserved if there is room, the least bytes that must be reserved)."""
    if free is None:
        return round(device_peak * RESERVED), round(device_peak * LEAST_RESERVED)
    # The events lack the scratch of generated code, hence the comparison with the peak.
    smallest = smallest_limit(trace.events, free)
    return max(free.reserved + leaving, device_peak), max(smallest + leaving, device_peak)
