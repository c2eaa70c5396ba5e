"""Stage 1 measures the card itself, before any training.

It records the card and its versions, the bandwidth of the link between host and card, the speed and the precision of
matrix products, the rates that the planner uses, and what happens to paged optimizer state when the card is full.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from statistics import median

from benchmarks.card import pages
from benchmarks.card.case import Case, Here, LeftOut, Size, Stage
from benchmarks.runner import machine
from lowmem.system.units import GIB

STAGE = Stage(1, "environment and link", __name__, seconds=300)
TIMES = 5  # measurements, of which the median counts
SAID = ("pinned up", "pinned up, against the other way", "pinned down")
OTHER_WAY = 4  # copies the other way during a measured one
PRODUCTS = 10  # products per measurement, so that reading the clock takes no visible time
# (least, most) relative error of a product of normal numbers: fp32 errs by 1e-7 of each of its sums, TF32 by rounding
# the factors to 2**-11. No error lies between the two ranges.
OFF_IN_FP32, OFF_IN_TF32 = (0.0, 1e-5), (1e-5, 1e-3)
EXACT = 512  # side of the matrices whose product is also computed in fp64


def cases(size: Size) -> Mapping[str, Case]:
    return {
        "card": Case(card, 60, imports="json"),
        "link": Case(link, 60, imports="torch"),
        "memory of the host": Case(host, 60, imports="torch"),
        "products": Case(products, 60, imports="torch"),
        "gradients over the link": Case(staged, 60, imports="lowmem.techniques.weights.link"),
        "weights over the link": Case(weights, 60, imports="lowmem.techniques.weights.registered"),
        "rates of the planner": Case(rates, 90),
        "state that the card has no room for": Case(pages.crowded, 90),
    }


def card(here: Here) -> dict:
    """Returns name, memory, driver, versions and the context's bytes, which the planner assumes to be half a GiB."""
    found = {"device": here.device, **machine()}
    if not here.on_card:
        return found | {"name": "no card: a rehearsal", "memory_bytes": None, "driver": None}
    import torch

    if not torch.cuda.is_available():
        raise LeftOut(f"torch {torch.__version__} sees no CUDA device")
    driver, taken = _query_driver()  # before this process has a context
    properties = torch.cuda.get_device_properties(0)
    total = properties.total_memory
    context = total - torch.cuda.mem_get_info()[0]
    a = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    (a @ a).sum().item()  # loads kernels and takes cuBLAS's workspace
    kernels = total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
    return found | {
        "name": properties.name,
        "memory_bytes": total,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count(),
        "taken_by_others_bytes": taken,
        "context_bytes": context - (taken or 0),
        "context_and_kernels_bytes": kernels - (taken or 0),
        "workspace_bytes": torch.cuda.memory_allocated() - a.nbytes,
    }


def _query_driver() -> tuple[str | None, int | None]:
    """Returns (driver version, bytes of the card that others use, such as a screen), or None for what is unknown."""
    if shutil.which("nvidia-smi") is None:
        return None, None
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv,noheader,nounits"]
    device = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    done = subprocess.run([*query, "-i", device], capture_output=True, text=True, timeout=30)
    driver, _, used = done.stdout.strip().partition(", ") if done.returncode == 0 else ("", "", "")
    return driver or None, int(used) << 20 if used.isdigit() else None


