"""lowmem beside a plain PyTorch loop, plain Lightning and transformers.Trainer, under every technique that all have.

python -m benchmarks.side_by_side        # about ten minutes per round on two cores

Speed, the peak of live tensors, resident memory net of imports, and how far the losses of all steps are from the plain
loop's. Same weights, data, optimizer and seed (see loops.py).
"""

import argparse

from benchmarks.loops import RECIPES
from benchmarks.runner import measure, medians, ratio, write

LOOPS = ("lowmem", "plain", "lightning", "trainer")
# What is asked of lowmem's tokens/s over another loop's, and of its peak over theirs.
OF_FRAMEWORKS, PEAK = 0.98, 1.01
OF_PLAIN = {"bf16": 0.95}  # 0.97 elsewhere
# Losses that differ by less, relatively, come from another order of the same additions: the rounding of one product in
# bf16, and of some hundred in fp32.
SAME = {True: 2**-8, False: 1e-5}


def table(found: dict) -> str:
    speed, peak, rss = (medians(found, key) for key in ("tokens_per_second", "peak_bytes", "rss_bytes"))
    lines = [
        "| recipe | loop | tokens/s | live tensors, MiB | resident net of imports, MiB | losses apart by |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        recipe, loop = name.split(" ")
        pairs = zip(rounds[0]["losses"], found[f"{recipe} plain"][0]["losses"], strict=True)
        apart = max(abs(mine / theirs - 1) for mine, theirs in pairs)
        figures = f"{speed[name]:,.0f} | {peak[name] / 2**20:.1f} | {rss[name] / 2**20:,.0f}"
        lines.append(f"| {recipe} | {loop} | {figures} | {_apart(apart, recipe, loop)} |")
    lines += ["", "| recipe | lowmem against | tokens/s | asked | peak | asked |", "|---|---|---|---|---|---|"]
    for recipe in dict.fromkeys(name.split(" ")[0] for name in found):
        for other in LOOPS[1:]:
            pair = f"{recipe} lowmem", f"{recipe} {other}"
            asked = OF_PLAIN.get(recipe, 0.97) if other == "plain" else OF_FRAMEWORKS
            fast, small = ratio(found, *pair, "tokens_per_second"), ratio(found, *pair, "peak_bytes")
            words = f"{fast:.3f}{'' if fast >= asked else ' (missed)'} | >= {asked}"
            words += f" | {small:.4f}{'' if small <= PEAK else ' (missed)'} | <= {PEAK}"
            lines.append(f"| {recipe} | {other} | {words} |")
    return "\n".join(lines)


def _apart(losses: float, recipe: str, loop: str) -> str:
    if loop == "plain":
        return "-"
    return f"{losses:.1e}{'' if losses <= SAME['precision=bf16' in RECIPES[recipe]] else ' (another curve)'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="13.9M", help="of loops.py")
    options = parser.parse_args()
    commands = {f"{r} {loop}": ["-m", "benchmarks.loops", loop, r, options.model] for r in RECIPES for loop in LOOPS}
    found = measure(commands, options.rounds)
    for rounds in found.values():  # the order of additions is the same in every round
        for one in rounds[1:]:
            del one["losses"]
    write("side_by_side", {"rounds": found}, table(found))


if __name__ == "__main__":
    main()
