"""Reads the folders of runs and sweeps, which may be finished, failed or still running, and formats a table of runs.

This module does not import torch, because the import takes seconds. compare.py does not need torch, and neither do the
commands that start the jobs of a sweep or the ranks of a run.
"""

import csv
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lowmem.config.typed_lines import as_mapping, unquoted
from lowmem.report.summary import highest
from lowmem.system import folder_locks
from lowmem.system.errors import Refused
from lowmem.system.units import GIB, duration, unit

FAILED = "failed.txt"  # file in the folder of a failed run, with the error message
WIDTH = 80  # characters: if a line of a table is longer, each run gets a second line for its overrides
LINE = 240  # maximum characters of a printed reason
QUIET = 600  # seconds without a changed file after which a run's status is unknown, if summary and lock do not show it


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the content of its files. `summary` is the content of summary.json, or None if the file
    is missing or cannot be read, or if the run has failed."""

    folder: Path
    overrides: list[str]
    summary: dict | None
    status: str  # done, interrupted, failed, running, broken or unknown
    reason: str = ""  # why the run has this status; empty if it is done

    def rows(self, file: str) -> list[dict[str, str]]:
        """Returns the rows of a csv file, such as metrics.csv, without incomplete rows. The list is empty if the file
        cannot be read."""
        try:
            with (self.folder / file).open(newline="", encoding="utf-8", errors="replace") as lines:
                return [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]
        except (OSError, csv.Error):
            return []


def load(folder: Path) -> RunFolder:
    """Reads the folder of a run, whatever its status."""
    locked = folder_locks.is_locked(folder)  # checked first: a run writes its summary before it releases the lock
    overrides, file = typed_in(folder), folder / "summary.json"
    if (folder / FAILED).is_file():
        return RunFolder(
            folder, overrides, None, "failed", (folder / FAILED).read_text(errors="replace", encoding="utf-8").strip()
        )
    if file.is_file():
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
            done = not summary["interrupted"]
            overrides = [str(line) for line in summary["overrides"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return RunFolder(folder, overrides, None, "broken", f"summary.json cannot be read ({_name(error)})")
        by = f"ended by {summary.get('signal') or 'hand'}"  # earlier versions wrote no signal, and handled only Ctrl-C
        return RunFolder(folder, overrides, summary, *(("done",) if done else ("interrupted", by)))
    return RunFolder(folder, overrides, None, *_without_summary(folder, locked))


def _without_summary(folder: Path, locked: bool | None) -> tuple[str, str]:
    """Returns the status of a run without a summary, and the reason. A running process locks its folder, but the lock
    may not be visible on other machines. `locked` is the result of `folder_locks.is_locked`."""
    if locked:
        return "running", "no summary.json yet"
    if locked is False and f"host: {platform.node()}" in _hydras_config(folder):
        return "broken", "the process ended without a summary.json"
    try:
        quiet = time.time() - max((path.stat().st_mtime for path in folder.iterdir() if path.is_file()), default=0.0)
    except OSError as error:
        return "unknown", f"the folder cannot be listed ({error.strerror})"
    if quiet < QUIET:
        return "running", "no summary.json yet"
    return "unknown", f"no file changed for {duration(quiet)}; it may be running on another machine"


def runs_below(folder: Path) -> list[RunFolder]:
    """Returns the run in `folder`, or if `folder` is not a run, all runs below it. Sibling folders with numbers as
    names are in numerical order.

    Raises:
        Refused: no run was found, or `folder` does not exist or is a file.
    """
    if not folder.exists():
        raise Refused(f"{folder}: this folder does not exist. Runs are in outputs/ and multirun/.")
    if not folder.is_dir():
        raise Refused(f"{folder}: this is a file. Give the folder of a run, or a folder that contains runs.")
    if _is_run(folder):
        return [load(folder)]
    below = sorted((path.parent for path in folder.rglob(".hydra") if path.is_dir()), key=_order)
    below += sorted({path.parent for path in folder.rglob("summary.json")} - set(below), key=_order)
    runs = [load(path) for path in below if _is_run(path)]
    if not runs:
        raise Refused(f"{folder}: this folder contains no run of train.py (a folder with summary.json or .hydra).")
    return runs


def sweep_of(folder: Path) -> Path | None:
    """Returns the folder of the sweep that started the job in `folder`; None if no sweep started it. The sweep's folder
    may be several levels above the job's folder, because hydra.sweep.subdir may contain slashes."""
    return next((above for above in folder.parents if (above / "multirun.yaml").is_file()), None)


