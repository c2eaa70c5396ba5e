"""Draws memory.png: memory by category during one optimizer step and over the run, host memory, and the bytes on a
drive.

    left             one optimizer step: live tensors on the device, by category
    top right        the run: live tensors on the device at the peak of each sampled step, by category; at every step,
                     the bytes that CUDA's allocator has allocated and reserved
    below that       the run: resident memory of the process
    bottom right     the run, if it uses a drive: bytes on the drive, and bytes read and written per step

A category has the same color in all charts. Memory without categories (of the process, of CUDA's allocator, on the
drive) is drawn in the color INK. Each chart has its own scale, and all charts have the same unit: the unit of the
device's peak.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.ticker import StrMethodFormatter

from lowmem.memory.tracker import Point
from lowmem.report import drive_figures
from lowmem.report.colours import INK, LIMIT, OF_CATEGORY
from lowmem.system.units import CATEGORIES, WORDS, unit

if TYPE_CHECKING:  # the import takes a third of a second, and only W&B needs plotly
    import plotly.graph_objects

IN_A_STEP = (
    "forward",
    "backward",
    "step",
)  # without other phases, such as evaluations, whose points would be misleading dips
LINE = 170  # characters per line of the footer, which has at most two lines
STRETCHES = 300  # number of intervals of steps in the charts over the run, which are 500 pixels wide
COLUMNS = (
    *("live_peak_bytes", "allocated_peak_bytes", "reserved_peak_bytes", "held_bytes", "rss_peak_bytes"),
    *("device_percent", "drive_bytes", *(f"drive_{way}_bytes" for way in drive_figures.WAYS)),
)  # columns of memory.csv that are drawn over the run


def memory_picture(file: Path, *arguments, **options) -> None:
    """Writes the picture to a file. `drawn` describes the other arguments."""
    figure = drawn(*arguments, **options)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def drawn(
    rows: list[dict],
    timeline: list[Point],
    title: str,
    typed: str = "",
    limit: int | None = None,
    on_drive: Mapping | None = None,
) -> plt.Figure:
    """Returns the picture as a figure of matplotlib.

    Args:
        rows: rows of memory.csv, after `thinned`.
        timeline: the points of one optimizer step; empty if no step was tracked.
        title: the title, which lists the chosen techniques.
        typed: the text below the charts, which lists all other overrides.
        limit: bytes of the card, or of `memory.limit`; None if there is no limit.
        on_drive: the result of `drive_figures.figures`; None without a drive.
    """
    columns = ("live_peak_bytes", "allocated_peak_bytes", "held_bytes")
    size = unit(max((row.get(column, 0) for row in rows for column in columns), default=0))
    places = [["inside", "device"], ["inside", "process"], *([["inside", "drive"]] if on_drive else [])]
    height = 3 * len(places)
    figure, axes = plt.subplot_mosaic(places, figsize=(13, height), width_ratios=(3, 2), layout="constrained")
    figure.suptitle(textwrap.fill(title, 130), fontweight="bold")
    figure.supxlabel("\n".join(textwrap.wrap(typed, LINE, max_lines=2, placeholder=" ...")), fontsize=8, color=INK)
    _inside_one_step(axes["inside"], timeline, size)
    _on_the_device(axes["device"], rows, size)
    _of_the_process(axes["process"], rows, size)
    if on_drive:
        _of_the_drive(axes["drive"], rows, size, on_drive)
    highest = max((row.get("device_percent", 0) for row in rows), default=0)
    for name in ("inside", "device") if limit is not None else ():
        _mark_limit(axes[name], limit, highest, size)
    for plot in axes.values():
        plot.set_ylabel(size[1])
        plot.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        plot.spines[["top", "right"]].set_visible(False)
    for name in axes.keys() - {"inside", "device"}:
        axes[name].sharex(axes["device"])
    axes["device"].set_xlim(0, max(1, *(row["step"] for row in rows)) if rows else 1)
    return figure


def thinned(rows: Iterable[dict], last: int) -> list[dict]:
    """Returns fewer rows of memory.csv, without losing peaks. For each drawn column and each interval of steps, keeps
    all rows of the step with the column's highest value. Live tensors count only in the phases IN_A_STEP.

    Args:
        rows: rows of memory.csv, in order; an iterator is read lazily.
        last: number of the last step.
    """
    step, kept = itemgetter("step"), []
    for _, stretch in groupby(rows, lambda row: row["step"] * STRETCHES // (last + 1)):
        steps = [list(of_step) for _, of_step in groupby(stretch, step)]
        highest = {id(max(steps, key=partial(_highest, column))) for column in COLUMNS}
        kept += [row for of_step in steps if id(of_step) in highest for row in of_step]
    return kept


def _highest(column: str, rows: list[dict]) -> int:
    phases = IN_A_STEP if column == "live_peak_bytes" else {row["phase"] for row in rows}
    return max((row.get(column, -1) for row in rows if row["phase"] in phases), default=-1)


def send(file: Path, loggers: Sequence[Logger], step: int, rows: Sequence[dict]) -> None:
    """Sends the picture to the loggers that can show pictures. W&B also gets a chart of memory by category. `rows` are
    rows of memory.csv, after `thinned`."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image("memory/picture", plt.imread(file), step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image("memory/picture", [str(file)], step=step)
        if isinstance(logger, WandbLogger):
            logger.log_metrics({"memory/by_category": by_category(rows)}, step=step)


