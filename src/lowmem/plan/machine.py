"""How long a recipe takes, to be compared with another: the sum of what its operators take.

An operator takes as long as the slower of two: its floating-point operations at the machine's rate for that dtype, or
the bytes it reads and writes at the machine's bandwidth. A fixed time per operator comes on top. The rates of this
machine are measured once, in a few seconds, and cached; those of a card with a name are in conf/gpu.yaml, and for one
that is not here and has none they are assumed, and the plan says so. On a CPU the step of each optimizer is measured:
some take twenty times what their bytes would.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lowmem import build, gpus
from lowmem.instantiate import instantiate
from lowmem.plan.trace import Trace
from lowmem.plan.work import Work
from lowmem.precision.widened import widened
from lowmem.settings import Settings

CACHE = Path("~/.cache/lowmem").expanduser()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RATES = 2  # raise it when what is measured changes: older files are then not read
STEPPED = 1 << 22  # parameters of the probe of an optimizer's step


@dataclass
class Machine:
    """Rates of the device, and of the host beside it."""

    name: str
    flops: dict[str, float]  # per second, by dtype
    bandwidth: float  # bytes per second, of the device's memory
    overhead: float  # seconds per operator
    link: float | None = None  # bytes per second between host and device; None: they are one
    steps: dict[str, float] = field(default_factory=dict)  # of an optimizer -> seconds per parameter, on the host

    def seconds(self, work: Counter[tuple[str, Work]], phases: Iterable[str]) -> float:
        """Of one micro-batch's operators in these phases."""
        wanted = set(phases)
        return sum(self.operator(w) * times for (phase, w), times in work.items() if phase in wanted)

    def operator(self, work: Work) -> float:
        rate = self.flops.get(str(work.dtype).removeprefix("torch."), self.flops["float32"])
        return max(work.flops / rate, work.moved / self.bandwidth) + self.overhead

    def window(self, cfg: DictConfig, shapes: Trace, pass_seconds: float, micro_batches: int) -> float:
        """Seconds of one optimizer step: its micro-batches, the traffic with the host, and the update.

        Args: pass_seconds: of one micro-batch's operators, forward and backward.
        """
        if self.link:  # offloaded boundaries travel there and back while others are computed
            pass_seconds = max(pass_seconds, 2 * sum(shapes.pinned) / self.link)
        if shapes.steps_on_host:
            return self._window_with_masters(cfg, shapes, pass_seconds, micro_batches)
        if self.link is None:
            return micro_batches * pass_seconds + shapes.parameters * self.step_rate(cfg)
        state = shapes.phases["evaluation"].bytes["optimizer"] + shapes.paged
        moved = 3 * shapes.weights + 2 * state  # weights read and written, gradients read; state read and written
        return micro_batches * pass_seconds + moved / self.bandwidth

    def _window_with_masters(self, cfg: DictConfig, shapes: Trace, pass_seconds: float, micro_batches: int) -> float:
        """The host steps; gradients leave while backward runs."""
        update = shapes.parameters * self.step_rate(cfg)
        traffic = 2 * shapes.parameters / self.link if self.link else 0.0  # 16 bits each way
        *earlier, last = [max(pass_seconds, traffic)] * micro_batches
        if Settings(cfg).early and self.link:  # the update runs during the last backward pass
            return sum(earlier) + max(last, update + traffic)
        return sum(earlier) + last + update + traffic

    def step_rate(self, cfg: DictConfig) -> float:
        """Seconds per parameter of one optimizer step on this machine's processors."""
        kind = f"{cfg.optim._target_} of {_stepped_as(cfg)}"
        if kind not in self.steps:
            self.steps[kind] = _step_seconds(cfg) / STEPPED
            self.save()
        return self.steps[kind]

    def save(self) -> None:
        CACHE.mkdir(parents=True, exist_ok=True)
        file = _file(self.name)
        draft = file.with_suffix(".writing")
        draft.write_text(json.dumps(asdict(self), indent=2))
        draft.replace(file)


