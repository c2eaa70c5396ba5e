"""Implements the command compare.py, which compares runs in a printed table, a csv file and an html page."""

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lowmem.config.typed_lines import as_mapping
from lowmem.report import folders
from lowmem.report.compare.page import page
from lowmem.system.errors import Refused
from lowmem.system.terminal import folded


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="compare.py", description="Compare runs in a table, a csv file and an html page."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="the folder of a run, or a folder that contains runs")
    parser.add_argument(
        "--to",
        type=Path,
        help=(
            "folder for comparison.csv and comparison.html (default: the given folder if there is only one, else the "
            "current folder)"
        ),
    )
    options = parser.parse_args(arguments)
    try:
        compare(options.folders, options.to)
    except Refused as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}. Type --to <a writable folder>.")


def compare(paths: Sequence[Path], to: Path | None = None) -> list[Path]:
    """Prints a table of runs, and writes comparison.csv and comparison.html.

    Args:
        paths: folders of runs, or folders that contain runs.
        to: the folder for both files. None: the given folder if there is only one, otherwise the current folder.

    Returns:
        The paths of both files.

    Raises:
        Refused: a path does not exist, is a file, or contains no run.
        OSError: a file cannot be written.
    """
    runs = list({run.folder.resolve(): run for folder in paths for run in folders.runs_below(folder)}.values())
    names = _names([run.folder for run in runs])
    print(folded("\n".join([folders.table(runs, names), *folders.reasons(runs, names), *folders.notes(runs, names)])))
    to = to or (paths[0] if len(paths) == 1 else Path())
    to.mkdir(parents=True, exist_ok=True)
    table, html = to / "comparison.csv", to / "comparison.html"
    with table.open("w", newline="", encoding="utf-8") as out:
        _write(out, runs, names)
    html.write_text(page(runs, names), encoding="utf-8")
    print(f"\nwrote {table} and {html}")
    return [table, html]


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the paths of folders relative to their lowest common parent folder, as unique names. A single folder has
    its own name."""
    if len(paths) == 1:
        return [paths[0].resolve().name]
    resolved = [folder.resolve() for folder in paths]
    above = Path(os.path.commonpath(resolved))
    return [str(folder.relative_to(above)) for folder in resolved]


def _write(out, runs: Sequence[folders.RunFolder], names: Sequence[str]) -> None:
    """Writes a csv file with a row per run: all overrides, and the figures without rounding. Sizes are in GiB."""
    keys = dict.fromkeys(key for run in runs for key in as_mapping(run.overrides))
    columns = folders.columns(runs)
    writer = csv.writer(out)
    writer.writerow(["run", *keys, *columns, "status", "reason"])
    for run, name in zip(runs, names, strict=True):
        typed = as_mapping(run.overrides)
        figures = [folders.figure(run, column) for column in columns]
        writer.writerow([name, *(typed.get(key, "") for key in keys), *figures, run.status, run.reason])