def by_category(rows: Sequence[dict]) -> "plotly.graph_objects.Figure":
    """Returns a stacked chart of device memory by category over the run, at the peak of each sampled step."""
    from plotly import graph_objects

    top = _peaks(rows)
    size, name, _ = unit(max((row["live_peak_bytes"] for row in top.values()), default=0))
    look = {"mode": "lines", "stackgroup": "all", "x": list(top)}
    traces = [
        graph_objects.Scatter(
            name=WORDS[category],
            y=[row[f"{category}_bytes"] / size for row in top.values()],
            line={"color": colour},
            **look,
        )
        for category, colour in OF_CATEGORY.items()
    ]
    axes = {"xaxis": {"title": "optimizer step"}, "yaxis": {"title": f"device, {name}"}}
    return graph_objects.Figure(traces, graph_objects.Layout(hovermode="x unified", **axes))


def _head(axes: plt.Axes, title: str, handles: Sequence[Artist]) -> None:
    """Draws the title of a chart, and the legend between title and chart, where it hides no data."""
    axes.set_title(title, fontsize=11, pad=24)
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.985), "ncols": 5, "frameon": False}
    axes.legend(handles=handles, fontsize=9, **place)


# --- inside one step ---------------------------------------------------------------------------------------------


def _inside_one_step(axes: plt.Axes, timeline: list[Point], size: tuple[int, str, int]) -> None:
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour, label=WORDS[name]) for name, colour in OF_CATEGORY.items()]
    _head(axes, "inside one optimizer step: live tensors on the device", patches)
    if not timeline:
        axes.text(0.5, 0.5, "not sampled", ha="center", transform=axes.transAxes)
        return
    x = range(len(timeline))
    stacked = [[point.bytes[category] / size[0] for point in timeline] for category in CATEGORIES]
    axes.stackplot(x, stacked, colors=OF_CATEGORY.values())
    top = max(x, key=lambda i: timeline[i].total)
    peak = timeline[top].total / size[0]
    axes.annotate(
        f"peak {peak:,.{size[2]}f} {size[1]} in {timeline[top].phase}",
        (top, peak),
        (0.45, 1.1 * peak),
        textcoords=("axes fraction", "data"),
        ha="center",
        arrowprops={"arrowstyle": "->", "color": INK},
    )
    _mark_phases(axes, timeline)
    axes.set(xlabel="allocations and frees, in order", xlim=(0, max(1, len(timeline) - 1)), ylim=(0, 1.3 * peak))


