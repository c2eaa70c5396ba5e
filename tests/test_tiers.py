"""`make test` runs the rows that are named, and shards together run each test once."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

ROWS = pytest.mark.parametrize("row", ["a", "b", "b-c"])

@pytest.mark.rows("a")
@ROWS
def test_one(row): pass

@pytest.mark.rows("*c")
@ROWS
def test_pattern(row): pass

@pytest.mark.slow_rows("a", "b")
@pytest.mark.parametrize("other", [0, 1])
@ROWS
def test_but_two(row, other): pass

@pytest.mark.slow
def test_long(): pass

def test_short(): pass
"""
FAST = {"test_one[a]", "test_pattern[b-c]", "test_but_two[b-c-0]", "test_but_two[b-c-1]", "test_short"}


@pytest.fixture
def chosen(pytester):
    """(arguments) -> the tests that pytest collects, or what it says in their place."""

    def collect(*arguments, tests=TESTS):
        pytester.makepyfile(tests)
        result = pytester.runpytest_inprocess("-p", "tiers", "--collect-only", "-q", "-W", "ignore", *arguments)
        lines = [line.partition("::")[2] for line in result.outlines if "::" in line]
        return set(lines) if result.ret == 0 else "\n".join(result.outlines + result.errlines)

    return collect


def test_fast_rows_are_those_that_are_named(chosen):
    assert chosen("-m", "not slow") == FAST


def test_shards_make_a_whole_and_share_nothing(chosen):
    first, second, every = chosen("--shard=1/2"), chosen("--shard=2/2"), chosen()
    assert len(every) == 14 and every > FAST and first | second == every and not first & second


def test_rows_that_name_nothing_are_refused(chosen):
    renamed = TESTS.replace('rows("a")', 'rows("renamed")')
    assert "test_one names none of its rows" in chosen("-m", "not slow", tests=renamed)


def test_a_shard_that_is_no_part_is_refused(chosen):
    assert "--shard=2/4 for the second of four parts" in chosen("--shard=5/4")
