"""Times lowmem's recipes for models whose plain training does not fit on a card: streamed weights, masters on the host,
adapters and memory caps. Another case trains GPT-2 twice and compares the losses.

Runs whose losses must be bit-identical have deterministic=true, because by default CUDA's flash attention adds
gradients in the order in which its thread blocks end.
"""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

from benchmarks.card import ours, prediction
from benchmarks.card.blocks import Blocks, attempt, seconds_per_step
from benchmarks.card.case import Here, LeftOut
from lowmem.system.units import GIB
from lowmem.training.training import DidNotFit

STREAMED, RESIDENT = "8B, streamed by layer, 8 x 2048", "8B, resident, 8 x 2048"
QUARTER = "8 of 32 layers of 8B, streamed"  # the card holds two layers at a time, regardless of depth
EQUAL = (QUARTER, "8 of 32 layers of 8B, resident")
HOST = {STREAMED: 58, RESIDENT: 82}  # GiB of host memory, as predicted, plus a margin
CARD = 20  # GiB on the card with resident weights, as predicted, plus a margin
TRIES = 4  # number of caps that `smallest` tries


def streamed(here: Here) -> Iterator[dict]:
    """Yields the rows of an 8B model with weights streamed by layer, and of a model with 8 of its 32 layers, with
    streamed and with resident weights. The losses of the last two runs must be bit-identical.

    Raises:
        LeftOut: the host has too little memory.
    """
    _require_host(here, STREAMED)
    yield attempt(partial(hidden, STREAMED, here)) | {"run": STREAMED}
    here.release()
    runs = []
    for name in EQUAL:
        row = _row(here, name, Blocks(here, 2, warm_up=1), "deterministic=true")
        runs.append(row | {"run": f"{name}, deterministic"})
    equal = same_losses(*runs)
    yield runs[0]
    yield runs[1] | {"found": {"losses of the two runs have equal bits": equal}, "right": equal}


def resident(here: Here) -> Iterator[dict]:
    """Yields the row of an 8B model whose weights stay on the card. Raises: LeftOut: the card or the host has too
    little memory."""
    _require_host(here, RESIDENT)
    if here.gib() < CARD:
        raise LeftOut(f"it needs {CARD} GiB and the card has {here.gib():.0f}")
    yield _row(here, RESIDENT, _few(here))


def _row(here: Here, name: str, watch: Blocks, *more: str) -> dict:
    """Trains a run of `recipes.RUNS` and frees its memory. Returns its row; after an error, a row with the error as
    `why`."""
    row = attempt(partial(ours.train, name, here, watch, *more)) | {"run": name}
    here.release()
    return row


def _require_host(here: Here, name: str) -> None:
    if here.host_gib() < HOST[name]:
        raise LeftOut(f"it needs {HOST[name]} GiB of host memory, and {here.host_gib():.0f} are available")


def same_losses(one: dict, other: dict) -> bool:
    return bool(one.get("losses")) and one.get("losses") == other.get("losses")


def _few(here: Here) -> Blocks:
    """Returns a block for runs whose steps take seconds: one warm-up step, then three timed steps."""
    return Blocks(here, 3, warm_up=1)


def hidden(name: str, here: Here, *more: str) -> dict:
    """Trains with streamed weights. The returned row also has the result of `hidden_share`."""
    import torch

    from benchmarks.card import lanes
    from lowmem.offload import streamed as technique

    lane = lanes.OnCard(torch.device("cuda", torch.cuda.current_device())) if here.on_card else lanes.Rehearsed()
    with patch.object(technique, "lane_of", lambda _: lane):
        row = ours.train(name, here, _few(here), *more)
    here.settle()
    share = hidden_share(lanes.seconds(lane.copied), lanes.seconds(lane.waited))
    return row | {"found": {"share of the copy time that is hidden": share}}


def hidden_share(copied: float, waited: float) -> float | None:
    """Returns the share of the copy time in which the device did not wait, or None if nothing was copied."""
    return 1 - min(1.0, waited / copied) if copied else None


def masters(here: Here) -> Iterator[dict]:
    """Yields two rows of a 4B model: in the first run, each master is updated as soon as its gradient arrives; in the
    second, all masters are updated after clipping."""
    for name in ("4B, masters that step early, 2 x 2048", "4B, masters that step after clipping, 2 x 2048"):
        yield _row(here, name, Blocks(here, 10 if here.on_card else 2, warm_up=2))


