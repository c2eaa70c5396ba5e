"""In what memory is counted, and by what: known without importing torch."""

import math
import re

MIB, GIB = 2**20, 2**30
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")


def unit(largest: float) -> tuple[int, str, int]:
    """(bytes, name, digits behind the point) in which a table or a chart with this largest size is written."""
    return (GIB, "GiB", 3) if largest >= GIB else (MIB, "MiB", 1)


def duration(seconds: float) -> str:
    """45.2 -> "45 s", 754 -> "13 min", 12000 -> "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def steps_or_seconds(every: object) -> tuple[float, float]:
    """500 -> (500, inf), "30min" -> (inf, 1800.0).

    Raises:
        ValueError: what is neither.
    """
    minutes = re.fullmatch(r"(\d+(?:\.\d+)?) ?min", str(every))
    if minutes and float(minutes[1]):
        return math.inf, 60 * float(minutes[1])
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(every)
    return every, math.inf
