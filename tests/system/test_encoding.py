"""Tests that the source code names an encoding for every text file that it opens, and that characters are escaped if
the terminal cannot show them."""

import ast
import io
import sys

import pytest

from conftest import ROOT
from lowmem.command import cli


def in_the_locales_encoding(code: str) -> list[int]:
    """Returns the numbers of the lines that open, read or write a text file without naming an encoding."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _is_of_text(call) and "encoding" not in {k.arg for k in call.keywords}]


def _is_of_text(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name.endswith((".read_text", ".write_text")):
        return True
    mode = call.args[1:2] if name == "open" else call.args[:1]
    return name != "os.open" and name.split(".")[-1] == "open" and "b" not in "".join(map(ast.unparse, mode))


def test_source_code_opens_every_text_file_with_an_encoding():
    files = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.py")]
    found = {str(file): in_the_locales_encoding(file.read_text(encoding="utf-8")) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("call", "binary"),
    [
        ("a.read_text()", None),
        ("a.write_text(b)", None),
        ("open(a, 'w')", "open(a, 'wb')"),
        ("a.open()", "a.open('rb')"),
    ],
)
def test_check_of_encodings_finds_calls_that_open_a_text_file_without_an_encoding(call, binary):
    assert in_the_locales_encoding(call) == [1]
    assert in_the_locales_encoding(f"{call[:-1]}, encoding='utf-8')".replace("(,", "(")) == []
    assert binary is None or in_the_locales_encoding(binary) == []


def test_characters_that_the_terminal_cannot_show_are_printed_as_escapes(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "stdout", shown)
    cli.start(lambda: print("Größe"))
    assert shown.buffer.getvalue() == b"Gr\\xf6\\xdfe\n"
