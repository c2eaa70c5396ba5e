"""Finds the rates of a machine (FLOP/s and bytes/s), and estimates the time of an operator by a roofline model
(Williams et al. 2009).

    seconds of an operator = max(FLOPs / rate of matrix products, bytes / memory bandwidth) + launch time

The published rates of named cards are in conf/gpu.yaml. The rates of this machine are measured, which takes about a
second, and are stored in a file for a week. `python -m benchmarks.card` also measures copies in both directions at once
(otherwise DUPLEX is assumed), and stores all rates in the same file. If the file cannot be read or written, each
process measures the rates again, without an error. Operators reach only a share of the peak rates; the shares COMPUTE
and MEMORY were fitted to measured steps (benchmarks/results/plan_time.md).
"""

import json
import os
import re
import time
import timeit
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
from pydantic import ConfigDict, Field, TypeAdapter

from lowmem.config import cards, drives
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.traffic import Traffic
from lowmem.system.errors import Refused
from lowmem.system.process import processor
from lowmem.techniques.precision.cpu_products import widened

COMPUTE, MEMORY = 0.95, 0.7  # shares of peak FLOP/s and of memory bandwidth that operators reach
LAUNCH = 5e-6  # seconds to launch an operator
DUPLEX = 0.5  # assumed `duplex` of this machine's link (`cards.LinkBandwidth`): the value for PCIe 4 in conf/gpu.yaml
CACHE = Path(os.environ.get("LOWMEM_RATES") or "~/.cache/lowmem").expanduser().absolute()
FORMAT, WEEK = 8, 7 * 24 * 3600  # version of the file format; seconds until stored rates expire
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")} | {"tensorfloat32": torch.float32}

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Machine:
    """The rates of a device, and of the links, the drive and the host that it uses."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # `stored_rates` validates a file with these settings

    name: str
    flops: dict[str, Rate]  # name of a dtype -> FLOP/s of matrix products
    bandwidth: Rate  # bytes per second of device memory
    launch: Rate = LAUNCH  # seconds
    link: cards.LinkBandwidth | None = None  # between host and card; None: the device is a CPU
    peer: Rate | None = None  # bytes per second from other devices of the node; None: equal to `bandwidth`
    network: Rate | None = None  # bytes per second from other nodes; None: equal to `peer`
    drive_read: Rate = drives.READ  # bytes per second
    drive_written: Rate = drives.WRITTEN  # bytes per second
    host: "Machine | None" = None  # rates of the host's CPU; None if the device is a CPU, and in stored rates

    def operator(self, work: Work) -> float:
        """Returns the estimated seconds of an operator. Raises: Refused: the rate of matrix products in the operator's
        dtype is not known."""
        products = work.flops / self.rate(str(work.dtype).removeprefix("torch.")) if work.flops else 0.0
        return max(products, work.moved / self.bandwidth) + self.launch

    def rate(self, dtype: str) -> Rate:
        """Returns the FLOP/s of matrix products in a dtype. Raises: Refused: the rate is not known."""
        if dtype not in self.flops:
            raise Refused(
                f"The speed of {self.name} is known for {', '.join(self.flops)}, but this run multiplies matrices in "
                f"{dtype}, so its time cannot be predicted. To predict its memory alone, type plan=check, or add "
                "search=false to python plan.py."
            )
        return self.flops[dtype]

    def exchange(self, traffic: Traffic) -> float:
        """Returns the seconds of an exchange between devices. Transfers inside the node overlap with transfers between
        nodes."""
        peer = self.peer or self.bandwidth
        return max(traffic.inside / peer, traffic.between / (self.network or peer))


def machine(on_card: bool, card: cards.Card | None = None, products: str = "float32") -> Machine:
    """Returns the rates of the machine for which a plan is made. FLOP/s and memory bandwidth are multiplied by the
    shares that operators reach (COMPUTE, MEMORY).

    Args:
        on_card: True: the rates of a card; False: the rates of this machine's CPU.
        card: the card of the plan. If it is None or has no published rates, this machine's card is used instead, or
            `cards.REFERENCE` if this machine has no card.
        products: dtype of matrix products. With "tensorfloat32", matrix products in fp32 get the rate of TF32.
    """
    if on_card and ((card and card.rates) or not torch.cuda.is_available()):
        known = card if card and card.rates else cards.named(cards.REFERENCE)
        found = Machine(known.name, **known.rates)
    else:
        found = stored_rates(on_card) or measured(on_card)
    flops = {dtype: COMPUTE * rate for dtype, rate in found.flops.items()}
    if products == "tensorfloat32":
        flops["float32"] = flops.get(products, flops["float32"])
    host = machine(on_card=False) if on_card else None
    return replace(found, flops=flops, bandwidth=MEMORY * found.bandwidth, host=host)


def stored_rates(on_card: bool) -> Machine | None:
    """Returns the stored rates of this machine's card or CPU. None: no valid rates are stored, or the stored rates are
    older than a week."""
    file = _file(on_card)
    with suppress(OSError, ValueError):  # pydantic's errors are ValueErrors
        found = TypeAdapter(Machine).validate_json(file.read_bytes())
        if "float32" in found.flops and 0 <= time.time() - file.stat().st_mtime < WEEK:
            return found
    return None


def store(found: Machine, on_card: bool) -> None:
    """Stores the rates of this machine's card or CPU. A no-op if the file cannot be written."""
    file = _file(on_card)
    draft = file.with_suffix(f".{os.getpid()}")  # a separate file, because two processes may write at the same time
    with suppress(OSError):
        CACHE.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(found), indent=2), encoding="utf-8")
        draft.replace(file)


