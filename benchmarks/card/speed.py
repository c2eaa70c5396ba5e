"""Stage 4 compares tokens per second with other training loops, and measures how much of the host's work is hidden.

Four loops take turns, step by step (benchmarks/turns.py). With master weights, a step is compared with one that makes
the same passes without an update: the extra time is time in which the device waits for the host. With offloaded
boundaries, a step that sends them to the host is compared with one that keeps them on the device. Runs that are
compared follow each other in one process.
"""

import shutil
import threading
import time
from collections.abc import Mapping
from functools import partial
from statistics import mean, median

from benchmarks.card.case import Case, Here, LeftOut, Size, Stage
from benchmarks.loops import WARM_UP
from benchmarks.side_by_side import apart
from benchmarks.turns import speed_ratio
from lowmem.system.units import GIB

STAGE = Stage(4, "speed", __name__, seconds=470, gib=8)
LOOPS = ("lowmem", "plain", "lightning", "trainer")
RUN = ("max_steps=12", "val_every=1000", "val_sequences=8", "save_every=1000", "scheduler=constant", "log_every=1")
ALONE = "passes without an update"
MASTERS = {
    ALONE: ["precision=bf16-true", "optim=sgd", "clip=null"],
    "masters that step early": ["precision=bf16-master", "optim=adamw8bit", "clip=null"],
    "masters that step after clipping": ["precision=bf16-master", "optim=adamw8bit"],
}
FOUR = ("accumulation=fixed", "accumulation.batches=4")
KEPT, AWAY = "boundaries that stay", "boundaries that travel"
BOUNDARIES = {
    KEPT: ["precision=bf16", "optim=sgd", "gradient_checkpointing=every_layer"],
    AWAY: ["precision=bf16", "optim=sgd", "gradient_checkpointing=offload"],
}


def cases(size: Size) -> Mapping[str, Case]:
    found = {
        f"four loops, {r} {model}": Case(partial(loops, of=(r, model), gib=gib), 180) for r, model, gib in size.loops
    }
    found |= {"masters": Case(masters, 200), "boundaries": Case(boundaries, 150)}
    return found | ({"masters, window of 4": Case(partial(masters, more=FOUR), 200)} if size.whole else {})


def loops(here: Here, of: tuple[str, str], gib: float) -> dict:
    """Returns {loop: the tokens per second, peak and losses of each round, or why it failed}.

    Raises:
        LeftOut: the card has no room for all loops: one computes at a time, but each has its model on the card.
    """
    from benchmarks.turns import take_turns

    if here.memory < gib * GIB:
        raise LeftOut(f"the four loops together need {gib:g} GiB and the card has {here.memory / GIB:.1f}")
    recipe, model = of
    rows = {loop: ["-m", "benchmarks.loops", loop, recipe, model, *here.typed()] for loop in LOOPS}
    found: dict[str, list[dict]] = {loop: [] for loop in LOOPS}
    for _ in range(here.size.rounds):
        for loop, one in take_turns(rows, otherwise=lambda failure: {"why": str(failure)[-1500:]}).items():
            found[loop].append(one)
        here.keep({"loops": found})
    return {"loops": found}


def run(here: Here, typed: list[str]) -> dict:
    summary = here.train(*here.size.model, *RUN, *typed, "plan=off")
    shutil.rmtree(here.folder / "run")  # with its checkpoint
    here.release()
    keys = ("seconds_per_step", "tokens_per_second", "train_loss")
    return {key: summary[key] for key in keys} | {"device_peak": summary["peak_bytes"]["device"]}


def boundaries(here: Here) -> dict:
    return {"runs": {name: run(here, typed) for name, typed in BOUNDARIES.items()}}


def masters(here: Here, more: tuple[str, ...] = ()) -> dict:
    """Measures how long the host works in each step, and how long the training loop waits for it."""
    from lowmem.techniques.precision import host_masters as master
    from lowmem.techniques.weights.link import StagedLink
    from lowmem.training.module import CausalLM

    if not here.on_card:
        stand_in(master)
    watch, runs = Watch(), {}
    for owner, name in ((master.HostWeight, "add"), (master.HostMasters, "_step")):
        watch.put(owner, name, "host")
    for name in ("fetch", "wait", "finish"):
        watch.put(StagedLink, name, "loop")
    watch.put(CausalLM, "training_step", "step")
    for name, typed in MASTERS.items():
        watch.begin()
        found = run(here, [*typed, *more])
        runs[name] = found | {"host_seconds": watch.per_step("host"), "loop_stands_still": watch.per_step("loop")}
        here.keep({"runs": runs})
    return {"runs": runs}