def differing(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the keys of overrides whose values differ between runs, and the keys that only some runs have, in the
    order in which the keys were typed."""
    every = [as_mapping(run.overrides) for run in runs]
    keys = dict.fromkeys(key for typed in every for key in typed)
    return [key for key in keys if len({typed.get(key) for typed in every}) > 1]


def _learned_rate(summary: dict) -> float:
    """Returns the learned tokens (tokens with a label) per second. Earlier versions of lowmem stored this rate as
    `tokens_per_second`."""
    ours = "learned_tokens_per_second"
    return summary[ours if ours in summary else "tokens_per_second"]


# column of the table -> (function that reads its value from a summary, format). `written` replaces the formats of the
# columns in GiB.
FIGURES = {
    "validation loss": (lambda s: s["val_loss"], "{:.4f}"),
    "accuracy": (lambda s: s["validation"][0]["accuracy"], "{:.3f}"),
    "bits per byte": (lambda s: s["bits_per_byte"], "{:.3f}"),
    "tokens/s": (lambda s: s["tokens_per_second"] or None, "{:,.0f}"),  # 0 if the run only evaluated
    "learned tokens/s": (lambda s: _learned_rate(s) or None, "{:,.0f}"),
    "device GiB": (lambda s: highest(s, "device") / GIB, "{:.3f}"),
    "host GiB": (lambda s: highest(s, "host_rss") / GIB, "{:.3f}"),
    "drive GiB": (lambda s: s["drive"]["bytes"] / GIB, "{:.3f}"),
    "drive GB/s": (lambda s: s["drive"]["read_gb_per_second"] + s["drive"]["written_gb_per_second"], "{:.2f}"),
}


def columns(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the columns of the table. Columns about a drive, and the accuracy of preference losses, are included if
    at least one run has values for them. The rate of learned tokens is included if, in at least one run, it differs
    from the rate of all tokens."""
    rare = [name for name in FIGURES if "drive" in name or name == "accuracy"]
    found = [name for name in FIGURES if name not in rare or any(figure(run, name) is not None for run in runs)]
    return found if any(map(_has_unlearned, runs)) else [name for name in found if name != "learned tokens/s"]


def _has_unlearned(run: RunFolder) -> bool:
    return figure(run, "learned tokens/s") != figure(run, "tokens/s")


def figure(run: RunFolder, column: str) -> float | None:
    """Returns the value of a column from a run's summary; None if the run has no summary, or did not measure the value.
    `column` is a key of FIGURES."""
    try:
        return number(FIGURES[column][0](run.summary))
    except (ArithmeticError, LookupError, TypeError):
        return None


def number(value: object) -> float | None:
    """Converts a value from a run's file to a float; None if it is not a finite number."""
    try:
        value = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def table(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """Returns a table with a row per run: the overrides in which runs differ, the run's figures and its status. If a
    row is wider than WIDTH characters, each run gets a second line for these overrides. `names` are the names of the
    runs."""
    keys, typed = differing(runs), [as_mapping(run.overrides) for run in runs]
    written_columns = dict(written(runs, column) for column in columns(runs))
    shown, figures = [*written_columns], zip(*written_columns.values(), strict=True)
    rows = [[name, *values, run.status] for name, values, run in zip(names, figures, runs, strict=True)]
    in_one_line = [
        [row[0], *(overrides.get(key, "-") for key in keys), *row[1:]]
        for row, overrides in zip(rows, typed, strict=True)
    ]
    lines = _aligned([["run", *keys, *shown, "status"], *in_one_line])
    if max(map(len, lines)) <= WIDTH:
        return "\n".join(lines)
    head, units, *lines = _aligned([["run", *shown, "status"], *rows])
    below = (" ".join(f"{key}={overrides[key]}" for key in keys if key in overrides) for overrides in typed)
    return "\n".join([head, units, *(f"{line}\n  {rest}".rstrip() for line, rest in zip(lines, below, strict=True))])


def reasons(runs: Sequence[RunFolder], names: Sequence[str]) -> list[str]:
    """Returns the reasons why runs are not done: a line per reason, with the names of all runs to which the reason
    applies."""
    shared: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        if run.reason:
            shared.setdefault(f"{run.status}: {line(run.reason)}", []).append(name)
    return [f"{', '.join(alike)} {reason}" for reason, alike in shared.items()]


def notes(runs: Sequence[RunFolder], names: Sequence[str]) -> list[str]:
    """Returns a list with one note about runs of earlier versions, whose numbers of tokens cannot be compared with the
    other runs' numbers. The list is empty if all runs are comparable."""
    learned_only = {
        name: "learned_tokens" not in run.summary for name, run in zip(names, runs, strict=True) if run.summary
    }
    older = [name for name, is_older in learned_only.items() if is_older]
    if len(older) in (0, len(learned_only)):
        return []
    return [
        f"{', '.join(older)}: an earlier version counted only learned tokens (with a label) in tokens and tokens/s."
    ]


def written(runs: Sequence[RunFolder], column: str) -> tuple[str, list[str]]:
    """Returns the title of a column, and its formatted value for each run. Bytes are in MiB if all values are below 1
    GiB."""
    values, form, title = [figure(run, column) for run in runs], FIGURES[column][1], column
    if column.endswith("GiB"):
        size, name, digits = unit(max((value * GIB for value in values if value is not None), default=GIB))
        values = [value if value is None else value * GIB / size for value in values]
        form, title = f"{{:,.{digits}f}}", column.replace("GiB", name)
    return title, ["-" if value is None else form.format(value) for value in values]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with aligned columns. Most titles are wider than the figures below them, so a title is split into
    two lines before its last word. The first row has the titles."""
    heads = [cell.rpartition(" ") for cell in rows[0]]
    rows = [[above for above, _, _ in heads], [word for _, _, word in heads], *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _is_run(folder: Path) -> bool:
    lines = _hydras_config(folder)
    # .hydra/hydra.yaml contains the name of the command
    return "name: train" in lines if lines else (folder / "summary.json").is_file()


def _hydras_config(folder: Path) -> set[str]:
    """Returns the lines of the run's .hydra/hydra.yaml, without indentation; an empty set if the file cannot be
    read."""
    try:
        text = (folder / ".hydra" / "hydra.yaml").read_text(errors="replace", encoding="utf-8")
    except OSError:
        return set()
    return {line.strip() for line in text.splitlines()}


def typed_in(folder: Path) -> list[str]:
    """Returns the overrides that Hydra wrote into this folder last: by the command that created the folder, or by a
    command that resumed the run in the same folder. The list is empty if they cannot be read."""
    try:
        return list(map(unquoted, lines_of(folder / ".hydra" / "overrides.yaml")))
    except (OSError, Refused):
        return []


def lines_of(file: Path) -> list[str]:
    """Returns the overrides in Hydra's file overrides.yaml.

    Raises:
        Refused: the file is damaged.
        OSError: the file cannot be read.
    """
    try:
        lines = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        lines = None
    if not isinstance(lines, list):
        raise Refused(f"{file} is damaged: it should list the overrides. Delete it, and type the overrides again.")
    return list(map(str, lines))


def _order(folder: Path) -> tuple:
    return folder.parent, int(folder.name) if folder.name.isdigit() else 0, folder.name


def line(text: str) -> str:
    """Returns the most informative line of an error, at most LINE characters: the last line of a traceback, or the
    first line of any other text."""
    lines = text.splitlines() or [""]
    return lines[-1 if lines[0].startswith("Traceback") else 0][:LINE]


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
