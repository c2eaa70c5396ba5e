"""Tests the marks of the test suite: `make test` runs units and seams, and all shards together run each test once."""

import re

import pytest

from conftest import ROOT

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.docs

TESTS = """
import pytest

ROWS = pytest.mark.parametrize("row", ["a", "b", "b-c"])

@pytest.mark.rows("a")
@ROWS
def test_one(row): pass

@pytest.mark.rows("*c")
@ROWS
def test_pattern(row): pass

@pytest.mark.matrix_rows("a", "b")
@pytest.mark.parametrize("other", [0, 1])
@ROWS
def test_but_two(row, other): pass

@pytest.mark.process
@pytest.mark.seam
@pytest.mark.parametrize("row", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_seam(row): pass

@pytest.mark.process
def test_process(): pass

@pytest.mark.wrong
@pytest.mark.rows("a")
@ROWS
def test_wrong(row): pass

def test_unit(): pass
"""
FIRST = {
    "test_one[a]",
    "test_pattern[b-c]",
    "test_but_two[b-c-0]",
    "test_but_two[b-c-1]",
    "test_seam[0]",
    "test_wrong[a]",
    "test_unit",
}


PROCESSES = """
import multiprocessing, subprocess, sys
import pytest

PYTHON = [sys.executable, "-c", ""]

def test_command(): subprocess.run(PYTHON, check=True)

def test_worker():
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()

@pytest.fixture
def command(): return subprocess.run(PYTHON, check=True)

def test_fixture(command): pass

@pytest.mark.process
def test_marked(command): pass

@pytest.mark.docs
def test_docs(command): pass

def test_other_program(): subprocess.run(["true"], check=True)
"""


@pytest.fixture(scope="module")
def make_test():
    """Returns the expression of marks that `make test` passes to pytest."""
    (line,) = re.findall(r"^FIRST = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return line


@pytest.fixture
def chosen(pytester):
    """Returns a function that takes arguments of pytest, and returns the names of the tests that pytest collects, or
    pytest's output if it fails."""

    def collect(*arguments, tests=TESTS):
        pytester.makepyfile(tests)
        result = pytester.runpytest_inprocess("-p", "tiers", "--collect-only", "-q", "-W", "ignore", *arguments)
        lines = [line.partition("::")[2] for line in result.outlines if "::" in line]
        return set(lines) if result.ret == 0 else "\n".join(result.outlines + result.errlines)

    return collect


def test_make_test_selects_only_units_and_seams(chosen, make_test):
    assert chosen("-m", make_test) == FIRST


def test_shards_of_the_test_suite_are_disjoint_and_complete(chosen):
    first, second, every = chosen("--shard=1/2"), chosen("--shard=2/2"), chosen()
    assert len(every) == 19 and every > FIRST and first | second == every and not first & second


@pytest.mark.parametrize(
    "rows", ['rows("renamed")', 'rows("a")\n@pytest.mark.rows("b")', 'rows("a")\n@pytest.mark.matrix']
)
def test_rows_mark_that_selects_no_row_for_make_test_is_refused(chosen, rows):
    changed = TESTS.replace('rows("a")', rows)
    assert "rows(...) of test_one, test_wrong leaves no row" in re.sub(r"\S+::", "", chosen(tests=changed))


def test_invalid_shard_is_refused(chosen):
    assert "--shard=2/4 for the second of four parts" in chosen("--shard=5/4")


def test_unmarked_test_that_starts_a_python_process_fails(pytester, monkeypatch):
    """pytest runs in a separate process, because an audit hook cannot be removed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    pytester.makepyfile(PROCESSES)
    result = pytester.runpytest_subprocess("-p", "tiers", "-q", "-W", "ignore")
    result.assert_outcomes(passed=3, failed=2, errors=1)
    result.stdout.fnmatch_lines(["*test_command starts a process. Mark it @pytest.mark.process."])
