"""`make lint` finds a docstring that is no sentence."""

import pytest

from prose import wrong


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
    file = tmp_path / "one.py"
    file.write_text(f'def one():\n    """{text}"""\n')
    found = list(wrong(file))
    assert [says in line and "one.py:1" in line for line in found] == ([True] if says else [])