def host(here: Here) -> dict:
    """Returns the host's free memory before, while and after a test allocates some of it.

    The memory of a virtual machine may grow only when it is used, and a run that needs more than is free is refused.
    """
    import psutil
    import torch

    from lowmem.system.process import available_bytes  # which knows a container's own limit

    found, held = [available_bytes()], []
    while len(held) < here.size.touched and available_bytes() > 2 * GIB:
        held.append(torch.ones(GIB // 4))
    found.append(available_bytes())
    del held
    found.append(available_bytes())
    when, total = ("before", "held", "after"), psutil.virtual_memory().total
    return {key: {"total": total, "available": one} for key, one in zip(when, found, strict=True)}


def seconds(call: Callable[[], object], here: Here) -> float:
    """Returns the median seconds of a call, after two that warm up, by the device's own clock."""
    import torch

    taken = []
    for _ in range(TIMES + 2):
        if here.on_card:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
        else:
            before = time.perf_counter()
            call()
            taken.append(time.perf_counter() - before)
    return median(taken[2:])


def link(here: Here) -> dict:
    """Measures bytes per second over the link: with pinned and pageable memory, each way alone, and each way against
    the other one."""
    import torch

    device = torch.zeros(here.size.moved, dtype=torch.uint8, device=here.device)
    found = {}
    for kind in ("pinned", "pageable"):
        host = torch.zeros(here.size.moved, dtype=torch.uint8, pin_memory=kind == "pinned" and here.on_card)
        for way, (to, source) in {"up": (device, host), "down": (host, device)}.items():
            taken = seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True), here)
            found[f"{kind} {way}"] = here.size.moved / taken
    if here.on_card:
        for way in ("up", "down"):
            taken = seconds(_against_the_other(here.size.moved, way), here)
            found[f"pinned {way}, against the other way"] = here.size.moved / taken
    big = torch.zeros(here.size.moved, dtype=torch.uint8, device=here.device)
    found["within the device, read and written"] = 2 * big.nbytes / seconds(lambda: big.copy_(device), here)
    return {"bytes_per_second": found}


def _against_the_other(size: int, way: str) -> Callable[[], None]:
    """Returns a function that copies one way, while so much is copied the other way that it takes longer."""
    import torch

    def pair(way: str):  # (to, source)
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(size, dtype=torch.uint8, device="cuda")
        return (device, host) if way == "up" else (host, device)

    measured, other, stream = pair(way), pair("down" if way == "up" else "up"), torch.cuda.Stream()

    def copy() -> None:
        with torch.cuda.stream(stream):
            for _ in range(OTHER_WAY):
                other[0].copy_(other[1], non_blocking=True)
        measured[0].copy_(measured[1], non_blocking=True)

    return copy


