"""Predicts the memory and the time of every run of `recipes.RUNS` on a card, without the card.

The predictions are made and committed before a card measures anything, and the page shows them next to the
measurements. Times are computed from the planner's counts of operations and bytes, and from the rates in conf/gpu.yaml.
The host is assumed to have sixteen cores and a memory bandwidth of 150 GB/s. On this host, each core runs the optimizer
as fast as a core in benchmarks/results/host_optimizer.md, unless this bandwidth limits all cores together.
"""

import json
import sys
from collections.abc import Mapping

from benchmarks.card import recipes
from benchmarks.runner import RESULTS, machine, measure
from lowmem.system.units import GIB

FILE = RESULTS / "card_predicted.json"
CORES = 16
KEYS = ("peak_bytes", "reserved_bytes", "smallest_cap_bytes", "host_bytes", "seconds_per_step")


def write(card: str) -> int:
    """Predicts all runs for a card of conf/gpu.yaml, each in a separate process. Returns the exit code."""
    from lowmem.config import cards

    if card not in cards.cards():
        print(
            f"--predict {card}: not a card of conf/gpu.yaml. Type one of {', '.join(cards.cards())}.", file=sys.stderr
        )
        return 2
    rows = measure({name: ["-m", "benchmarks.card.prediction", card, name] for name in recipes.RUNS}, 1)
    found = {"machine": machine(), "card": card, "cores": CORES, "runs": {name: row for name, (row,) in rows.items()}}
    FILE.write_text(json.dumps(found, indent=2) + "\n")
    FILE.with_suffix(".md").write_text(page(found))
    print(f"wrote {FILE}")
    return 0


def page(found: Mapping) -> str:
    """Returns the predictions as Markdown."""
    lines = [
        f"# Predicted for an {found['card'].upper()} with {found['cores']} host cores",
        "",
        f"By `python -m benchmarks.card --predict {found['card']}`, without a card.",
        "",
        "| run | tokens/s | s per step | card: tensors GiB | host GiB |",
        "|---|---|---|---|---|",
    ]
    for name, run in found["runs"].items():
        speed, sizes = run["tokens"] / run["seconds_per_step"], (run["peak_bytes"] / GIB, run["host_bytes"] / GIB)
        lines.append(f"| {name} | {speed:,.0f} | {run['seconds_per_step']:.3f} | {sizes[0]:.2f} | {sizes[1]:.1f} |")
    return "\n".join(lines) + "\n"


def predicted(run: str) -> dict:
    """Returns the prediction of a run; {} if FILE lacks it."""
    return stored().get("runs", {}).get(run, {})


def stored() -> dict:
    """Returns the contents of FILE: all predictions, and the card for which they were made; {} if FILE does not
    exist."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main() -> None:
    from benchmarks import capacity

    card, name = sys.argv[1:]
    found = capacity.predicted(card, [*recipes.RUNS[name], *recipes.QUIET, "max_steps=4"], CORES)
    figures = {key: found[key] for key in KEYS} | {"tokens": found["tokens_per_step"]}
    print(json.dumps({"lines": recipes.RUNS[name]} | figures), flush=True)


if __name__ == "__main__":
    main()