def machine(on_card: bool, card: gpus.Card | None = None, products: str = "float32") -> Machine:
    """The machine that a plan is for: measured where it is this one, and the card has no name.

    Args: products: what those of fp32 read, tensorfloat32 perhaps.
    """
    if on_card and ((card and card.rates) or not torch.cuda.is_available()):
        rates = (card and card.rates) or gpus.named(gpus.REFERENCE).rates
        if products == "tensorfloat32":
            rates = rates | {"flops": rates["flops"] | {"float32": rates["flops"][products]}}
        host = machine(on_card=False)
        return Machine(name=f"assumed-card-{host.name}", steps=host.steps, **rates)
    name = _name(on_card)
    if _file(name).exists():
        return Machine(**json.loads(_file(name).read_text()))
    this = measured(name, "cuda" if on_card else "cpu")
    this.save()
    return this


def measured(name: str, device: str) -> Machine:
    """This machine, in two to ten seconds."""
    this = Machine(name, *_rates(device))
    if device == "cuda":
        torch.cuda.empty_cache()  # torch would hold the memory of the probes for later
    return this


def _rates(device: str) -> tuple[dict[str, float], float, float, float | None]:
    """(flops, bandwidth, overhead, link) of a `Machine`."""
    flops = {}
    for dtype_name, dtype in DTYPES.items():
        n = 4096 if device == "cuda" else 1024
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        with widened(dtype, device):
            flops[dtype_name] = 2 * n**3 / _seconds(lambda a=a, b=b: a @ b, device)
    big = torch.ones(1 << 25, device=device)
    bandwidth = 2 * big.nbytes / _seconds(lambda: big.mul_(1.0), device)
    small = torch.ones(16, device=device)
    overhead = _seconds(lambda: [small.mul(1.0) for _ in range(1000)], device) / 1000
    link = None
    if device == "cuda":
        pinned = torch.empty(1 << 25, pin_memory=True)
        link = pinned.nbytes / _seconds(lambda: big.copy_(pinned), device)
    return flops, bandwidth, overhead, link


def _seconds(call: Callable[[], object], device: str) -> float:
    """Of the fastest of five calls, after one to warm up: the rate is cached, and must not hold what else ran now."""
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _step_seconds(cfg: DictConfig) -> float:
    """Of the optimizer's step on a matrix of STEPPED parameters in host memory, held as the precision holds it."""
    cfg = OmegaConf.merge(cfg, {"device": "cpu"})
    side = 1 << (STEPPED.bit_length() // 2)
    probe = nn.Linear(side, STEPPED // side, bias=False)
    optimizer = build.optimizer(cfg)(probe)
    gradient = torch.full_like(probe.weight, 1e-3)
    if Settings(cfg).masters or cfg.weights_dtype == "float32":
        probe.weight.grad = gradient
        return _seconds(optimizer.step, "cpu")
    plugin = instantiate(cfg.trainer.plugins.precision)
    probe.weight.data, gradient = (t.to(getattr(torch, cfg.weights_dtype)) for t in (probe.weight.data, gradient))

    def step() -> None:
        probe.weight.grad = gradient
        plugin.update(optimizer, optimizer.param_groups[0], probe.weight)

    return _seconds(step, "cpu")


def _stepped_as(cfg: DictConfig) -> str:
    """What a step's time depends on besides the optimizer: who steps fp32 weights, or widens and rounds 16 bits."""
    if Settings(cfg).masters:
        return "masters"
    precision = cfg.trainer.plugins.precision._target_
    return "float32" if cfg.weights_dtype == "float32" else precision


def _name(on_card: bool) -> str:
    if on_card:
        return torch.cuda.get_device_name().replace(" ", "-")
    return f"cpu-{torch.get_num_threads()}"


def _file(name: str) -> Path:
    return CACHE / f"machine-{RATES}-{name}-torch-{torch.__version__}.json"
