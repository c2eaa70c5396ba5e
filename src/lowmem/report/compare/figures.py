"""Reads the figures and curves of a run from its files, for the comparison page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowmem.report import folders
from lowmem.report.folders import RunFolder, number
from lowmem.report.summary import predicted_and_measured
from lowmem.system.units import CATEGORIES, GIB

POINTS = 500  # maximum points per curve: about the width of a chart in pixels
AXES = ("tokens", "learned_tokens", "seconds")  # columns that can be the x-axis of a loss curve

Curve = list[list[float]]  # the values of each column
Stack = list[tuple[str, list[float]]]  # list of (phase or step, bytes of each category)


@dataclass
class Figures:
    """The figures and curves of a run. A figure that was not measured is None, and a curve without measurements is
    empty."""

    run: RunFolder
    name: str
    label: str
    val_loss: float | None
    accuracy: float | None
    bits_per_byte: float | None
    tokens_per_second: float | None
    learned_tokens_per_second: float | None
    device: float | None  # bytes: highest peak of all ranks
    host: float | None  # bytes: highest peak of all ranks
    drive: float | None  # bytes
    drive_rate: float | None  # GB/s, sum of reading and writing
    peak: dict[str, float]  # category -> bytes at the highest sampled point of rank 0's device
    loss: Curve  # of training: tokens, learned tokens, seconds, loss
    evaluations: Curve  # of validation: tokens, learned tokens, seconds, loss
    device_bytes: Curve  # step, bytes
    host_bytes: Curve  # step, bytes
    drive_bytes: Curve  # step, bytes
    planned: dict[str, tuple[float, float]]  # phase -> (predicted, measured) bytes on the device
    inside: Stack  # one optimizer step: points in the order of allocations and frees
    steps: Stack  # sampled steps, each at its peak
    phases: Stack  # phases, each with the bytes of its last sampled row
    on: str  # device name
    colour: str = ""  # color of the run on the page
    stands_out: bool = False  # True: charts show the run in its color; False: in gray until a user isolates it


def read(run: RunFolder, name: str, label: str) -> Figures:
    metrics, memory = run.rows("metrics.csv"), run.rows("memory.csv")
    for row in metrics:  # earlier versions wrote the number of learned tokens as `tokens`
        row["learned_tokens"] = row.get("learned_tokens") or row.get("tokens")
    steps = [row for row in memory if row.get("phase") in ("forward", "backward", "step")]
    figure = {column: folders.figure(run, column) for column in folders.FIGURES}
    sizes = [None if (size := figure[f"{side} GiB"]) is None else size * GIB for side in ("device", "host", "drive")]
    summary = run.summary or {}
    return Figures(
        *(run, name, label, figure["validation loss"], figure["accuracy"], figure["bits per byte"]),
        *(figure["tokens/s"], figure["learned tokens/s"], *sizes),
        drive_rate=figure["drive GB/s"],
        peak=_sizes(summary.get("peak_bytes_by_category")),
        loss=_curve(metrics, (*AXES, "train_loss")),
        evaluations=_curve(metrics, (*AXES, "val_loss")),
        device_bytes=_highest(steps, ("allocated_peak_bytes", "live_peak_bytes")),
        host_bytes=_highest(steps, ("rss_peak_bytes",)),
        drive_bytes=_highest(steps, ("drive_bytes",)),
        planned=_planned(summary),
        inside=_inside(run.rows("memory_step.csv")),
        steps=_thinned([*_stacked(steps, "step").items()]),
        phases=[*_stacked(memory, "phase").items()],
        on=str(summary.get("device") or ""),
    )


def front(every: Sequence[Figures]) -> list[Figures]:
    """Returns the runs on the Pareto front of speed and device memory, sorted by device memory. Runs for which one of
    the two was not measured are left out. A run is on the front unless another run is at least as fast, needs at most
    as much memory, and is strictly better in one of the two."""
    measured = [run for run in every if run.device is not None and run.tokens_per_second is not None]

    def beaten(run: Figures) -> bool:
        mine = (run.tokens_per_second, -run.device)
        theirs = ((other.tokens_per_second, -other.device) for other in measured)
        return any(t[0] >= mine[0] and t[1] >= mine[1] and t != mine for t in theirs)

    return sorted((run for run in measured if not beaten(run)), key=lambda run: (run.device, run.tokens_per_second))


def _sizes(by_category: object) -> dict[str, float]:
    every = by_category.items() if isinstance(by_category, dict) else ()
    return {category: size for category, value in every if (size := number(value) or 0) > 0}


def _planned(summary: dict) -> dict[str, tuple[float, float]]:
    try:
        both = {phase: sides["device"] for phase, sides in predicted_and_measured(summary).items() if "device" in sides}
    except (KeyError, TypeError, AttributeError):  # a summary of an earlier version
        return {}
    pairs = {phase: (number(predicted), number(measured)) for phase, (predicted, measured) in both.items()}
    return {phase: pair for phase, pair in pairs.items() if None not in pair and pair[1] > 0}


def _curve(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> Curve:
    """Returns a curve of the rows that have a value in each of `columns`. At most POINTS rows are kept, evenly spaced;
    the last row is always kept."""
    complete = [[number(row.get(column)) for column in columns] for row in rows]
    complete = [row for row in complete if None not in row]
    complete = complete[:: -math.ceil(len(complete) / POINTS)][::-1] if complete else []
    return [list(column) for column in zip(*complete, strict=True)] or [[] for _ in columns]


def _highest(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> Curve:
    """Returns a curve of two columns, steps and the highest bytes of each step. Of the `columns`, which contain bytes,
    the first with measurements is used."""
    for column in columns:
        by_step: dict[float, float] = {}
        for row in rows:
            step, size = number(row.get("step")), number(row.get(column))
            if step is not None and size is not None:
                by_step[step] = max(by_step.get(step, 0), size)
        if by_step:
            return _curve([{"x": str(x), "y": str(y)} for x, y in by_step.items()], ("x", "y"))
    return [[], []]


def _stacked(rows: Sequence[dict[str, str]], by: str) -> dict[str, list[float]]:
    """Returns bytes by category for each phase or each step. A phase has the bytes of its last row; a step has the
    bytes of its phase with the highest sum. `by` is "phase" or "step"."""
    largest: dict[str, list[float]] = {}
    for row in rows:
        sizes = [number(row.get(f"{category}_bytes")) for category in CATEGORIES]
        at = row.get(by)
        if at and None not in sizes and (by == "phase" or sum(sizes) > sum(largest.get(at, [0]))):
            largest[at] = sizes
    return largest


def _inside(rows: Sequence[dict[str, str]]) -> Stack:
    every = [(row.get("phase", ""), [number(row.get(f"{category}_bytes")) for category in CATEGORIES]) for row in rows]
    return _thinned([(phase, sizes) for phase, sizes in every if None not in sizes])


def _thinned(stack: Stack) -> Stack:
    """Returns at most POINTS points: the highest point of each interval, so that no peak is lost."""
    stretch = max(1, math.ceil(len(stack) / POINTS))
    return [max(stack[i : i + stretch], key=lambda row: sum(row[1])) for i in range(0, len(stack), stretch)]
