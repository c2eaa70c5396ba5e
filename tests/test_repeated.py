"""Tests that repeated.py finds repeated code, and does not report places that share little code."""

import pytest

from repeated import LEAST, main, repeated

pytestmark = pytest.mark.docs

FUNCTION = """
def longest(rows, limit):
    best = None
    for row in rows:
        if len(row) > limit:  # tokens
            continue
        best = row

    return best or "none"
"""
RENAMED = """
def slowest(steps, most):
    \"\"\"Return the last step that is not too long.\"\"\"
    found = None
    for step in steps:
        if len(step) > most:
            continue

        found = step
    return found or "-"
"""
EXCHANGED = FUNCTION.replace("len(row) > limit", "len(limit) > row")
FIVE = "".join(FUNCTION.splitlines(keepends=True)[:6])
IMPORTS = "".join(f"import {name}\nfrom {name} import (\n    {name},\n)\n" for name in "abcdef")
ROWS = "rows = [\n" + "".join(f'    row("{number}", size={number}),\n' for number in range(8)) + "]\n"
FORMATTED = 'def told(a):\n    a = f"{a}"\n    b = f"{a:>{a}}"\n    c = b + f"c"\n    d = [c]\n    return f"""{d}"""\n'


@pytest.fixture
def found(tmp_path):
    """Returns a function that takes the texts of a.py and b.py, and returns {"text": pairs of places with equal text,
    "shape": pairs of places with equal shapes but different text}."""

    def write(first, second):
        for name, source in (("a.py", first), ("b.py", second)):
            (tmp_path / name).write_text(source)
        return repeated([tmp_path])

    return write


def test_function_copied_to_another_file_is_found_as_repeated_text(found, tmp_path):
    pair = f"{tmp_path}/a.py:2-9 ~ {tmp_path}/b.py:4-11"
    assert found(FUNCTION, f"x = 1\n\n{FUNCTION}") == {"text": [pair], "shape": []}


def test_function_copied_with_other_names_is_found_as_repeated_shape(found, tmp_path):
    assert found(FUNCTION, RENAMED) == {"text": [], "shape": [f"{tmp_path}/a.py:2-9 ~ {tmp_path}/b.py:2-10"]}


def test_function_copied_within_a_file_is_found_once(found, tmp_path):
    assert found(FUNCTION * 2, "") == {"text": [f"{tmp_path}/a.py:2-9 ~ {tmp_path}/a.py:11-18"], "shape": []}


def test_functions_that_differ_only_in_formatted_strings_have_equal_shapes(found):
    """Python 3.12 and later split a formatted string into several tokens."""
    other = FORMATTED.replace('f"{a:>{a}}"', 'f"{a}, {a}"').replace('f"c"', '"c"')
    assert [len(pairs) for pairs in found(FORMATTED, other).values()] == [0, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(FIVE, FIVE, id="five lines"),
        pytest.param(IMPORTS, IMPORTS, id="imports"),
        pytest.param(FUNCTION, EXCHANGED, id="exchanged names"),
        pytest.param(ROWS, ROWS.replace("row(", "line("), id="rows of a table"),
    ],
)
def test_places_that_share_little_code_are_not_reported_as_repeated(found, first, second):
    assert found(first, second) == {"text": [], "shape": []}


@pytest.mark.parametrize(("most", "code"), [(0, 1), (1, 0)])
def test_more_repeated_places_than_the_bound_set_the_exit_code(found, tmp_path, most, code, capsys):
    found(FUNCTION, FUNCTION)
    assert main(str(tmp_path), f"--most={most}") == code
    assert f"share {LEAST} lines or more: 1 by text, 0 by shape." in capsys.readouterr().out