def stand_in(master) -> None:
    """Makes copies late on purpose where there is no card; the link's slots and its thread are the real ones."""
    from lowmem.techniques.weights.link import StagedLink
    from made_up import SlowLane

    master.link_to = lambda device: StagedLink(SlowLane(), slot_bytes=1 << 14)


class Watch:
    """Measures the seconds that functions take, step by step; a step's host work may end during the next step."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins a run."""
        self.seconds = {"host": 0.0, "loop": 0.0}
        self.steps: list[dict[str, float]] = []

    def put(self, owner: object, name: str, kind: str) -> None:
        inner = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._add(kind, time.perf_counter() - start)

        setattr(owner, name, timed)

    def _add(self, kind: str, seconds: float) -> None:
        if kind == "step":
            self.steps.append(self.seconds)
            self.seconds = {"host": 0.0, "loop": 0.0}
        elif kind == "host" or threading.current_thread().name != "host-step":
            self.seconds[kind] += seconds

    def per_step(self, kind: str) -> float:
        return median(step[kind] for step in self.steps[3:])


def waits(of: Mapping[str, float], alone: Mapping[str, float]) -> tuple[float, float]:
    """Returns (share of the step spent waiting for the host, share of the host's work hidden behind the passes)."""
    longer = max(0.0, of["seconds_per_step"] - alone["seconds_per_step"])
    return longer / of["seconds_per_step"], 1 - min(1.0, longer / max(of["host_seconds"], 1e-9))


def says(results: Mapping[str, dict]) -> str:
    parts = []
    for name, one in results.items():
        for other in LOOPS[1:] if "loops" in one else ():
            ratio, of = ratio_to(other, one), f"{name.removeprefix('four loops, ')}:"
            parts.append(f"{of} {other} or lowmem failed" if ratio is None else f"{of} {ratio:.2f} of {other}")
        runs = one.get("runs", {})
        if ALONE in runs:
            told = ", ".join(f"{waits(run, runs[ALONE])[0]:.0%}" for run in list(runs.values())[1:])
            parts.append(f"{name}: {told} of the step waits, early and after clipping")
        if KEPT in runs and AWAY in runs:
            ratio = runs[AWAY]["seconds_per_step"] / runs[KEPT]["seconds_per_step"]
            parts.append(f"{AWAY}: {ratio:.2f} of the time")
    return ", ".join(parts)


def ran(rounds: list[dict]) -> bool:
    return bool(rounds) and not any("why" in one for one in rounds)


def ratio_to(other: str, one: Mapping) -> float | None:
    """Returns lowmem's speed over that of another loop, step by step, or None if one of them failed."""
    ours, theirs = (one.get("loops", {}).get(loop, []) for loop in ("lowmem", other))
    return speed_ratio(ours, theirs, WARM_UP) if ran(ours) and ran(theirs) else None


def table(results: Mapping[str, dict]) -> str:
    lines = [
        "| recipe and model | loop | tokens/s | speed of lowmem, over it | peak GiB | losses |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        for loop, rounds in one.get("loops", {}).items():
            lines.append(f"| {name} | {loop} | {_cells(loop, rounds, one)} |")
    lines += ["", "| case | run | s per step | of it waits | of the host's work is hidden | tokens/s | peak GiB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, one in results.items():
        alone = one.get("runs", {}).get(ALONE)
        for run, of in one.get("runs", {}).items():
            shares = [f"{share:.0%}" for share in waits(of, alone)] if alone and of is not alone else ["-", "-"]
            figures = f"{of['tokens_per_second']:,.0f} | {of['device_peak'] / GIB:.3f}"
            lines.append(f"| {name} | {run} | {of['seconds_per_step']:.4f} | {' | '.join(shares)} | {figures} |")
    return "\n".join(lines)


def _cells(loop: str, rounds: list[dict], one: Mapping) -> str:
    if not ran(rounds):
        why = next((round["why"] for round in rounds if "why" in round), "-")
        return f"{why.strip().splitlines()[-1].replace('|', ' ')} | - | - | -"
    plain, ratio = one["loops"]["plain"], ratio_to(loop, one) if loop != "lowmem" else None
    speed = mean(round["tokens_per_second"] for round in rounds)
    losses = apart(rounds[0]["losses"], plain[0]["losses"]) if loop != "plain" and ran(plain) else "-"
    return f"{speed:,.0f} | {'-' if ratio is None else f'{ratio:.3f}'} | {rounds[0]['peak_bytes'] / GIB:.3f} | {losses}"
