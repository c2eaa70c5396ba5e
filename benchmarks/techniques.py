"""Measures the memory and the speed of each technique on train.py's default model, and lists the pairs of techniques
that are refused. The tables are shown in docs/techniques.md.

python -m benchmarks.techniques          # about half an hour on two cores
python -m benchmarks.techniques --table  # a minute: only lists the refused pairs again, and measures nothing
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import isnan, nan
from statistics import median

from benchmarks.loops import shape
from benchmarks.runner import measure, medians, options_of, run_train, stored, write
from lowmem.config.declarations import SHARED, groups, techniques
from lowmem.config.refusals import refused
from lowmem.config.settle import run_of

BASE = "(as shipped)"
PAIRS = "data=preference", "data.path=examples/preference.jsonl"
# Choice -> further overrides, which the choice needs or which make its results comparable with the other rows: every
# optimizer step has eight sequences, a chunk of the loss is smaller than a batch, and a tile is smaller than the
# vocabulary.
WITH = {
    "accumulation=fixed": ["batch_size=2"],
    "accumulation=effective_batch": ["batch_size=2", "accumulation.size=8"],
    "accumulation=by_epoch": ["batch_size=2", "accumulation.sizes={0: 4}"],
    "accumulation=by_step": ["batch_size=2", "accumulation.sizes={0: 4}"],
    "weights=streamed": ["precision=bf16-master", "gradient_checkpointing=every_layer"],
    "loss=chunked": ["loss.rows=128"],
    "loss=tiled": ["loss.columns=128"],
    **{f"loss={name}": ["loss.columns=128", *PAIRS] for name in ("dpo", "ipo", "orpo", "simpo", "kto")},
    "optim.in_backward=true": ["clip=null"],
}
SHIPPED = (
    "precision=32",
    "optim=adamw",
    "accumulation=none",
    "gradient_checkpointing=none",
    "weights=resident",
    "loss=full",
    "compile=none",
)
CHOICES = [f"{group}={name}" for group in groups() if group != SHARED for name in techniques(group)]
CHOICES = [choice for choice in CHOICES if choice not in SHIPPED] + ["optim.in_backward=true"]
ROWS = {BASE: []} | {choice: [choice, *WITH.get(choice, [])] for choice in CHOICES}


def row(*arguments: str) -> dict:
    """Runs train.py on `tiny` once and returns peaks in bytes and tokens/s."""
    summary = run_train([*shape("tiny"), "logger=none", *arguments])
    return {
        "peak_bytes": summary["peak_bytes"]["device"],  # None for a compiled run, whose tensors are not counted
        "rss_bytes": summary["peak_bytes"]["host_rss"],
        "parameters": summary["parameters"],
        "tokens_per_second": summary["tokens_per_second"],
        **summary["peak_bytes_by_category"],
    }


def of_shipped(results: dict, name: str) -> float:
    """Returns the median, over the rounds, of the ratio between the speed of a row and the speed of the default run
    that was measured in the same round."""
    return median(
        figures["tokens_per_second"] / figures.get("shipped_tokens_per_second", shipped["tokens_per_second"])
        for figures, shipped in zip(results[name], results[BASE], strict=True)
    )


def refused_pairs() -> dict[str, list[str]]:
    """Returns a dict that maps each row to the rows with which it is refused. Rows that are refused alone are not
    combined with other rows, so their lists are empty."""

    def says(*names: str) -> list[str]:
        needed = [line for name in names for line in WITH.get(name, [])]
        return list(refused(run_of([*needed, *names])))  # the last override of a key wins

    pairs: dict[str, list[str]] = {name: [] for name in ROWS}
    alone = [name for name in CHOICES if not says(name)]
    for choice, second in combinations(alone, 2):
        if choice.split("=")[0] != second.split("=")[0] and says(choice, second):
            pairs[choice].append(second)
            pairs[second].append(choice)
    return pairs


def table(results: dict) -> str:
    """Returns a table with one row per measured technique."""
    peak, speed = medians(results, "peak_bytes"), medians(results, "tokens_per_second")
    state, activations = medians(results, "optimizer"), medians(results, "activations")
    parameters = results[BASE][0]["parameters"]
    lines = [
        "| override | peak, MiB | peak, of the defaults' | activations, MiB | optimizer state, bytes per parameter "
        "| tokens/s | speed, of the defaults' |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (name for name in ROWS if name in results):
        label = "(defaults)" if name == BASE else name
        stored = nan if isnan(peak[name]) else activations[name]  # allocations of compiled code are not counted
        lines.append(
            f"| {label} | {peak[name] / 2**20:.1f} | {peak[name] / peak[BASE]:.2f} | {stored / 2**20:.1f} "
            f"| {state[name] / parameters:.2f} | {speed[name]:,.0f} | {of_shipped(results, name):.2f} |"
        )
    return "\n".join(lines).replace("nan", "not counted")


def table_of_pairs(pairs: Mapping[str, Sequence[str]]) -> str:
    """Returns a table with one row per technique that is refused together with other techniques."""
    rows = (f"| {name} | {', '.join(pairs[name])} |" for name in ROWS if pairs.get(name))
    return "\n".join(["| override | refused with |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", nargs="*", help="measure these rows and the shipped one; keep the others")
    parser.add_argument("--table", action="store_true", help="only the refused pairs again; keep all measurements")
    options = options_of(parser, row)
    before = stored("techniques")
    known, where = before["rounds"], {"machine": before["machine"]} if options.table else {}
    if options.table:
        results = {name: known[name] for name in ROWS if name in known}
    else:
        rows = {name: ["-m", "benchmarks.techniques", "--row", *arguments] for name, arguments in ROWS.items()}
        if options.add:
            rows = {name: row for name, row in rows.items() if name in (BASE, *options.add)}
        results = measure(rows, options.rounds)
    if options.add:
        for name in options.add:
            known[name] = [
                figures | {"shipped_tokens_per_second": shipped["tokens_per_second"]}
                for figures, shipped in zip(results[name], results[BASE], strict=True)
            ]
        results = {name: known[name] for name in ROWS if name in known}
    pairs = refused_pairs()
    both = f"{table(results)}\n\n{table_of_pairs(pairs)}"
    write("techniques", {**where, "rounds": results, "refused": pairs}, both)


if __name__ == "__main__":
    main()
