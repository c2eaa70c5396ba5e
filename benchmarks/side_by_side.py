"""Compares lowmem with a plain PyTorch loop, plain Lightning and transformers.Trainer, in recipes that all four can
run.

python -m benchmarks.side_by_side        # about twenty minutes per round on two cores

The tables have the speed, the peak of live tensors, the growth of resident memory after imports, and the largest
relative difference between the losses of a loop and the losses of the plain loop. All loops have the same weights,
data, optimizer and seed (see loops.py), and the four loops of a recipe take turns after each step (see turns.py).
"""

import argparse
import os

from benchmarks.loops import RECIPES, WARM_UP
from benchmarks.runner import medians, ratio, write
from benchmarks.turns import measure, speed_ratio

LOOPS = ("lowmem", "plain", "lightning", "trainer")
# OF_FRAMEWORKS and OF_PLAIN (recipe -> ratio; 0.97 for other recipes): smallest accepted ratio of lowmem's speed to the
# speed of the other loop. PEAK: largest accepted ratio of lowmem's peak to the peak of the other loop.
OF_FRAMEWORKS, PEAK = 0.98, 1.01
OF_PLAIN = {"bf16": 0.95}


def table(results: dict) -> str:
    keys = ("tokens_per_second", "pages_per_step", "peak_bytes", "rss_bytes")
    speed, pages, peak, rss = (medians(results, key) for key in keys)
    lines = [
        "| recipe | loop | tokens/s | pages faulted in | live tensors, MiB | resident net of imports, MiB | losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rounds in results.items():
        recipe, loop = name.split(" ")
        figures = f"{speed[name]:,.0f} | {pages[name]:,.0f} | {peak[name] / 2**20:.1f} | {rss[name] / 2**20:,.0f}"
        losses = "-" if loop == "plain" else apart(rounds[0]["losses"], results[f"{recipe} plain"][0]["losses"])
        lines.append(f"| {recipe} | {loop} | {figures} | {losses} |")
    lines += [
        "",
        "| recipe | lowmem against | speed | asked | in each round | peak | asked |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in dict.fromkeys(name.split(" ")[0] for name in results):
        for other in LOOPS[1:]:
            pair = f"{recipe} lowmem", f"{recipe} {other}"
            limit = OF_PLAIN.get(recipe, 0.97) if other == "plain" else OF_FRAMEWORKS
            ours, theirs = (results[name] for name in pair)
            fast, small = speed_ratio(ours, theirs, WARM_UP), ratio(results, *pair, "peak_bytes")
            rounds = " ".join(f"{speed_ratio([a], [b], WARM_UP):.2f}" for a, b in zip(ours, theirs, strict=True))
            words = f"{fast:.3f}{'' if fast >= limit else ' (missed)'} | >= {limit} | {rounds}"
            words += f" | {small:.4f}{'' if small <= PEAK else ' (missed)'} | <= {PEAK}"
            lines.append(f"| {recipe} | {other} | {words} |")
    return "\n".join([*lines, "", summary(results)])


def summary(results: dict) -> str:
    """Returns a table with one row per recipe. It compares lowmem's speed with the speeds of all other loops, and
    lowmem's losses and peak memory with the losses and peak memory of the plain loop."""
    lines = [
        "| recipe | losses against a plain loop | speed against a plain loop | against Lightning "
        "| against transformers.Trainer | peak memory against a plain loop |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in dict.fromkeys(name.split(" ")[0] for name in results):
        ours, *others = (results[f"{recipe} {loop}"] for loop in LOOPS)
        equal = ours[0]["losses"] == others[0][0]["losses"]
        losses = "equal bits" if equal else apart(ours[0]["losses"], others[0][0]["losses"])
        speeds = " | ".join(f"{speed_ratio(ours, theirs, WARM_UP):.3f}" for theirs in others)
        peak = ratio(results, f"{recipe} lowmem", f"{recipe} plain", "peak_bytes")
        lines.append(f"| {recipe} | {losses} | {speeds} | {peak:.4f} |")
    return "\n".join(lines)


def apart(losses: list[float], of_plain: list[float]) -> str:
    """Returns "the same bits" if all losses equal the losses of the plain loop, and otherwise the largest relative
    difference."""
    farthest = max(abs(loss / plain - 1) for loss, plain in zip(losses, of_plain, strict=True))
    return f"apart by {farthest:.1e}" if farthest else "the same bits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="13.9M", help="a model of loops.py")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--kept-heap",
        action="store_true",
        help="keep freed memory in the process, and write a file of its own: the memory that the C library gives back "
        "and faults in again differs by a quarter between two processes of the same loop",
    )
    options = parser.parse_args()
    if options.kept_heap:
        os.environ.update(MALLOC_MMAP_THRESHOLD_=str(2**25), MALLOC_TRIM_THRESHOLD_=str(2**36))
    teams = [
        {f"{r} {loop}": ["-m", "benchmarks.loops", loop, r, options.model] for loop in LOOPS} for r in options.only
    ]
    results = measure(teams, options.rounds)
    write("side_by_side" + "_kept_heap" * options.kept_heap, {"rounds": results}, table(results))


if __name__ == "__main__":
    main()
