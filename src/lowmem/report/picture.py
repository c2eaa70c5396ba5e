"""memory.png: where the bytes were, inside one step and over the run."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lowmem.memory.tracker import Point
from lowmem.units import CATEGORIES, GIB

COLOURS = {
    "weights": "#3b6fb6",
    "gradients": "#e08b2f",
    "optimizer": "#7a5195",
    "activations": "#3f9d6b",
    "other": "#9a9a9a",
}


def memory_picture(file: Path, rows: list[dict], timeline: list[Point], title: str, limit: int | None = None) -> None:
    """Left: live tensors by category through the last sampled step. Right: peaks over the optimizer steps.

    Args:
        limit: bytes of the card, or of `memory.limit`.
    """
    figure, (inside, over) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=(3, 2), constrained_layout=True)
    figure.suptitle(title)
    _inside_one_step(inside, timeline)
    _over_the_run(over, rows)
    for axes in (inside, over) if limit is not None else ():
        _mark_limit(axes, limit / GIB)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def send(file: Path, loggers: Sequence[Logger], step: int) -> None:
    """The picture, to the loggers that show pictures."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image("memory/picture", [str(file)], step=step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image("memory/picture", plt.imread(file), step, dataformats="HWC")


def _inside_one_step(axes: plt.Axes, timeline: list[Point]) -> None:
    axes.set_title("one optimizer step: live tensors on the device side")
    if not timeline:
        axes.text(0.5, 0.5, "not sampled", ha="center", transform=axes.transAxes)
        return
    stacked = [[point.bytes[category] / GIB for point in timeline] for category in CATEGORIES]
    x = range(len(timeline))
    axes.stackplot(x, stacked, labels=CATEGORIES, colors=[COLOURS[c] for c in CATEGORIES])
    top = max(x, key=lambda i: timeline[i].total)
    peak = timeline[top].total / GIB
    axes.annotate(
        f"peak {peak:.3f} GiB in {timeline[top].phase}",
        (top, peak),
        (0.45, 1.08 * peak),
        textcoords=("axes fraction", "data"),
        ha="center",
        arrowprops={"arrowstyle": "->"},
    )
    _mark_phases(axes, timeline)
    axes.set(
        xlabel="allocations and releases, in order",
        ylabel="GiB",
        xlim=(0, len(timeline) - 1),
        ylim=(0, 1.2 * peak),
    )
    axes.legend(loc="upper right", fontsize=8)


def _mark_limit(axes: plt.Axes, limit: float) -> None:
    """A line where it is near, a word where it is far above: the bytes must stay readable."""
    low, high = axes.get_ylim()
    near = limit < 2 * high
    if near:
        axes.set_ylim(low, max(high, 1.08 * limit))
        axes.axhline(limit, color="#c0392b", linestyle="--", linewidth=1)
    axes.text(
        *(0.01, limit if near else 0.9),
        f"the device's limit: {limit:.2f} GiB{'' if near else ', far above'}",
        color="#c0392b",
        fontsize=8,
        va="bottom",
        transform=axes.get_yaxis_transform() if near else axes.transAxes,
    )


def _mark_phases(axes: plt.Axes, timeline: list[Point]) -> None:
    first = {}
    for i, point in enumerate(timeline):
        first.setdefault(point.phase, i)
    for phase, i in first.items():
        axes.axvline(i, color="black", linewidth=0.7, linestyle=":")
        axes.text(i, 0.99, f" {phase}", fontsize=8, va="top", transform=axes.get_xaxis_transform())


def _over_the_run(axes: plt.Axes, rows: list[dict]) -> None:
    axes.set_title("the run: highest bytes of each step")
    lines = {
        "rss_peak_bytes": "resident memory of the process",
        "reserved_peak_bytes": "reserved by the CUDA allocator",
        "allocated_peak_bytes": "allocated on the CUDA device",
        "live_peak_bytes": "live tensors, device side (sampled)",
        "held_bytes": "of them weights, gradients, optimizer state",
    }
    for column, label in lines.items():
        by_step: dict[int, float] = {}
        for row in rows:
            # An evaluation is sampled on steps whose training is not: it would draw a dip that is none.
            if column in row and (row["phase"] != "evaluation" or column != "live_peak_bytes"):
                by_step[row["step"]] = max(by_step.get(row["step"], 0), row[column] / GIB)
        if by_step:
            axes.plot(list(by_step), list(by_step.values()), marker=".", markersize=3, linewidth=1, label=label)
    axes.set(xlabel="optimizer step", ylabel="GiB")
    axes.set_ylim(bottom=0)
    if axes.has_data():
        axes.legend(fontsize=8)