def _mark_phases(axes: plt.Axes, timeline: list[Point]) -> None:
    """Marks the first point of each phase with a line and the name of the phase. The names are at different heights,
    because the names of short phases would overlap."""
    starts = {}
    for i, point in enumerate(timeline):
        starts.setdefault(point.phase, i)
    for line, (phase, i) in enumerate(starts.items()):
        axes.axvline(i, color=INK, linewidth=0.7, linestyle=":")
        late = i > 0.9 * len(timeline)
        place = {"ha": "right" if late else "left", "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(i, 0.995 - 0.035 * line, f" {phase} ", fontsize=9, color=INK, **place)


# --- over the run ------------------------------------------------------------------------------------------------


def _on_the_device(axes: plt.Axes, rows: list[dict], size: tuple[int, str, int]) -> None:
    """Draws device memory by category at the peak of each sampled step (without sampled steps: the sum of weights,
    gradients and optimizer state), and the bytes of CUDA's caching allocator at every step of `rows`."""
    top = _peaks(rows)
    stacked = [[row[f"{category}_bytes"] / size[0] for row in top.values()] for category in CATEGORIES]
    if top:
        axes.stackplot(list(top), stacked, colors=OF_CATEGORY.values())
        total = [row["live_peak_bytes"] / size[0] for row in top.values()]
        axes.plot(list(top), total, ".", color=INK, markersize=4, label="sampled")
    else:
        _line(axes, rows, "held_bytes", size, "-", "weights, gradients, optimizer state")
    _line(axes, rows, "allocated_peak_bytes", size, "-", "allocated by CUDA")
    _line(axes, rows, "reserved_peak_bytes", size, "--", "reserved by CUDA")
    _head(axes, "over the run: device memory, peak of each step", axes.get_legend_handles_labels()[0])
    axes.set_ylim(bottom=0)


def _peaks(rows: Iterable[dict]) -> dict[int, dict]:
    """Returns the peaks of the sampled steps: a dict from each step to its row with the most live bytes on the
    device."""
    top: dict[int, dict] = {}
    for row in rows:
        highest = top.get(row["step"], {}).get("live_peak_bytes", -1)
        if row["phase"] in IN_A_STEP and row.get("live_peak_bytes", -1) > highest:
            top[row["step"]] = row
    return top


def _of_the_process(axes: plt.Axes, rows: list[dict], size: tuple[int, str, int]) -> None:
    axes.set_title("over the run: resident host memory, libraries included", fontsize=11)
    _line(axes, rows, "rss_peak_bytes", size, "-", "")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(bottom=0)


def _of_the_drive(axes: plt.Axes, rows: list[dict], size: tuple[int, str, int], figures: Mapping) -> None:
    _line(axes, rows, "drive_bytes", size, "-", "stored")
    for way, style in zip(drive_figures.WAYS, ("--", ":"), strict=True):
        _line(axes, rows, f"drive_{way}_bytes", size, style, f"{way}, {drive_figures.rate(figures, way)}")
    _head(axes, "over the run: bytes on the drive, and read and written per step", axes.get_legend_handles_labels()[0])
    axes.set_xlabel("optimizer step")
    axes.set_ylim(bottom=0)


def _line(axes: plt.Axes, rows: list[dict], column: str, size: tuple[int, str, int], style: str, label: str) -> None:
    by_step: dict[int, float] = {}
    for row in rows:
        if column in row:
            by_step[row["step"]] = max(by_step.get(row["step"], 0), row[column] / size[0])
    if by_step:
        axes.plot(list(by_step), list(by_step.values()), style, color=INK, linewidth=1.2, label=label)


def _mark_limit(axes: plt.Axes, limit: int, highest: int, size: tuple[int, str, int]) -> None:
    """Marks the device's limit: with a line and a text if the limit is near the data, otherwise only with a text.
    `limit` is in bytes, and `highest` is the peak in percent of the limit."""
    at, name = limit / size[0], unit(limit)
    low, high = axes.get_ylim()
    near = at < 2 * high
    label = f"device limit: {limit / name[0]:,.4g} {name[1]} ({highest} % used)"
    if near:
        axes.set_ylim(low, max(high, 1.12 * at))
        axes.axhline(at, color=LIMIT, linestyle="--", linewidth=1)
        axes.text(0.01, at, label, color=LIMIT, fontsize=8, va="bottom", transform=axes.get_yaxis_transform())
    else:
        place = {"ha": "right", "va": "top", "transform": axes.transAxes}
        axes.text(0.99, 0.99, f"{label}: far above", color=LIMIT, fontsize=8, **place)
