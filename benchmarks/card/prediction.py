"""Predicts every run of `recipes.RUNS` for a card, without the card: bytes by the planner, seconds by its rates.

The predictions are made and committed before a card measures anything, and stand beside the measurements. They count
operations and bytes at the rates of conf/gpu.yaml, and assume a host of sixteen cores: each as fast in the optimizer as
those of benchmarks/results/host_optimizer.md, and with memory of 150 GB/s.
"""

import json
import sys

from benchmarks.card import recipes
from benchmarks.runner import RESULTS, machine, measure

FILE = RESULTS / "card_predicted.json"
CORES = 16
KEYS = ("peak_bytes", "reserved_bytes", "smallest_cap_bytes", "host_bytes", "seconds_per_step")


def write(card: str) -> int:
    """Predicts all runs for a card of conf/gpu.yaml, each in a process of its own. Returns the exit code."""
    from lowmem.config import cards

    if card not in cards.cards():
        print(
            f"--predict {card}: not a card of conf/gpu.yaml. Type one of {', '.join(cards.cards())}.", file=sys.stderr
        )
        return 2
    rows = measure({name: ["-m", "benchmarks.card.prediction", card, name] for name in recipes.RUNS}, 1)
    found = {"machine": machine(), "card": card, "cores": CORES, "runs": {name: row for name, (row,) in rows.items()}}
    FILE.write_text(json.dumps(found, indent=2) + "\n")
    print(f"wrote {FILE}")
    return 0


def of(run: str) -> dict:
    """Returns the prediction of a run, or nothing if there is none."""
    return json.loads(FILE.read_text())["runs"].get(run, {}) if FILE.exists() else {}


def main() -> None:
    from benchmarks.capacity import predicted

    card, name = sys.argv[1:]
    found = predicted(card, [*recipes.RUNS[name], *recipes.QUIET, "max_steps=4"], CORES)
    print(json.dumps({"lines": recipes.RUNS[name]} | {key: found[key] for key in KEYS}), flush=True)


if __name__ == "__main__":
    main()
