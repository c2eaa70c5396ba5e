"""What it costs to be driven by lowmem: tokens/s beside a plain loop, plain Lightning and transformers.Trainer.

python -m benchmarks.overhead            # about half an hour on two cores
"""

import argparse

from benchmarks.runner import measure, medians, ratio, write

LOOPS = ("lowmem", "lowmem-unmetered", "plain", "lightning", "trainer")
# precision -> what was asked of lowmem's tokens/s over the plain loop's
BOUNDS = {"32": 0.97, "bf16": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="rows whose name holds this, such as bf16; the file is named after it"
    )
    options = parser.parse_args()
    rows = {f"13.9M {p} {loop}": _command(loop, p, "13.9M") for p in BOUNDS for loop in LOOPS}
    rows |= {f"tiny 32 {loop}": _command(loop, "32", "tiny") for loop in ("lowmem", "plain")}
    found = measure({name: row for name, row in rows.items() if options.only in name}, options.rounds)
    write("-".join(filter(None, ("overhead", options.only))), {"rounds": found}, table(found))


def _command(loop: str, precision: str, model: str) -> list[str]:
    return ["-m", "benchmarks.loops", loop, precision, model]


def table(found: dict) -> str:
    """Markdown: tokens/s of every row, then the ratios beside what was asked of them."""
    speed, seconds = medians(found, "tokens_per_second"), medians(found, "seconds_per_step")
    lines = ["| model | precision | loop | tokens/s | ms per step |", "|---|---|---|---|---|"]
    for name, value in speed.items():
        model, precision, loop = name.split()
        lines.append(f"| {model} | {precision} | {loop} | {value:,.0f} | {1000 * seconds[name]:,.1f} |")
    lines += ["", "| lowmem against | precision | ratio of tokens/s | asked |", "|---|---|---|---|"]
    for precision, bound in BOUNDS.items():
        for other, asked in (("plain", bound), ("lightning", None), ("trainer", 0.98), ("lowmem-unmetered", 0.98)):
            pair = f"13.9M {precision} lowmem", f"13.9M {precision} {other}"
            if not found.keys() >= set(pair):
                continue
            value = ratio(found, *pair, "tokens_per_second")
            lines.append(f"| {other} | {precision} | {value:.3f} | {'-' if asked is None else f'>= {asked}'} |")
    if "tiny 32 lowmem" in found:
        extra = 1000 * (seconds["tiny 32 lowmem"] - seconds["tiny 32 plain"])
        first = medians({"tiny": found["tiny 32 lowmem"]}, "first_step_seconds")["tiny"]
        lines += [
            "",
            f"On `tiny` lowmem takes {extra:.1f} ms per step more than the plain loop.",
            f"From the command to the end of the first optimizer step of `tiny`: {first:.1f} s.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
