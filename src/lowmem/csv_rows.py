"""A run's curves: files with a `step` in each row. A run that goes on in its own folder keeps what it had."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO


def open_csv(file: Path, columns: Sequence[str], until: int) -> tuple[TextIO, csv.DictWriter, list[dict[str, str]]]:
    """Args: until: the last step of which a row that is there already is kept, with the columns that it has.

    Returns:
        The open file, its writer, and the rows that were kept.
    """
    kept = []
    if until and file.is_file():
        with file.open(newline="", encoding="utf-8") as lines:
            whole = [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]
        kept = [dict.fromkeys(columns, "") | row for row in whole if int(row["step"]) <= until]
    out = file.open("w", newline="", encoding="utf-8")
    writer = csv.DictWriter(out, kept[0].keys() if kept else columns)
    writer.writeheader()
    writer.writerows(kept)
    return out, writer, kept


def cut_after(file: Path, until: int) -> None:
    """Drops the rows of later steps from a file with a row of JSON in each line."""
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(line for line in lines if json.loads(line)["step"] <= until), encoding="utf-8")
