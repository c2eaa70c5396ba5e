"""Writes memory_step.csv: the bytes of live tensors on the device by category, during one optimizer step. The file has
at most about 2,000 rows."""

import csv
from collections.abc import Iterable
from pathlib import Path

from lowmem.memory.tracker import Point
from lowmem.system.units import CATEGORIES


def write(file: Path, timeline: Iterable[Point]) -> None:
    """Writes the file. `timeline` has the points of an optimizer step, in order."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["phase", *(f"{category}_bytes" for category in CATEGORIES)])
        writer.writerows([point.phase, *(point.bytes[category] for category in CATEGORIES)] for point in timeline)