def lora(here: Here) -> Iterator[dict]:
    """Yields the rows of LoRA on an 8B model, with streamed and with resident weights."""
    yield from _adapters(here, "8B LoRA, streamed, 4 x 1024", "8B LoRA, resident, 4 x 1024")


def qlora(here: Here) -> Iterator[dict]:
    """Yields the rows of QLoRA and LoRA on 8 of the 32 layers of an 8B model. On the host, quantizing all layers would
    take minutes."""
    part = "8 of 32 layers of 8B"
    yield from _adapters(here, f"{part}, QLoRA, streamed, 4 x 1024", f"{part}, LoRA, streamed, 4 x 1024")


def _adapters(here: Here, *names: str) -> Iterator[dict]:
    for name in names:
        yield _row(here, name, Blocks(here, 6 if here.on_card else 2, warm_up=2))


def twice(here: Here) -> Iterator[dict]:
    """Yields a row of GPT-2 with deterministic kernels and a row without. Each variant is trained twice, and its row
    says whether the losses of both trainings are bit-identical."""
    name = "GPT-2 124M, bf16"
    ways = {True: ["deterministic=true"], False: []}
    rows = {}
    for way, more in ways.items():
        runs = [attempt(partial(ours.train, name, here, Blocks(here, 10), *more)) for _ in range(2)]
        here.release()
        rows[way] = runs[1] | {"run": f"{name}{', deterministic' * way}"}
        rows[way]["found"] = {"equal bits in a second run": same_losses(*runs)}
    times = {way: seconds_per_step(row) for way, row in rows.items()}
    if None not in times.values():
        rows[True]["found"]["times as long as without"] = times[True] / times[False]
    yield from rows.values()


# --- caps -------------------------------------------------------------------------------------------------------------


def capped(here: Here) -> Iterator[dict]:
    """Yields rows of a model with 8 of the 32 layers of an 8B model: under a cap of 4 GiB and under a cap of 8 GiB. If
    there is a card and a prediction, also yields a row with the smallest cap that works and the predicted cap."""
    for cap in ("4GiB", "8GiB"):
        row = _row(here, QUARTER, _few(here), f"memory.limit={cap}")
        yield row | {"run": f"{QUARTER}, under {cap}"}
    planned = prediction.predicted(QUARTER).get("smallest_cap_bytes")
    if planned and here.on_card:  # the small model of a rehearsal needs less than the plan for a card
        least, tried = smallest(planned, partial(_works, here))
        found = {"smallest cap that works, GiB": least and least / GIB, "predicted, GiB": planned / GIB}
        yield {"run": f"{QUARTER}: the smallest cap", "by": "lowmem", "found": found | {"works, by GiB": tried}}


def smallest(planned: int, works: Callable[[int], bool], tries: int = TRIES) -> tuple[int | None, dict[str, bool]]:
    """Searches, by bisection between 0.9 and 1.1 times `planned`, for the smallest cap that works. The first cap tried
    is `planned` itself.

    Returns:
        The smallest tried cap that works, in bytes (None if no tried cap works), and a dict that maps each tried cap,
        in GiB, to whether it works.
    """
    low, high, tried, least = round(0.9 * planned), round(1.1 * planned), {}, None
    cap = planned
    for _ in range(tries):
        tried[f"{cap / GIB:.3f}"] = fits = works(cap)
        low, high, least = (low, cap, cap) if fits else (cap, high, least)
        cap = (low + high) // 2
    return least, tried


def _works(here: Here, cap: int) -> bool:
    try:
        ours.train(QUARTER, here, Blocks(here, 1, warm_up=1), f"memory.limit={cap}")
        return True
    except DidNotFit:
        return False
    finally:
        here.release()


def xl(here: Here) -> Iterator[dict]:
    """Yields the row of GPT-2 XL with fp32 masters of fp16 weights, under a cap of 12 GiB. A step has 64 sequences, in
    micro-batches of 4."""
    name = "GPT-2 XL, fp16 masters, 64 x 1024"
    yield _row(here, name, _few(here))
