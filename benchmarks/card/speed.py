"""Stage 4: tokens per second beside other loops, and how much of the host's work hides behind the device's.

Four loops take turns step by step (benchmarks/turns.py). Of masters: the step beside that of the same passes without
an update, and the seconds that the host works in it; what is longer than the passes alone is waited for. Of boundaries:
a step that sends them to the host beside one that keeps them.
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from statistics import mean, median

from benchmarks.card.case import Case, Here, Size, Stage
from benchmarks.loops import WARM_UP
from benchmarks.side_by_side import apart
from benchmarks.turns import speed_ratio
from lowmem.units import GIB

STAGE = Stage(4, "speed", __name__, seconds=470, gib=12)
LOOPS = ("lowmem", "plain", "lightning", "trainer")
RUN = ("max_steps=12", "val_every=1000", "val_sequences=8", "save_every=1000", "scheduler=constant", "log_every=1")
ALONE = "passes without an update"
MASTERS = {
    ALONE: ["precision=bf16-true", "optim=sgd", "clip=null"],
    "masters that step early": ["precision=bf16-master", "optim=adamw8bit", "clip=null"],
    "masters that step after clipping": ["precision=bf16-master", "optim=adamw8bit"],
}
FOUR, WINDOW = ["accumulation=fixed", "accumulation.batches=4"], ", window of 4"
KEPT, AWAY = "boundaries that stay", "boundaries that travel"
BOUNDARIES = {
    KEPT: ["precision=bf16", "optim=sgd", "gradient_checkpointing=every_layer"],
    AWAY: ["precision=bf16", "optim=sgd", "gradient_checkpointing=offload"],
}


def cases(size: Size) -> Mapping[str, Case]:
    found = {f"four loops, {r} {model}": Case(partial(loops, of=(r, model)), 180) for r, model in size.loops}
    found |= {name: Case(partial(masters, typed=typed), 90) for name, typed in MASTERS.items()}
    found |= {name: Case(partial(run, typed=typed), 90) for name, typed in BOUNDARIES.items()}
    for name, typed in MASTERS.items() if size.whole else ():
        found[name + WINDOW] = Case(partial(masters, typed=[*typed, *FOUR]), 90)
    return found


def loops(here: Here, of: tuple[str, str]) -> dict:
    """Name of a loop -> tokens per second, peak and losses of each round; or why it failed."""
    from benchmarks.turns import together

    recipe, model = of
    rows = {loop: ["-m", "benchmarks.loops", loop, recipe, model, *here.typed()] for loop in LOOPS}
    found: dict[str, list[dict]] = {loop: [] for loop in LOOPS}
    for _ in range(here.size.rounds):
        for loop, one in together(rows, otherwise=lambda failure: {"why": str(failure)[-1500:]}).items():
            found[loop].append(one)
        here.keep({"loops": found})
    return {"loops": found}


def run(here: Here, typed: list[str]) -> dict:
    summary = here.train(*here.size.model, *RUN, *typed, "plan=off")
    keys = ("seconds_per_step", "tokens_per_second", "train_loss")
    return {key: summary[key] for key in keys} | {"device_peak": summary["peak_bytes"]["device"]}


def masters(here: Here, typed: list[str]) -> dict:
    """A run with a stop-watch on the host: seconds of its work, and seconds that the loop stands still for it."""
    from lowmem.module import CausalLM
    from lowmem.offload.link import StagedLink
    from lowmem.precision import master

    if not here.on_card:
        stand_in(master)
    watch = Watch()
    for owner, name in ((master.Master, "add"), (master, "_step")):
        watch.put(owner, name, "host")
    for name in ("fetch", "wait", "finish"):
        watch.put(StagedLink, name, "loop")
    watch.put(CausalLM, "training_step", "step")
    found = run(here, typed)
    return found | {"host_seconds": watch.per_step("host"), "loop_stands_still": watch.per_step("loop")}


def stand_in(master) -> None:
    """Without a card: the link's own slots and thread, over copies that run late."""
    from lowmem.offload.link import StagedLink
    from made_up import SlowLane

    master.link_to = lambda device: StagedLink(SlowLane(), slot_bytes=1 << 14)


class Watch:
    """Seconds that functions take, step by step. The last step's host work may end in the next one's."""

    def __init__(self) -> None:
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
    """(share of the step that waits for the host, share of the host's work that is hidden behind the passes)."""
    longer = max(0.0, of["seconds_per_step"] - alone["seconds_per_step"])
    return longer / of["seconds_per_step"], 1 - min(1.0, longer / max(of["host_seconds"], 1e-9))


def _against(name: str, results: Mapping[str, dict]) -> dict | None:
    """The passes alone of a case of masters, of as many micro-batches."""
    return results.get(ALONE + (WINDOW if name.endswith(WINDOW) else ""))


def says(results: Mapping[str, dict]) -> str:
    parts = []
    for name, one in results.items():
        for other in LOOPS[1:]:
            if (ratio := ratio_to(other, one)) is not None:
                parts.append(f"{name.removeprefix('four loops, ')}: {ratio:.2f} of {other}")
        if name.startswith("masters") and (alone := _against(name, results)):
            parts.append(f"{name}: {waits(one, alone)[0]:.0%} waits")
    if KEPT in results and AWAY in results:
        ratio = results[AWAY]["seconds_per_step"] / results[KEPT]["seconds_per_step"]
        parts.append(f"boundaries that travel: {ratio:.2f} of the time")
    return ", ".join(parts)


def ran(rounds: list[dict]) -> bool:
    return bool(rounds) and not any("why" in one for one in rounds)


def ratio_to(other: str, one: Mapping) -> float | None:
    """lowmem's speed over that of another loop, step beside step; None where one of them failed."""
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
    lines += ["", "| run | s per step | of it waits | of the host's work is hidden | tokens/s | peak GiB |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, one in results.items():
        if "seconds_per_step" in one:
            alone = _against(name, results) if name.startswith("masters") else None
            shares = [f"{share:.0%}" for share in waits(one, alone)] if alone else ["-", "-"]
            figures = f"{one['tokens_per_second']:,.0f} | {one['device_peak'] / GIB:.3f}"
            lines.append(f"| {name} | {one['seconds_per_step']:.4f} | {' | '.join(shares)} | {figures} |")
    return "\n".join(lines)


def _cells(loop: str, rounds: list[dict], one: Mapping) -> str:
    if not ran(rounds):
        why = next((round["why"] for round in rounds if "why" in round), "-")
        return f"{why.strip().splitlines()[-1].replace('|', ' ')} | - | - | -"
    plain, ratio = one["loops"]["plain"], ratio_to(loop, one) if loop != "lowmem" else None
    speed = mean(round["tokens_per_second"] for round in rounds)
    losses = apart(rounds[0]["losses"], plain[0]["losses"]) if loop != "plain" and ran(plain) else "-"
    return f"{speed:,.0f} | {'-' if ratio is None else f'{ratio:.3f}'} | {rounds[0]['peak_bytes'] / GIB:.3f} | {losses}"
