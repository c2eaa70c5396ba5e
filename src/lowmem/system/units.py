"""Defines units and categories of memory, formats sizes, durations and counts, and parses intervals. Does not import
torch."""

import math
import re

MIB, GIB = 2**20, 2**30
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "other")
HOST_CATEGORIES = (*CATEGORIES, "masters")
WORDS = {category: category for category in CATEGORIES} | {"optimizer": "optimizer state", "other": "temporaries"}


def share_of_limit(size: int | None, limit: int | None) -> str | None:
    """Returns a text such as "85% of the device's limit"; None if there is no limit or no measured size."""
    return f"{size / limit:.0%} of the device's limit" if size and limit else None


def byte_size(size: float) -> str:
    """Returns a readable size, such as "12.3 MiB" (below 1 GiB) or "1.234 GiB"."""
    size_of_unit, name, digits = unit(size)
    return f"{size / size_of_unit:,.{digits}f} {name}" if size else "0 MiB"


def unit(largest: float) -> tuple[int, str, int]:
    """Returns (bytes, name, decimals) of the unit for a table or a chart whose largest size is `largest`."""
    return (GIB, "GiB", 3) if largest >= GIB else (MIB, "MiB", 1)


def duration(seconds: float) -> str:
    """Returns a duration as text: "45 s" for 45.2, "13 min" for 754, "3 h 20 min" for 12000."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def quantity(count: int, noun: str) -> str:
    """Returns a count with its noun: "1 pair" for (1, "pair"), "1,200 pairs" for (1200, "pair"), "2 batches" for (2,
    "batch")."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def steps_or_seconds(every: object) -> tuple[float, float]:
    """Parses an interval in steps or minutes, and returns (steps, seconds): (500, inf) for 500, (inf, 1800.0) for
    "30min".

    Raises:
        ValueError: `every` is neither a positive integer nor a positive number of minutes.
    """
    minutes = re.fullmatch(r"(\d+(?:\.\d+)?) ?min", str(every))
    if minutes and float(minutes[1]):
        return math.inf, 60 * float(minutes[1])
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(every)
    return every, math.inf
