"""Measures the time that lowmem adds to a step of a plain loop, and the part of this time that the memory meter takes.

python -m benchmarks.overhead            # about twenty minutes on two cores

The models are `13.9M` and `thin` of loops.py. A step of `thin` takes only a few milliseconds, so the overhead is not
hidden by noise, as it would be in longer steps. The time to the first step is measured with `tiny`.
"""

import argparse

from benchmarks.loops import WARM_UP
from benchmarks.runner import medians, row, write
from benchmarks.turns import difference, measure, speed_ratio

LOOPS = ("lowmem", "lowmem-unmetered", "plain")
MODELS = {"13.9M": ("32", "bf16"), "thin": ("32",)}
UNMETERED = 0.98  # smallest accepted ratio of lowmem's speed to its speed without the meter


def table(results: dict, first_steps: list[dict]) -> str:
    """Returns Markdown with the tokens/s of every row, the time that lowmem adds to a step, and the time to the first
    step."""
    speed = medians(results, "tokens_per_second")
    lines = ["| model | precision | loop | tokens/s |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(name.split(' '))} | {value:,.0f} |" for name, value in speed.items()]
    lines += [
        "",
        "| model | precision | lowmem against | speed | asked | ms more per step |",
        "|---|---|---|---|---|---|",
    ]
    for model, precisions in MODELS.items():
        for precision in precisions:
            for other in LOOPS[1:]:
                pair = [results[f"{model} {precision} {loop}"] for loop in ("lowmem", other)]
                limit = f">= {UNMETERED}" if other == "lowmem-unmetered" else "-"
                figures = f"{speed_ratio(*pair, WARM_UP):.3f} | {limit} | {1000 * difference(*pair, WARM_UP):.1f}"
                lines.append(f"| {model} | {precision} | {other} | {figures} |")
    seconds = medians({"tiny": first_steps}, "first_step_seconds")["tiny"]
    return "\n".join(
        [*lines, "", f"From the command to the end of the first optimizer step of `tiny`: {seconds:.1f} s."]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    teams = [
        {f"{model} {precision} {loop}": ["-m", "benchmarks.loops", loop, precision, model] for loop in LOOPS}
        for model, precisions in MODELS.items()
        for precision in precisions
    ]
    results = measure(teams, options.rounds)
    tiny = ["-m", "benchmarks.loops", "lowmem", "32", "tiny"]
    first_steps = [row(tiny) for _ in range(options.rounds)]  # one process at a time
    write("overhead", {"rounds": results, "first_steps": first_steps}, table(results, first_steps))


if __name__ == "__main__":
    main()
