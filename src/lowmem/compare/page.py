"""comparison.html: one file with the figures of all runs, the script that draws them, and plotly inside."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from lowmem import runs
from lowmem.report.summary import both
from lowmem.runs import Run
from lowmem.units import CATEGORIES

HERE = Path(__file__).parent
POINTS = 2000  # of a curve: more than a screen has


def page(found: Sequence[Run], names: Sequence[str]) -> str:
    """Args: names: of the runs."""
    from plotly.offline import get_plotlyjs  # a second, and 4.6 MB

    data = json.dumps({"categories": CATEGORIES, "runs": [*map(_figures, found, names, _labels(found, names))]})
    parts = {
        "/*STYLE*/": (HERE / "page.css").read_text(),
        "/*PLOTLY*/": get_plotlyjs(),
        "/*DATA*/": data.replace("</", "<\\/"),  # or a reason that quotes HTML could end the script
        "/*SCRIPT*/": (HERE / "page.js").read_text(),
    }
    html = (HERE / "page.html").read_text()
    for mark, content in parts.items():
        html = html.replace(mark, content)
    return html


def _labels(found: Sequence[Run], names: Sequence[str]) -> list[str]:
    """What was typed differently; the name where that does not tell runs apart."""
    keys = runs.differing(found)
    typed = [runs.as_mapping(run.overrides) for run in found]
    labels = [" ".join(f"{key}={one[key]}" for key in keys if key in one) for one in typed]
    return [
        label if label and labels.count(label) == 1 else f"{name} {label}".strip()
        for label, name in zip(labels, names, strict=True)
    ]


def _figures(run: Run, name: str, label: str) -> dict:
    metrics, memory = run.rows("metrics.csv"), run.rows("memory.csv")
    summary = run.summary or {}
    steps = [row for row in memory if row.get("phase") in ("forward", "backward", "step")]
    return {
        "name": name,
        "label": label,
        "overrides": run.overrides,
        "status": run.status,
        "reason": run.reason,
        "short": runs.line(run.reason),
        "device": summary.get("device"),
        "figures": {column: runs.figure(run, column) for column in runs.FIGURES},
        "peak": summary.get("peak_bytes_by_category"),
        "loss": _curve(metrics, ("tokens", "seconds", "train_loss")),
        "val_loss": _curve(metrics, ("tokens", "seconds", "val_loss")),
        "device_bytes": _highest(steps, ("allocated_peak_bytes", "live_peak_bytes")),
        "host_bytes": _highest(steps, ("rss_peak_bytes",)),
        "phases": _stacked(memory, "phase"),
        "steps": _stacked(steps, "step"),
        "inside": _inside(run.rows("memory_step.csv")),
        "planned": {phase: sides["device"] for phase, sides in both(summary).items() if "device" in sides},
    }


def _curve(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> list[list[float]]:
    """A list per column, of the rows that have all of them."""
    whole = [[_number(row.get(column)) for column in columns] for row in rows]
    whole = [row for row in whole if None not in row]
    whole = whole[:: max(1, len(whole) // POINTS)]
    return [list(column) for column in zip(*whole, strict=True)] or [[] for _ in columns]


def _highest(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> list[list[float]]:
    """(steps, bytes) of the first of the columns that was measured."""
    for column in columns:
        by_step: dict[float, float] = {}
        for row in rows:
            step, size = _number(row.get("step")), _number(row.get(column))
            if step is not None and size is not None:
                by_step[step] = max(by_step.get(step, 0), size)
        if by_step:
            return _curve([{"x": str(x), "y": str(y)} for x, y in by_step.items()], ("x", "y"))
    return [[], []]


def _stacked(rows: Sequence[dict[str, str]], by: str) -> list[tuple[str, list[float]]]:
    """(phase or step, bytes of each category): of a phase the last that was sampled, of a step its highest phase."""
    found: dict[str, list[float]] = {}
    for row in rows:
        sizes = [_number(row.get(f"{category}_bytes")) for category in CATEGORIES]
        if None not in sizes and (by == "phase" or sum(sizes) > sum(found.get(row["step"], [0]))):
            found[row[by]] = sizes
    return list(found.items())[:: max(1, len(found) // POINTS)]


def _inside(rows: Sequence[dict[str, str]]) -> list[tuple[str, list[float]]]:
    """(phase, bytes of each category) at every allocation of one step."""
    found = [(row.get("phase", ""), [_number(row.get(f"{category}_bytes")) for category in CATEGORIES]) for row in rows]
    return [(phase, sizes) for phase, sizes in found if None not in sizes]


def _number(text: str | None) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