@cache
def measured(on_card: bool) -> Machine:
    """Measures the rates of this machine's card or CPU, and stores them in a file. Cached, so that each process
    measures them only once."""
    device = "cuda" if on_card else "cpu"
    memory = torch.ones(1 << 25, device=device)
    bandwidth = 2 * memory.nbytes / fastest(lambda: memory.mul_(1.0), on_card)
    found = Machine(_name(on_card), _products(device), bandwidth)
    if on_card:
        pinned = torch.empty(memory.shape, pin_memory=True)
        up, down = fastest(lambda: memory.copy_(pinned), True), fastest(lambda: pinned.copy_(memory), True)
        found = replace(found, link=cards.LinkBandwidth(pinned.nbytes / up, pinned.nbytes / down, DUPLEX))
        del memory
        torch.cuda.empty_cache()  # returns the memory of the measurement to the card
    store(found, on_card)
    return found


def _products(device: str) -> dict[str, float]:
    """Measures the FLOP/s of matrix products on a device. Returns: The FLOP/s of each dtype, by its name."""
    n, flops, before = (4096 if device == "cuda" else 1024), {}, torch.get_float32_matmul_precision()
    for name, dtype in DTYPES.items():
        factor = torch.randn(n, n, device=device).to(dtype)
        torch.set_float32_matmul_precision("high" if name == "tensorfloat32" else "highest")
        with widened(dtype, device):
            flops[name] = 2 * n**3 / fastest(lambda factor=factor: factor @ factor, device == "cuda")
    torch.set_float32_matmul_precision(before)
    return flops


def fastest(call: Callable[[], object], on_card: bool) -> float:
    """Returns the seconds of the fastest of five calls, after a warm-up call. The fastest call is the least disturbed
    by other processes."""
    return min(timeit.repeat(lambda: (call(), on_card and torch.cuda.synchronize()), number=1, repeat=6)[1:])


def _name(on_card: bool) -> str:
    hardware = torch.cuda.get_device_name() if on_card else f"{processor()} {torch.get_num_threads()} threads"
    return "-".join(re.findall(r"[\w.]+", hardware))


def _file(on_card: bool) -> Path:
    return CACHE / f"machine-{FORMAT}-{_name(on_card)}-torch-{torch.__version__}.json"
