"""Sorts the tests into tiers by their marks.

A test is marked `matrix`, `wrong`, `docs`, `process` or `gpu`; a test without any of these marks is a `unit`. The mark
`seam` means that a test covers an interface between parts. `make test` runs such a test even if it also has another
mark, for example `process`. In a parametrized test, the rows that `rows` names become `seam` and the other rows
`matrix`; the rows that `matrix_rows` names become `matrix` and the other rows `seam`. `make test` runs the units and
the seams, and `make test-all` runs all tests. `--shard=2/4` runs the second of four disjoint parts of the selected
tests.

Starting a Python process takes seconds, so only tests with the mark `process` or `docs` may start one.
"""

import sys
import traceback
from fnmatch import fnmatchcase
from multiprocessing.process import BaseProcess
from pathlib import Path
from zlib import crc32

import pytest

PURPOSES = ("matrix", "wrong", "docs", "process", "gpu")


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", metavar="K/N", type=shard, help="run the K-th of N parts of the tests")


def shard(text: str) -> tuple[int, int]:
    """Returns (number of the part, number of parts): (2, 4) for "2/4". Raises: pytest.UsageError: the text does not
    have this form, or the part does not exist."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(
            f"--shard={text} is not a part of a whole. Type --shard=2/4 for the second of four parts."
        )
    return int(number), int(count)


@pytest.hookimpl(tryfirst=True)  # runs before pytest applies `-m`
def pytest_collection_modifyitems(config, items):
    if not any("::" in argument for argument in config.args):  # if a row is named, the other rows are not collected
        check_rows(items)
    for item in items:
        if "processes" in item.fixturenames:
            item.add_marker("process")
        if mark := mark_of(item):
            item.add_marker(mark)
    number, count = config.getoption("shard")
    others = [item for item in items if crc32(item.nodeid.encode()) % count != number - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def mark_of(item) -> str | None:
    """Returns the mark ("unit", "seam" or "matrix") that a test gets because of its other marks; None if it gets no
    further mark."""
    if has_row(item):
        named = [is_named(item, mark) for mark in item.iter_markers("rows")]
        left_out = [is_named(item, mark) for mark in item.iter_markers("matrix_rows")]
        if named or left_out:
            return "seam" if all(named) and not any(left_out) else "matrix"
    return None if any(item.get_closest_marker(name) for name in PURPOSES) else "unit"


def has_row(item) -> bool:
    return hasattr(item, "callspec")


def is_named(item, mark) -> bool:
    """Returns True if a pattern of the mark matches the row's id or a string among the row's values."""
    names = (item.callspec.id, *(value for value in item.callspec.params.values() if isinstance(value, str)))
    return any(fnmatchcase(name, pattern) for name in names for pattern in mark.args)


def check_rows(items) -> None:
    """Raises pytest.UsageError if the `rows` marks of a test leave the test without a seam, because their patterns
    match no row, exclude each other, or match only rows that are marked `matrix`."""
    found: dict[str, bool] = {}
    for item in filter(has_row, items):
        if item.get_closest_marker("rows"):
            test = item.nodeid.partition("[")[0]
            is_seam = mark_of(item) == "seam" and not item.get_closest_marker("matrix")
            found[test] = found.get(test, False) or is_seam
    if lost := [test for test, any_row in found.items() if not any_row]:
        raise pytest.UsageError(f"rows(...) of {', '.join(lost)} leaves no row that `make test` would run.")


running = []  # [the current test], or [] between tests


def pytest_configure(config):
    """Makes a test without the mark `process` or `docs` fail if it starts a process of Python or bash."""
    sys.addaudithook(refuse_command)
    start = BaseProcess.start
    BaseProcess.start = lambda process: (refuse(), start(process))[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    running.append(item)
    yield
    running.clear()


def refuse_command(event, arguments) -> None:
    """An audit hook that refuses processes of Python and bash, unless torch.compile starts them. Other programs, such
    as compilers and git, are allowed."""
    if event == "subprocess.Popen" and Path(str(arguments[0])).name.startswith(("python", "bash")):
        frames = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        if not any("_inductor" in file for file in frames):
            refuse()


def refuse() -> None:
    if running and not any(running[0].get_closest_marker(name) for name in ("process", "docs")):
        raise RuntimeError(f"{running[0].nodeid} starts a process. Mark it @pytest.mark.process.")
