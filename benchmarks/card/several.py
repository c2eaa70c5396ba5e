"""Stage 8 tests training on several cards, if there are at least two.

Each strategy trains the same model on all visible cards. The stage compares each allocator's peak with the prediction,
and tokens per second with those of one card. fsdp_offload must have its shards in pinned memory. A rank that hangs must
end the run, at NCCL's time limit, with an error message of lowmem.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.card.case import Case, Here, LeftOut, Size, Stage
from benchmarks.card.memory import both, reserved_by_phase
from benchmarks.card.process import EVERY_CARD
from benchmarks.runner import ROOT
from lowmem.system.signals import ECHO_SECONDS
from lowmem.system.units import GIB

STAGE = Stage(8, "several cards", __name__, seconds=475, gib=8)
ONE, HANGS = "one card", "a rank that hangs"
WHOLE = (ONE, "ddp")  # each rank has all weights
DIVIDED = 0.9  # largest share of the weights on a rank; half of them, except for a pipeline's embedding
MORE = 1.1  # largest ratio of measured to predicted memory
STRATEGIES = ("ddp", "fsdp", "fsdp_offload", "tensor_parallel", "pipeline")
REHEARSED = ("fsdp_offload", HANGS)  # a strategy that divides the weights, and a run that ends early
RUN = (
    *("max_steps=12", "val_every=1000", "save_every=1000", "scheduler=constant", "log_every=1", "precision=bf16"),
    *("accumulation=fixed", "accumulation.batches=4", "optim=adamw", "export=null"),
)
SECONDS = (100, 160)  # time limits of a run and of one that hangs
LEAVES = 20  # seconds that the ranks have to leave the cards
LIMIT = 20  # seconds after which a rank that does not answer is lost
SEEN, RANKS = "seen-{}.json", "benchmarks.card.ranks"
SAYS = r"another rank did not answer (in time|within \d+ seconds)"


def cases(size: Size) -> Mapping[str, Case]:
    wanted = (ONE, *STRATEGIES, HANGS) if size.whole else REHEARSED
    # these processes import nothing heavy, because with one card they have nothing to do
    return {name: Case(partial(case, name=name), SECONDS[name == HANGS] + LEAVES, "json") for name in wanted}


def case(here: Here, name: str) -> dict:
    """Runs one case. Raises: LeftOut: there is only one card."""
    if (cards := counted(here)) < 2:
        raise LeftOut("it needs two cards: not run")
    cards = 1 << cards.bit_length() - 1  # the largest power of two, which divides the number of heads
    if name == HANGS:
        return hang(here, cards)
    return strategy(here, name, 1 if name == ONE else cards)


def counted(here: Here) -> int:
    """Returns the number of cards that may be used, or 2 in a rehearsal, which runs two processes instead."""
    if not here.on_card:
        return 2
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(ask, env=environment(), capture_output=True, text=True, check=True).stdout)


def environment() -> dict[str, str]:
    """Returns the environment with every card that the user made visible, though a case usually sees one.

    It sets no number of threads, because the ranks divide the processors themselves.
    """
    cards, of_case = os.environ.get(EVERY_CARD), (EVERY_CARD, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    rest = {key: value for key, value in os.environ.items() if key not in of_case}
    return rest | ({"CUDA_VISIBLE_DEVICES": cards} if cards else {})


def train(here: Here, *typed: str, seconds: float = SECONDS[0]) -> tuple[int, str]:
    """Runs train.py, which starts the ranks. Returns its exit code and its output.

    Args:
        seconds: time limit, after which the run and its ranks are ended, so that the cards are free for the next run.
    """
    lines = [*here.typed(), *here.size.model, *RUN, *typed, f"hydra.run.dir={here.folder / 'run'}"]
    ran = subprocess.Popen(
        [sys.executable, "train.py", *lines],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = ran.communicate(timeout=seconds * here.size.patience)
    except subprocess.TimeoutExpired:
        for _ in range(2):  # the second signal ends it at once
            ran.terminate()
            time.sleep(2 * ECHO_SECONDS)
        said, _ = ran.communicate()
    return ran.returncode, said


def strategy(here: Here, name: str, cards: int) -> dict:
    """Trains with one strategy. Raises: SystemExit: the run failed, with its last lines of output."""
    typed = f"strategy={'auto' if name == ONE else name}", f"devices={cards}"
    watched = f"+callbacks.seen._target_={RANKS}.Seen", f"+callbacks.seen.folder={here.folder}"
    code, said = train(here, *typed, *watched)
    if code:
        raise SystemExit(said[-2000:])
    return read_results(here, here.folder / "run", name)


def read_results(here: Here, run: Path, name: str) -> dict:
    """Reads the results that a run of several ranks has left in its folder."""
    summary, predicted = json.loads((run / "summary.json").read_text()), None
    seen = [json.loads((here.folder / SEEN.format(rank)).read_text()) for rank in range(len(summary["ranks"]))]
    folders = [run, *(run / f"rank-{rank}" for rank in range(1, len(summary["ranks"])))]
    if summary["predicted"]:
        predicted = {key: summary["predicted"][f"{key}_bytes"] for key in ("device_peak", "reserved_peak")}
    one = {
        "predicted": predicted,
        "allocated": [rank["device"] for rank in summary["ranks"]],
        "reserved": [max(reserved_by_phase(folder / "memory.csv").values(), default=0) for folder in folders],
        "weights": [rank["weights"] / summary["weights_bytes"] for rank in summary["ranks"]],
        "tokens_per_second": summary["tokens_per_second"],
        "train_loss": summary["train_loss"],
        "pinned": all(one["pinned"] for one in seen),
        "beside": max(one["beside"] for one in seen),
    }
    return one | {"right": right(one, name, here.on_card)}


def right(one: Mapping, name: str, on_card: bool) -> bool:
    """Returns whether a run's results are right.

    The loss must be finite, no rank may have all of the divided weights, no card may use more than `MORE` times the
    prediction, and fsdp_offload must have its shards in pinned memory.
    """
    found = [math.isfinite(one["train_loss"])]
    if name not in WHOLE:
        found.append(max(one["weights"]) < DIVIDED)
    if on_card and one["predicted"]:
        found.append(max(one["allocated"]) <= MORE * one["predicted"]["device_peak"])
    if on_card and name == "fsdp_offload":
        found.append(one["pinned"])
    return all(found)


def hang(here: Here, cards: int) -> dict:
    start = time.monotonic()
    limit = f"strategy.timeout={LIMIT}", f"+callbacks.hangs._target_={RANKS}.Hangs"
    code, said = train(here, "strategy=ddp", f"devices={cards}", *limit, seconds=SECONDS[1])
    sentence = next((line for line in said.splitlines() if re.search(SAYS, line)), None)
    return {"code": code, "said": sentence, "seconds": time.monotonic() - start, "right": bool(code and sentence)}


def beside_one(results: Mapping[str, dict], name: str) -> float | None:
    """Returns tokens per second of all cards over those of one card, or None if the latter did not run."""
    return results[name]["tokens_per_second"] / results[ONE]["tokens_per_second"] if ONE in results else None


def says(results: Mapping[str, dict]) -> str:
    parts = []
    for name, one in results.items():
        if name == HANGS:
            parts.append(f"{name}: {one['said'] or 'NO SENTENCE'} ({one['seconds']:.0f} s)")
        elif name != ONE:
            speed = f", {times:.2f} times one card" if (times := beside_one(results, name)) else ""
            beside = f"{max(one['allocated']) / GIB:.2f} GiB, and {one['beside'] / GIB:.2f} that are not torch's"
            parts.append(f"{name}: {beside}, {len(one['allocated'])} ranks{speed}")
    return "; ".join(parts)


def table(results: Mapping[str, dict]) -> str:
    lines = [
        "| strategy | ranks | live GiB, predicted / measured | reserved | of all ranks | weights of the model's "
        "| tokens/s | of one card's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(results, name) for name in results if name != HANGS)])


def _line(results: Mapping[str, dict], name: str) -> str:
    one = results[name]
    planned = one["predicted"] or {"device_peak": math.nan, "reserved_peak": math.nan}
    peaks = {"device_peak": max(one["allocated"]), "reserved_peak": max(one["reserved"])}
    cells = [name, str(len(one["allocated"]))]
    cells += [both(planned[key], size) if size else "-" for key, size in peaks.items()]
    cells += [", ".join(f"{size / GIB:.2f}" for size in one["allocated"])]
    cells += [", ".join(f"{share:.1%}" for share in one["weights"]), f"{one['tokens_per_second']:,.0f}"]
    times = beside_one(results, name)
    return f"| {' | '.join([*cells, '-' if times is None else f'{times:.2f}'])} |"
