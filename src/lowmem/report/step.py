"""Writes memory_step.csv: live bytes of the device side by category, at every allocation inside one optimizer step."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from lowmem.memory.tracker import Point
from lowmem.system.units import CATEGORIES

MOST = 2000  # rows: more than a screen has columns


def write(file: Path, timeline: Sequence[Point]) -> None:
    """Writes the file. Args: timeline: of a step, in order."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["phase", *(f"{category}_bytes" for category in CATEGORIES)])
        for point in thinned(timeline):
            writer.writerow([point.phase, *(point.bytes[category] for category in CATEGORIES)])


def thinned(timeline: Sequence[Point], most: int = MOST) -> list[Point]:
    """Returns at most `most` points: the highest of each stretch, so that no peak is lost."""
    stretch = max(1, math.ceil(len(timeline) / most))
    return [max(timeline[i : i + stretch], key=lambda p: p.total) for i in range(0, len(timeline), stretch)]
