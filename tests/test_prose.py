"""`make lint` finds a name that says nothing."""

import pytest

from prose import wrong

pytestmark = pytest.mark.docs


@pytest.mark.parametrize(
    ("name", "is_found"), [("held", True), ("_whole", True), ("Part", True), ("held_bytes", False)]
)
def test_a_name_says_something(tmp_path, name, is_found):
    file = tmp_path / "code.py"
    file.write_text(f"class {name}:\n    pass\n")
    assert ["could be anything" in line for line in wrong(file)] == [True] * is_found


@pytest.mark.parametrize("text", ["Of the whole, its shape.", "Returns the shape", "A pinned staging buffer"])
def test_a_docstring_may_be_a_noun_phrase(tmp_path, text):
    file = tmp_path / "code.py"
    file.write_text(f'def opened():\n    """{text}"""\n')
    assert not list(wrong(file))
