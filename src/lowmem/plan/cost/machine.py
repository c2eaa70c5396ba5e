"""Measures a machine's rates in a few seconds, and stores them for a week.

An operator takes as long as the slower of two: its floating-point operations at the machine's rate for that dtype, or
the bytes it reads and writes at the machine's bandwidth. A fixed time per operator comes on top. The rates of a card
with a name are in conf/gpu.yaml; for a card without a name that is not here they are assumed, and the plan says so.

Rates measured while other processes computed are used but not stored. Rates only improve a prediction: a file that
cannot be read or written is ignored, and ends no run.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from torch import nn

from lowmem.config import cards
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.traffic import Traffic
from lowmem.system.errors import Refused
from lowmem.system.process import processor
from lowmem.techniques.precision.cpu_products import widened
from lowmem.techniques.precision.fp32_weights import TensorFloat32

log = logging.getLogger(__name__)

CACHE = Path(os.environ.get("LOWMEM_RATES") or "~/.cache/lowmem").expanduser().absolute()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RATES = 7  # raise it when the measurement changes: older files are then ignored
KEPT = timedelta(days=7)
OWN = 0.8  # share of the processors' time: a process that gets less shares them with others
NOT_STORED = ("host", "busy", "fp32_products")
OTHER_WAY = 4  # copies that come down while one goes up: so many that they are still coming when it has arrived
STEADY = 1.5  # slowest over fastest of equal calls: above this, others use the card

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rates = TypeVar("Rates")


@dataclass
class Machine:
    """Holds the rates of a device and of its host."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # checks a file; direct construction is not checked

    name: str
    flops: dict[str, Rate]  # per second, by dtype
    bandwidth: Rate  # bytes per second of the device's memory
    overhead: Rate  # seconds per operator
    fresh: Rate | None = None  # bytes per second of new pages for malloc; None: a card reuses freed memory
    link: Rate | None = None  # bytes per second between host and device; None: they share one memory
    against: Rate | None = None  # share of `link` for what goes up while other bytes come down; None: all of it
    peer: Rate | None = None  # bytes per second to a device from others of its node; None: its memory's bandwidth
    network: Rate | None = None  # bytes per second from other nodes; None: the same as `peer`
    host: "Machine | None" = None  # the host of a card
    measured_on: str | None = None  # a day; None: not measured, or others computed meanwhile, so it is not stored
    updates: dict[str, Rate] = field(default_factory=dict)  # optimizer -> pace of its update, see `update_time.py`
    busy: dict[str, Rate] = field(default_factory=dict)  # the same, timed while others computed: not stored
    fp32_products: str = "float32"  # or tensorfloat32, the name of their rate in this run: not stored

    def operator(self, work: Work) -> float:
        """Returns the seconds of an operator. Raises Refused: it multiplies in a dtype whose rate is not known."""
        products = work.flops / self.rate(str(work.dtype).removeprefix("torch.")) if work.flops else 0.0
        faults = work.fresh / self.fresh if self.fresh else 0.0
        return max(products, work.moved / self.bandwidth) + faults + self.overhead

    def rate(self, name: str) -> Rate:
        """Returns the products per second in a dtype."""
        name = self.fp32_products if name == "float32" else name
        if name not in self.flops:
            raise Refused(
                f"The speed of {self.name} is known for {', '.join(self.flops)}, but this run multiplies matrices in "
                f"{name}, so its time cannot be predicted. To predict its memory alone, type plan=check, or add "
                "search=false to python plan.py."
            )
        return self.flops[name]

    def exchange(self, traffic: Traffic) -> float:
        """Returns the seconds of an exchange: both kinds of links work at once."""
        peer = self.peer or self.bandwidth
        return max(traffic.inside / peer, traffic.between / (self.network or peer))

    def save(self) -> None:
        if self.measured_on is None:
            return
        store({name: value for name, value in asdict(self).items() if name not in NOT_STORED}, _file(self.name))


def store(rates: dict[str, object], file: Path) -> None:
    """Stores measured rates. If that fails, a warning says so once."""
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=CACHE) as folder:  # two processes may save at once
            draft = Path(folder) / "draft"
            draft.write_text(json.dumps(rates, indent=2), encoding="utf-8")
            draft.replace(file)
    except OSError as error:
        _tell(
            f"The measured speeds of this machine cannot be stored in {CACHE} ({error.strerror}): name a writable "
            "folder in the environment variable LOWMEM_RATES."
        )


def stored(kind: type[Rates], file: Path) -> Rates | None:
    """Returns stored rates; None: there are none, or they are too old or dated in the future. Args: kind: their
    class, with the day in `measured_on`."""
    try:
        known = TypeAdapter(kind).validate_json(file.read_bytes())
        age = date.today() - date.fromisoformat(known.measured_on or "never")
    except (OSError, ValueError):  # pydantic's errors are ValueErrors
        return None
    return known if timedelta(0) <= age < KEPT else None


@cache
def _tell(sentence: str) -> None:
    """Warns once per sentence: each update that is timed saves, and could fail again."""
    log.warning(sentence)


