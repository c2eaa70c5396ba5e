"""Opens the csv files of a run, such as `metrics.csv`, and drops the rows after the step from which a run resumes.
`cut_after` drops the lines after this step from `samples.jsonl`, a file with one JSON object per line.

Each row or object has a `step`. Files are replaced atomically: if a process is killed while a run resumes, the file has
either all old rows or only the kept rows.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TextIO

from lowmem.system.atomic_files import atomic_write


def open_csv(file: Path, columns: Sequence[str], until: float) -> tuple[TextIO, csv.DictWriter, dict[str, str]]:
    """Opens a csv file to which rows are appended. Rows that are already in the file are kept up to the step `until`.

    Args:
        columns: the columns of new rows. Columns that only old rows have are kept.
        until: the last step whose old rows are kept; 0 drops all old rows, inf drops none.

    Returns:
        The open file, its writer, and the last nonempty value of each column in the kept rows.
    """
    rows = _complete_rows(file, until) if until and file.is_file() else iter(())
    first, last = next(rows, {}), {}
    header = list(dict.fromkeys([*columns, *first]))
    with atomic_write(file) as draft, draft.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, header)
        writer.writeheader()
        for row in chain([first] if first else [], rows):
            writer.writerow(row)
            last |= {column: value for column, value in row.items() if value}
    out = file.open("a", newline="", encoding="utf-8")
    return out, csv.DictWriter(out, header), last


def _complete_rows(file: Path, until: float) -> Iterator[dict[str, str]]:
    """Yields the rows up to and including step `until`. Skips incomplete rows, which a killed process may leave at the
    end."""
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(line for line in lines if line.endswith("\n")):
            if None not in row and None not in row.values() and int(row["step"]) <= until:
                yield row


def cut_after(file: Path, until: int) -> None:
    """Drops the lines after step `until`, and an incomplete last line, from a file with one JSON object per line."""
    if file.exists():
        with file.open(encoding="utf-8") as lines:
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= until]
        with atomic_write(file) as draft:
            draft.write_text("".join(kept), encoding="utf-8")
