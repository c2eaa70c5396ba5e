"""From a trace to what a run needs, phase by phase, on the device and on the host."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM

from lowmem import build
from lowmem.errors import Refused
from lowmem.memory import process
from lowmem.memory.tracker import Point
from lowmem.model import architecture_of
from lowmem.offload.link import SLOT_BYTES, SLOTS
from lowmem.plan.allocator import replay
from lowmem.plan.stand_in import state_bytes_per_parameter
from lowmem.plan.trace import Trace, trace, untraceable
from lowmem.settings import Settings
from lowmem.units import CATEGORIES, GIB

PHASES = ("load", "forward", "backward", "step", "evaluation", "save", "resume")
# What cannot be known without the card: kernels and cuBLAS workspace beside torch's memory, and CUDA's libraries in the
# host's memory. Margins, not measurements.
CONTEXT, CUDA_ON_HOST = GIB // 2, GIB
GENERATOR = GIB // 8  # of host memory, for torch.compile: 60 to 110 MiB with its first kernels, 5 to 10 for each more
FRAGMENTED = 1.1  # reserved of allocated, where a recipe was derived and its allocations are not known one by one


@dataclass(frozen=True)
class Need:
    """Bytes of one phase at its highest."""

    device: int
    host: int  # the process's resident memory: on a CPU the device's bytes too


@dataclass(frozen=True)
class Prediction:
    """What a run needs. All in bytes."""

    phases: Mapping[str, Need]
    by_category: Mapping[str, int]  # of the device, at its highest
    host_categories: Mapping[str, int]  # at its highest: libraries, tensors, staging
    reserved: int  # by CUDA's allocator; 0 on a CPU
    parameters: int
    on_card: bool
    estimate: str | None = None  # why it is one

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
        """What a card must have: what torch reserves, and the context."""
        return self.reserved + CONTEXT if self.on_card else self.device_peak

    def beside(self, libraries: int) -> dict:
        """`as_dict` of a process whose resident memory was measured just before the model was built."""
        grown = libraries - self.host_categories["libraries"]
        phases = {name: Need(need.device, need.host + grown) for name, need in self.phases.items()}
        by = {**self.host_categories, "libraries": libraries}
        return replace(self, phases=phases, host_categories=by).as_dict()

    def fits(self, gpu: int | None, ram: int | None) -> bool:
        return (gpu is None or self.device_need <= gpu) and (ram is None or self.host_peak <= ram)

    def as_dict(self) -> dict:
        return {
            "device_peak_bytes": self.device_peak,
            "reserved_peak_bytes": self.reserved,
            "device_need_bytes": self.device_need,
            "host_peak_bytes": self.host_peak,
            "peak_phase": self.peak_phase,
            "peak_bytes_by_category": dict(self.by_category),
            "host_bytes_by_category": dict(self.host_categories),
            "phases": {name: asdict(need) for name, need in self.phases.items()},
            "parameters": self.parameters,
            "estimate": self.estimate,
        }


def predict(cfg: DictConfig, on_card: bool, devices: int = 1) -> Prediction:
    """Args: cfg: resolved, with a number for batch_size; on_card: for a CUDA device, which need not be there; devices:
    that share the weights, gradients and state of one model.

    Raises:
        Refused: what the run itself would be refused for.
    """
    libraries = process.rss_bytes()  # this process has imported what the run will import
    if Settings(cfg).checkpointing.compiles_blocks:
        uncompiled = {"gradient_checkpointing": {"_target_": "lowmem.gradient_checkpointing.none", "_partial_": True}}
        cfg = OmegaConf.create(OmegaConf.to_container(cfg) | uncompiled)
        why = (
            "compiled blocks cannot be traced, and keep less: this is the run without checkpointing, the most it needs."
        )
        return replace(needs(trace(cfg, on_card), cfg, on_card, libraries, devices), estimate=why)
    try:
        return needs(trace(cfg, on_card), cfg, on_card, libraries, devices)
    except Refused:
        raise
    except Exception as error:
        return replace(needs(outline(cfg), cfg, on_card, libraries, devices), estimate=untraceable(error))


def outline(cfg: DictConfig) -> Trace:
    """Of a model that cannot be traced: weights, gradients and state are counted, and the activations of a transformer
    of its dimensions, 34 bytes per token, layer and hidden unit in 16 bits (Korthikanti et al. 2022, arXiv 2205.05198).
    """
    config = architecture_of(cfg)
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        every = list(AutoModelForCausalLM.from_config(config).parameters())
    count, largest = sum(p.numel() for p in every), max(p.numel() for p in every)
    size = getattr(torch, cfg.weights_dtype).itemsize
    run = Settings(cfg)
    on_host = run.masters
    weights, state = count * (2 if on_host else size), round(count * state_bytes_per_parameter(build.optimizer(cfg)))
    tokens, layers = cfg.batch_size * cfg.seq_len, getattr(text, "num_hidden_layers", 1)
    boundary = tokens * getattr(text, "hidden_size", 1024) * 2
    blocks = 1 if run.checkpointing.saves else layers
    logits = 3 * 4 * min(tokens, cfg.loss.get("rows", tokens)) * text.vocab_size
    activations = boundary * layers + 17 * boundary * blocks + logits
    gradients = 0 if on_host else weights
    host = count * (4 + (4 if run.accumulates else 2)) + state if on_host else 0

    def point(phase: str, gradients: int, activations: int) -> Point:
        held = {"weights": weights, "gradients": gradients, "optimizer": 0 if on_host else state}
        return Point(phase, dict.fromkeys(CATEGORIES, 0) | held | {"activations": activations}, host)

    phases = {name: point(name, gradients, activations) for name in ("forward", "backward")}
    phases |= {"step": point("step", gradients, 0), "evaluation": point("evaluation", 0, boundary + logits)}
    return Trace(count, largest, weights, gradients, on_host, phases=phases)


def sharded(found: Trace, devices: int) -> Trace:
    """Each device's part, as fully_shard keeps it: weights, gradients and state are divided; what stands outside the
    blocks is gathered for the whole pass, and of the blocks the one that is computed and the next
    (torch.distributed.fsdp: the root is not resharded after its forward pass, and one block is prefetched).
    """
    if devices == 1:
        return found
    count, block = found.blocks
    outside = found.weights - count * block

    def part(point: Point) -> Point:
        held = {key: point.bytes[key] // devices for key in ("weights", "gradients", "optimizer")}
        gathered = 0 if point.phase == "step" else outside + 2 * block
        return point._replace(bytes=point.bytes | held | {"other": point.bytes["other"] + gathered})

    phases = {name: part(point) for name, point in found.phases.items()}
    return replace(found, weights=found.weights // devices, phases=phases, events=[])


def needs(found: Trace, cfg: DictConfig, on_card: bool, libraries: int, devices: int = 1) -> Prediction:
    """Args: libraries: resident bytes of a process that has imported everything and built nothing."""
    found = sharded(found, devices)
    size = getattr(torch, cfg.weights_dtype).itemsize
    largest, loaded = found.largest * size, found.parameters * size
    held = found.phases["evaluation"]  # between two windows nothing else is there
    state = held.bytes["optimizer"]
    staging = 2 * SLOTS * SLOT_BYTES if on_card and found.steps_on_host else 0
    generator = GENERATOR if found.generated else 0
    base = libraries + generator + (CUDA_ON_HOST + staging if on_card else 0)
    on_device, on_host = (found.unseen, 0) if on_card and not found.steps_on_host else (0, found.unseen)
    # beside a card the allocator of pinned memory rounds to powers of two
    rounding = sum((1 << (n - 1).bit_length()) - n for n in found.pinned) if on_card else 0
    flight = largest // 2 if on_card and found.steps_on_host else 0  # a gradient that is leaving, in 16 bits

    def need(phase: str, point_device: int, host: int) -> Need:
        return Need(point_device, base + host + (0 if on_card else point_device))

    masters = loaded if found.steps_on_host else 0
    phases = {"load": need("load", found.weights, masters + largest + (loaded if on_card else 0))}
    for name in ("forward", "backward", "step"):
        point = found.phases[name]
        device = point.total + (flight if name == "backward" else 0)
        phases[name] = need(name, device, point.host + rounding)
    step = phases["step"]
    phases["step"] = Need(step.device + on_device, step.host + on_host)
    evaluation = found.phases["evaluation"]
    phases["evaluation"] = need("evaluation", evaluation.total, evaluation.host)
    # beside a card each tensor is brought over to be written, and Lightning brings all of them when the run ends
    copies = found.weights + state if on_card else 0
    phases["save"] = need("save", found.weights + state, evaluation.host + copies)
    phases["resume"] = need("resume", found.weights + state, evaluation.host + largest)
    top = found.phases[max(("forward", "backward", "step", "evaluation"), key=lambda name: found.phases[name].total)]
    tensors = max(need.host for need in phases.values()) - base
    return Prediction(
        phases=phases,
        by_category={category: top.bytes[category] for category in CATEGORIES},
        host_categories={
            "libraries": libraries,
            "cuda": base - libraries - generator - staging,
            "generator": generator,
            "staging": staging,
            "tensors": tensors,
        },
        reserved=_reserved(found, max(need.device for need in phases.values()), flight) if on_card else 0,
        parameters=found.parameters,
        on_card=on_card,
    )


def _reserved(found: Trace, device_peak: int, flight: int) -> int:
    if not found.events:
        return round(device_peak * FRAGMENTED)
    return max(replay(found.events).reserved + flight, device_peak)  # generated code's scratch is in no event