def machine(on_card: bool, card: cards.Card | None = None, products: str = "float32") -> Machine:
    """Returns the machine that a plan is for: this one is measured, unless the card has a name or is not here.

    Args: products: dtype that matrices are multiplied in; with tensorfloat32 fp32 products have that rate.
    """
    fp32 = "tensorfloat32" if products == "tensorfloat32" else "float32"
    host = machine(on_card=False) if on_card else None
    if on_card and ((card and card.rates) or not torch.cuda.is_available()):
        known = card if card and card.rates else cards.named(cards.REFERENCE)
        return Machine(known.name, host=host, fp32_products=fp32, **known.rates)
    this = stored_rates(on_card)
    if this is None:
        device, name = ("cuda" if on_card else "cpu"), _name(on_card)
        quiet = not others_compute(device)
        this = measured(name, device)
        if quiet and not others_compute(device):
            this.measured_on = date.today().isoformat()
            this.save()
    this.host, this.fp32_products = host, fp32
    return this


def stored_rates(on_card: bool) -> Machine | None:
    """Returns the stored rates of this machine; None: see `stored`."""
    known = stored(Machine, _file(_name(on_card)))
    return known if known and "float32" in known.flops else None


def measured(name: str, device: str) -> Machine:
    """Measures this machine, in two to ten seconds."""
    this = Machine(name, *_rates(device))
    if device == "cuda":
        torch.cuda.empty_cache()  # else torch would hold the probes' memory
    return this


def others_compute(device: str) -> bool:
    """Returns whether other processes now compute on the processors or the card that this process uses.

    A matrix product keeps all threads of this process busy: processor time that they do not get goes to others. A card
    has no such clock; there equal calls take different times if others compute. The load average would count this
    process's own work of the last minute, and a full machine of which a container uses only a share.
    """
    side = 4096 if device == "cuda" else 1024
    a = torch.randn(side, side, device=device)
    taken, started, had = [], time.perf_counter(), time.process_time()
    for _ in range(10):
        taken.append(_seconds(lambda: a @ a, device))
    if device == "cuda":
        return max(taken[2:]) > STEADY * min(taken)
    share = (time.process_time() - had) / (time.perf_counter() - started) / torch.get_num_threads()
    return share < OWN


def _rates(device: str) -> tuple[dict[str, float], float, float, float | None, float | None, float | None]:
    """Measures (flops, bandwidth, overhead, fresh, link, against) of a `Machine`."""
    flops = {}
    for dtype_name, dtype in DTYPES.items():
        n = 4096 if device == "cuda" else 1024
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        with widened(dtype, device):
            flops[dtype_name] = 2 * n**3 / fastest(lambda a=a, b=b: a @ b, device)
    if device == "cuda":
        precision, a, b = TensorFloat32(device), a.float(), b.float()
        precision.convert_module(nn.Identity())
        flops["tensorfloat32"] = 2 * n**3 / fastest(lambda: a @ b, device)
        precision.teardown()
    big = torch.ones(1 << 25, device=device)
    bandwidth = 2 * big.nbytes / fastest(lambda: big.mul_(1.0), device)
    small = torch.ones(16, device=device)
    overhead = fastest(lambda: [small.mul(1.0) for _ in range(1000)], device) / 1000
    if device == "cpu":
        fresh = big.nbytes / fastest(lambda: torch.empty_like(big).fill_(1.0), device)
        return flops, bandwidth, overhead, fresh, None, None
    pinned = torch.empty(1 << 25, pin_memory=True)
    alone = fastest(lambda: big.copy_(pinned), device)
    return flops, bandwidth, overhead, None, pinned.nbytes / alone, min(1.0, alone / _against(big, pinned))


def _against(big: torch.Tensor, pinned: torch.Tensor) -> float:
    """Measures the seconds of a copy to a card while other bytes come down on a second stream, as nvbandwidth does
    (its issues 11, 15 and 53 show why). The fastest of five counts, after one to warm up."""
    down, up, taken = torch.cuda.Stream(), torch.cuda.Stream(), []
    to, other = torch.empty_like(big), torch.empty_like(pinned, pin_memory=True)
    for _ in range(6):
        torch.cuda.synchronize()
        with torch.cuda.stream(down):
            for _ in range(OTHER_WAY):
                other.copy_(big, non_blocking=True)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(up):
            start.record()
            to.copy_(pinned, non_blocking=True)
            end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return min(taken[1:])


def fastest(call: Callable[[], object], device: str) -> float:
    """Returns the seconds of the fastest of five calls, after one to warm up: rates are stored, and must not include
    the work of other processes."""
    return min([_seconds(call, device) for _ in range(6)][1:])


def _seconds(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _name(on_card: bool) -> str:
    hardware = torch.cuda.get_device_name() if on_card else f"{processor()} {torch.get_num_threads()} threads"
    return "-".join(re.findall(r"[\w.]+", hardware))


def _file(name: str) -> Path:
    return cache_file(f"machine-{RATES}-{name}-torch-{torch.__version__}")


def cache_file(name: str) -> Path:
    return CACHE / f"{name}.json"
