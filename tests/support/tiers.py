"""Sorts the tests into tiers: `make test` runs every seam once, `make test-all` every row of every matrix.

A test that takes long and has a smaller sibling is marked `slow`. Most rows of a matrix repeat what another row has
shown about the seam: `rows` names those that `make test` runs, `slow_rows` those that it leaves to `make test-all`.
`--shard=2/4` runs a quarter of whatever else is chosen, always the same one, so that four runs make a whole.
"""

from fnmatch import fnmatchcase
from zlib import crc32

import pytest


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", metavar="K/N", type=shard, help="run the K-th of N parts of the tests")


def shard(text: str) -> tuple[int, int]:
    """Reads "2/4" as (2, 4)."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard={text} is no part of a whole. Type --shard=2/4 for the second of four parts.")
    return int(number), int(count)


@pytest.hookimpl(tryfirst=True)  # before pytest itself reads `-m "not slow"`
def pytest_collection_modifyitems(config, items):
    if not any("::" in argument for argument in config.args):  # else only some rows of a matrix have been collected
        check_names(items)
    for item in items:
        if has_row(item) and not is_fast(item):
            item.add_marker(pytest.mark.slow)
    number, count = config.getoption("shard")
    others = [item for item in items if crc32(item.nodeid.encode()) % count != number - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def has_row(item) -> bool:
    return hasattr(item, "callspec")


def is_fast(item) -> bool:
    named = [is_named(item, mark) for mark in item.iter_markers("rows")]
    left_out = [is_named(item, mark) for mark in item.iter_markers("slow_rows")]
    return all(named) and not any(left_out)


def is_named(item, mark) -> bool:
    """Compares the patterns with the row's id and with each of its values that is text."""
    names = (item.callspec.id, *(value for value in item.callspec.params.values() if isinstance(value, str)))
    return any(fnmatchcase(name, pattern) for name in names for pattern in mark.args)


def check_names(items) -> None:
    """Refuses `rows` that name no row, or a matrix would silently lose its fast rows when one is renamed."""
    found: dict[str, bool] = {}
    for item in filter(has_row, items):
        for mark in item.iter_markers("rows"):
            test = item.nodeid.partition("[")[0]
            found[test] = found.get(test, False) or is_named(item, mark)
    if lost := [test for test, any_row in found.items() if not any_row]:
        raise pytest.UsageError(f"rows(...) of {', '.join(lost)} names none of its rows: `make test` would skip it.")
