"""`make lint` finds a docstring that is no sentence, and a name that says nothing."""

import pytest

from prose import wrong

pytestmark = pytest.mark.docs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Of the whole, its shape.", "begins with Of"),
        ("What is told of data.", "begins with What"),
        ("Whether it is.", "begins with Whether"),
        ("Returns the shape", "does not end with a full stop"),
        ("Returns the shape.", None),
        ("Whatever is there is returned.", None),
    ],
)
def test_a_docstring_is_a_sentence(tmp_path, text, says):
    file = tmp_path / "code.py"
    file.write_text(f'def opened():\n    """{text}"""\n')
    found = list(wrong(file))
    assert [says in line and "code.py:1" in line for line in found] == ([True] if says else [])


@pytest.mark.parametrize(
    ("name", "is_found"), [("held", True), ("_whole", True), ("Part", True), ("held_bytes", False)]
)
def test_a_name_says_something(tmp_path, name, is_found):
    file = tmp_path / "code.py"
    file.write_text(f"class {name}:\n    pass\n")
    assert ["could be anything" in line for line in wrong(file)] == [True] * is_found
