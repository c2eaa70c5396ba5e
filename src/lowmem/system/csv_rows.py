"""Opens the csv files of a run, which have a `step` in each row. A resumed run keeps the rows of its earlier steps."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO


def open_csv(file: Path, columns: Sequence[str], until: int) -> tuple[TextIO, csv.DictWriter, list[dict[str, str]]]:
    """Opens a file for more rows. Args: until: the last step whose old rows stay, with the columns that they have.

    Returns:
        The open file, its writer, and the old rows.
    """
    old_rows = []
    if until and file.is_file():
        with file.open(newline="", encoding="utf-8") as lines:
            complete = [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]
        old_rows = [dict.fromkeys(columns, "") | row for row in complete if int(row["step"]) <= until]
    out = file.open("w", newline="", encoding="utf-8")
    writer = csv.DictWriter(out, old_rows[0].keys() if old_rows else columns)
    writer.writeheader()
    writer.writerows(old_rows)
    return out, writer, old_rows


def cut_after(file: Path, until: int) -> None:
    """Drops the rows of later steps from a file with a row of JSON in each line."""
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(line for line in lines if json.loads(line)["step"] <= until), encoding="utf-8")
