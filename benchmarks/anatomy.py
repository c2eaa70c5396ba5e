"""Draws docs/one-step.png and docs/techniques.png. The pictures show how many bytes each category of tensors uses
during a training step, with the default settings and with techniques that save memory.

python -m benchmarks.anatomy             # about three minutes on two cores
"""

import argparse
import csv
import os
from pathlib import Path

from benchmarks.runner import ROOT, measure, options_of, run_train, write
from lowmem.system.units import CATEGORIES

MIB = 2**20
SHORT = ["max_steps=3", "val_every=1000", "val_sequences=8", "sample_tokens=0", "logger=none", "plan=off"]
RECIPES = {
    "as shipped": [],
    "precision=bf16": ["precision=bf16"],
    "gradient_checkpointing=every_layer": ["gradient_checkpointing=every_layer"],
    "loss=chunked": ["loss=chunked", "loss.rows=128"],
    "accumulation=fixed, 4 x 2": ["accumulation=fixed", "accumulation.batches=4", "batch_size=2"],
    "optim=adam8bit": ["optim=adam8bit"],
    "precision=bf16-sr": ["precision=bf16-sr"],
    "precision=bf16-master optim=adamw8bit": ["precision=bf16-master", "optim=adamw8bit"],
    "all of them": [
        *("precision=bf16-master", "optim=adamw8bit", "gradient_checkpointing=every_layer", "loss=chunked"),
        *("loss.rows=128", "accumulation=fixed", "accumulation.batches=4", "batch_size=2"),
    ],
}


def row(recipe: str) -> dict:
    """Trains with a recipe. Returns the peak device bytes of the run, and `points`, a list with an element [phase,
    bytes of each category in CATEGORIES] for each allocation or release in the last sampled step."""
    summary = run_train([*SHORT, *RECIPES[recipe]])
    with (Path(os.environ["ROW_FOLDER"]) / "memory_step.csv").open() as file:
        rows = list(csv.DictReader(file))
    points = [[row["phase"], *(int(row[f"{category}_bytes"]) for category in CATEGORIES)] for row in rows]
    return {"peak_bytes": summary["peak_bytes"]["device"], "points": points}


def draw(results: dict, file: Path, names: list[str], columns: int) -> None:
    """Draws a panel for each name, in `columns` columns. All panels have the same vertical scale.

    Args:
        results: name -> results of the rounds. Only the first round is drawn.
    """
    from lowmem.report.colours import OF_CATEGORY
    from lowmem.report.picture import plt

    rows = -(-len(names) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(5 * columns, 3 * rows), sharey=True, squeeze=False, constrained_layout=True
    )
    for axes, name in zip(panels.flat, names, strict=False):
        points = results[name][0]["points"]
        stacked = [[point[1 + i] / MIB for point in points] for i in range(len(CATEGORIES))]
        axes.stackplot(range(len(points)), stacked, labels=CATEGORIES, colors=[*OF_CATEGORY.values()])
        axes.set_title(f"{name}: {max(sum(point[1:]) for point in points) / MIB:.0f} MiB", fontsize=10)
        starts = {}
        for i, (phase, *_) in enumerate(points):
            starts.setdefault(phase, i)
        ends = [*list(starts.values())[1:], len(points)]
        for (phase, i), end in zip(starts.items(), ends, strict=True):
            axes.axvline(i, color="black", linewidth=0.6, linestyle=":")
            if end - i > 0.1 * len(points):  # the label fits
                axes.text(i, 0.98, f" {phase}", fontsize=7, va="top", transform=axes.get_xaxis_transform())
        axes.set(xlim=(0, len(points) - 1), xticks=[])
    for axes in panels[:, 0]:
        axes.set_ylabel("MiB")
    panels.flat[0].legend(loc="center right", fontsize=7)
    figure.savefig(file, dpi=80)
    plt.close(figure)


def table(results: dict) -> str:
    lines = [
        "| recipe | peak MiB | in | weights | gradients | optimizer | activations |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (result,) in results.items():
        phase, *sizes = max(result["points"], key=lambda point: sum(point[1:]))
        cells = [f"{size / MIB:.1f}" for size in (sum(sizes), *sizes[:4])]
        lines.append(f"| {name} | {cells[0]} | {phase} | {' | '.join(cells[1:])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options_of(parser, row)
    results = measure({name: ["-m", "benchmarks.anatomy", "--row", name] for name in RECIPES}, 1)
    draw(results, ROOT / "docs" / "one-step.png", ["as shipped"], 1)
    draw(results, ROOT / "docs" / "techniques.png", list(RECIPES), 3)
    peaks = {name: [{"peak_bytes": result["peak_bytes"]} for result in rounds] for name, rounds in results.items()}
    write("anatomy", {"rounds": peaks}, table(results))


if __name__ == "__main__":
    main()
