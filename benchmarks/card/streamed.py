"""Stage 7 compares streamed weights with resident ones: memory, speed, and the share of the copies that is hidden.

It trains GPT-2 XL and Llama-3.1-8B from random weights for a few steps and saves nothing. The card's memory is compared
with the prediction and with the limit in `ROWS`. Copy time is hidden as far as the device did not wait for it, measured
with CUDA events.
"""

import math
from collections.abc import Mapping
from functools import partial
from unittest.mock import patch

from benchmarks.card.case import Case, Here, LeftOut, Size, Stage
from benchmarks.card.memory import both, reserved_by_phase, stand_in
from benchmarks.plan_error import DRY, sized
from lowmem.system.units import GIB

STAGE = Stage(7, "weights that stream", __name__, seconds=475, gib=4)
RECIPE = ("precision=bf16-master", "optim=adamw8bit", "clip=null", "gradient_checkpointing=offload", "loss=tiled")
RUN = ("max_steps=4", "val_every=1000", "save_every=1000", "scheduler=constant", "log_every=1")
WAYS = ("streamed", "resident")
XL = ("model=gpt2-xl", "model.pretrained=false", *DRY)
LLAMA = ("model=llama-3.1-8b", "model.pretrained=false")
# name -> (overrides, most GiB of the device that streamed weights may use)
ROWS = {
    "GPT-2 XL, 4 x 1024": ((*XL, *sized(4, 1024)), 1.1),
    "Llama-3.1-8B, 1 x 2048": ((*LLAMA, *sized(1, 2048)), 2.8),
    "Llama-3.1-8B, 1 x 4096": ((*LLAMA, *sized(1, 4096)), 3.5),
}
SECONDS = (150, 300, 300)


def cases(size: Size) -> Mapping[str, Case]:
    rows = list(zip(ROWS, SECONDS, strict=True))[: None if size.whole else 1]
    return {name: Case(partial(row, name=name), seconds) for name, seconds in rows}


def row(here: Here, name: str) -> dict:
    """Trains with streamed and with resident weights, as far as card and host have the memory.

    Raises:
        LeftOut: the memory is too small even for streamed weights.
    """
    from lowmem.system.errors import Refused

    typed, asked = ROWS[name]
    stand_in(here)
    runs: dict[str, dict] = {}
    for way in WAYS:
        try:
            runs[way] = run(here, way, [*typed, *here.size.small])
        except Refused as why:
            if not runs:
                raise LeftOut(str(why)) from None
            runs[way] = {"why": str(why)}
        here.keep({"runs": runs})
        here.release()
    return {"runs": runs, "asked": asked, "right": right(runs, asked) if here.on_card else True}


def right(runs: Mapping[str, Mapping], asked: float) -> bool:
    """Returns whether streamed weights stay within their limit, and train to the loss of resident ones (within 1%)."""
    losses = [run["train_loss"] for run in runs.values() if "why" not in run]
    learns = all(map(math.isfinite, losses)) and max(losses) - min(losses) <= 0.01 * min(losses)
    return learns and runs["streamed"]["allocated"] <= asked * GIB


def run(here: Here, way: str, typed: list[str]) -> dict:
    """Trains a few steps, without a checkpoint and without an export, which would be 16 GB each.

    Raises:
        Refused: the run does not fit; the message has the numbers.
    """
    import torch

    from benchmarks.card import lanes
    from lowmem.config.check import check
    from lowmem.config.settle import run_of
    from lowmem.plan import at_start
    from lowmem.techniques.weights import streamed
    from lowmem.training.training import training_session

    lines = [*here.typed(), *RECIPE, *RUN, *typed, f"weights={way}"]
    cfg = run_of(lines).resolved()
    check(cfg, {})
    prediction = at_start.checked(cfg, lines)
    lane = lanes.OnCard(torch.device("cuda")) if here.on_card else lanes.Rehearsed()
    with (
        patch.object(streamed, "lane_of", lambda _: lane),
        training_session(cfg, here.folder / way, keeps=False) as training,
    ):
        if here.on_card:
            torch.cuda.synchronize()
        predicted = prediction.based_on(training.rss_before_model).as_dict()
        found = {
            "predicted": {key: predicted[f"{key}_bytes"] for key in ("device_peak", "reserved_peak")},
            "allocated": training.watchers.meter.peak_bytes["device"],
            "host": training.watchers.meter.peak_bytes["host_rss"],
            "tokens_per_second": training.watchers.metrics.tokens_per_second(),
            "train_loss": training.watchers.metrics.train_loss,
            "copied_seconds": lanes.seconds(lane.copied),
            "waited_seconds": lanes.seconds(lane.waited),
        }
    return found | {"reserved": max(reserved_by_phase(here.folder / way / "memory.csv").values())}


def hidden(run: Mapping) -> float | None:
    """Returns the share of the copy time in which the device did not wait, or None if nothing was copied."""
    if not run["copied_seconds"]:
        return None
    return 1 - min(1.0, run["waited_seconds"] / run["copied_seconds"])


def ratio(one: Mapping) -> float | None:
    """Returns tokens per second of streamed over resident weights, or None if one of the two did not run."""
    rates = [one["runs"].get(way, {}).get("tokens_per_second") for way in WAYS]
    return rates[0] / rates[1] if all(rates) else None


def says(results: Mapping[str, dict]) -> str:
    parts = []
    for name, one in results.items():
        streamed = one["runs"]["streamed"]
        speed = f", {ratio(one):.2f} of the speed of resident weights" if ratio(one) else ""
        parts.append(
            f"{name}: {streamed['allocated'] / GIB:.2f} GiB, {streamed['tokens_per_second']:,.0f} tokens/s{speed}"
        )
    return "; ".join(parts)


def table(results: Mapping[str, dict]) -> str:
    lines = [
        "| run | weights | live GiB, predicted / measured | asked | reserved | host GiB | tokens/s | copies hidden |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        for way, run in one["runs"].items():
            lines.append(f"| {name} | {way} | {_cells(run, one.get('asked') if way == 'streamed' else None)} |")
    return "\n".join(lines)


def _cells(run: Mapping, asked: float | None) -> str:
    if "why" in run:
        return f"{run['why'].replace('|', ' ')} | - | - | - | - | -"
    predicted, share = run["predicted"], hidden(run)
    live, held = both(predicted["device_peak"], run["allocated"]), both(predicted["reserved_peak"], run["reserved"])
    rest = [f"{run['host'] / GIB:.1f}", f"{run['tokens_per_second']:,.0f}", "-" if share is None else f"{share:.0%}"]
    return " | ".join([live, "-" if asked is None else f"<= {asked}", held, *rest])
