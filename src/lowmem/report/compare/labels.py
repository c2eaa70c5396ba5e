"""Makes short labels for runs on the comparison page, from the overrides in which the runs differ."""

import re
from collections.abc import Sequence
from itertools import takewhile

from lowmem.config.typed_lines import as_mapping
from lowmem.report import folders
from lowmem.report.folders import RunFolder

LONG = 20  # characters of a value; longer values are shortened
# values that need their key to be understood
MUTE = re.compile(r"(none|null|true|false|auto|off|[^a-z].*)", re.IGNORECASE)


def labels(runs: Sequence[RunFolder], names: Sequence[str]) -> list[str]:
    """Returns a unique label for each run.

    Args:
        names: unique names of the runs. A run's name is added to its label if the label would be empty or equal to
            another label.
    """
    keys = folders.differing(runs)
    typed = [as_mapping(run.overrides) for run in runs]
    columns = [_column(key, keys, [overrides.get(key) for overrides in typed]) for key in keys]
    written = [" ".join(column[i] for column in columns if column[i]) for i in range(len(runs))]
    for called in (shortened(names), names):
        alike = {label for label in written if not label or written.count(label) > 1}
        named = (f"{name} {label}".strip() for name, label in zip(called, written, strict=True))
        written = [new if label in alike else label for new, label in zip(named, written, strict=True)]
    return written


def shortened(values: Sequence[str]) -> list[str]:
    """Shortens values if one of them has more than LONG characters: first removes the folders or words with which all
    values begin or end, and then the middle of each value that is still too long."""
    short = list(values)
    for separators in ("/", "/_ -"):
        if max(map(len, short), default=0) > LONG and len(set(short)) > 1:
            short = _without_ends(short, separators)
    return [v if len(v) <= LONG else f"{v[: LONG // 2 - 1]}…{v[-LONG // 2 :]}" for v in short]


def _without_ends(values: Sequence[str], separators: str) -> list[str]:
    head = _shared(values, separators)
    tail = _shared([value[head:][::-1] for value in values], separators)
    return ["…" * (head > 0) + value[head : len(value) - tail] + "…" * (tail > 0) for value in values]


def _shared(values: Sequence[str], separators: str) -> int:
    """Returns the length of the longest common prefix that ends with a separator; 0 if there is none."""
    alike = takewhile(lambda characters: len({*characters}) == 1, zip(*values, strict=False))
    shared = [characters[0] for characters in alike]
    return max((i + 1 for i, character in enumerate(shared) if character in separators), default=0)


def _column(key: str, keys: Sequence[str], values: Sequence[str | None]) -> list[str | None]:
    """Returns the part of each run's label that is about one key: the value alone if it can be understood without the
    key, otherwise the key and the value. The key is shortened to its last component if no other key in `keys` ends with
    the same component. The part is None for a run without the key."""
    last = key.rpartition(".")[2]
    name = last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key
    typed = list(dict.fromkeys(value for value in values if value is not None))
    short = dict(zip(typed, shortened(typed), strict=True))
    alone = {value for value in typed if "." not in key and not MUTE.fullmatch(short[value])}
    return [
        value if value is None else short[value] if value in alone else f"{name}={short[value]}" for value in values
    ]