def staged(here: Here) -> dict:
    """Measures how fast gradients come down and weights go up, as with master weights on the host.

    They are copied in pieces through pinned slots; the host computes nothing in between.
    """
    import torch

    from lowmem.system.copy_lanes import CardLane
    from lowmem.techniques.weights.link import StagedLink
    from made_up import SlowLane

    lane = CardLane(torch.device("cuda")) if here.on_card else SlowLane()
    moving = StagedLink(lane)
    tensors = [torch.ones(here.size.moved // 16, dtype=torch.bfloat16, device=here.device) for _ in range(8)]
    size = sum(t.nbytes for t in tensors)

    def down() -> None:
        for tensor in tensors:
            moving.fetch(tensor, lambda start, piece: None)
        moving.finish()

    def up() -> None:
        for tensor in tensors:
            moving.update(tensor, lambda rounded: None)
        moving.finish()
        for tensor in tensors:
            moving.wait(tensor)

    found = {name: size / seconds(way, here) for name, way in (("gradients down", down), ("weights up", up))}
    moving.close()
    return {"bytes_per_second": found}


def weights(here: Here) -> dict:
    """Measures how fast streamed weights go up, and how fast the host's memory is registered with CUDA.

    The weights come from registered memory, from unregistered memory, and from unregistered memory through staging.
    """
    import torch

    from lowmem.system.copy_lanes import CardLane
    from lowmem.techniques.weights.registered import Registered
    from made_up import SlowLane

    class Refusing(CardLane if here.on_card else SlowLane):
        def register(self, memory):
            return "to see what staging costs"

    make = Refusing.__base__
    lane, refusing = (one(torch.device("cuda")) if here.on_card else one() for one in (make, Refusing))
    source = torch.ones(here.size.moved, dtype=torch.uint8)
    to = torch.zeros(here.size.moved, dtype=torch.uint8, device=here.device)

    def up(over) -> float:
        rate = source.nbytes / seconds(lambda: over.hold(over.copy(to, source, over.mark())), here)
        assert torch.equal(to.cpu(), source)
        return rate

    staged = Registered(refusing, [source])
    found = {"weights up, unregistered": up(lane), "weights up, staged": up(staged)}
    staged.close()
    start = time.perf_counter()
    why = lane.register(source)
    if why is not None:
        return {"bytes_per_second": found, "why": why}
    found["memory registered"] = source.nbytes / (time.perf_counter() - start)
    found["weights up, registered"] = up(lane)
    lane.unregister(source)
    return {"bytes_per_second": found}


def products(here: Here) -> dict:
    """Measures operations per second of square matrix products on random numbers, and their errors."""
    import torch

    rates, off, dtypes = {}, {}, {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name in ("fp32", "TF32", *dtypes):
        dtype = dtypes.get(name, torch.float32)
        torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
        off[name] = _off(dtype, here)
        a, b = (torch.randn(here.size.side, here.size.side, device=here.device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def some(a=a, b=b, out=out) -> None:
            for _ in range(PRODUCTS):
                torch.mm(a, b, out=out)

        rates[name] = PRODUCTS * 2 * here.size.side**3 / seconds(some, here)
    torch.set_float32_matmul_precision("highest")
    has_tf32 = here.on_card and torch.cuda.get_device_capability() >= (8, 0)
    return {"operations_per_second": rates, "off": off, "right": right(off, has_tf32)}


def _off(dtype, here: Here) -> float:
    """Returns the relative error of a product, compared with the product of the same numbers in fp64."""
    import torch

    a, b = (torch.randn(EXACT, EXACT, device=here.device).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    return (((a @ b).double() - exact).norm() / exact.norm()).item()


def right(off: Mapping[str, float], has_tf32: bool) -> bool:
    """Returns whether fp32 has the error of fp32, and TF32 that of TF32 if the card has TF32."""
    expected = {"fp32": OFF_IN_FP32, "TF32": OFF_IN_TF32 if has_tf32 else OFF_IN_FP32}
    return all(least <= off[name] < most for name, (least, most) in expected.items())


def rates(here: Here) -> dict:
    """Returns the rates that the planner will use on this card, measured by the planner's own code."""
    from dataclasses import asdict

    from lowmem.plan.cost.machine import measured

    return asdict(measured("card", here.device))


def says(results: Mapping[str, dict]) -> str:
    speeds = results.get("link", {}).get("bytes_per_second", {})
    rates = results.get("products", {}).get("operations_per_second", {})
    parts = [f"{way} {speed / 1e9:.1f} GB/s" for way, speed in speeds.items() if way in SAID]
    return ", ".join(parts + [f"{name} {rate / 1e12:.4g} TFLOPS" for name, rate in rates.items()])


def table(results: Mapping[str, dict]) -> str:
    lines = ["| what | measured |", "|---|---|"]
    about = results.get("card", {})
    for key in ("taken_by_others_bytes", "context_bytes", "context_and_kernels_bytes", "workspace_bytes"):
        if about.get(key) is not None:
            lines.append(f"| {key.removesuffix('_bytes').replace('_', ' ')} | {about[key] / GIB:.3f} GiB |")
    for when, sizes in results.get("memory of the host", {}).items():
        free = f"{sizes['available'] / GIB:.1f} of {sizes['total'] / GIB:.1f} GiB"
        lines.append(f"| memory of the host, {when} | {free} |")
    for name in ("link", "gradients over the link", "weights over the link"):
        for way, speed in results.get(name, {}).get("bytes_per_second", {}).items():
            lines.append(f"| {way} | {speed / 1e9:.2f} GB/s |")
    products = results.get("products", {"operations_per_second": {}})
    for dtype, rate in products["operations_per_second"].items():
        lines.append(f"| products in {dtype} | {rate / 1e12:.4g} TFLOPS, off by {products['off'][dtype]:.0e} |")
    lines += [f"| {name} | {pages.says(one)} |" for name, one in results.items() if "state" in one]
    return "\n".join(lines)
