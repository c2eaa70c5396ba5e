"""Checks what a machine can check of the prose: `make lint` runs it on the folders whose docstrings are sentences.

A docstring is a sentence about the thing that it stands in: it does not begin with a word that leaves the subject out,
and it ends with a full stop.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FRAGMENTS = ("Of", "What", "Whether", "That", "Where", "How", "Around")  # first words of a sentence without a subject
ENDS = (".", ":", "!", "?", ")", "`")


def wrong(file: Path) -> Iterator[str]:
    """Yields a line for each docstring that is no sentence."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not (text := ast.get_docstring(node)):
            continue
        where = f"{file}:{getattr(node, 'lineno', 1)}: the docstring of {getattr(node, 'name', 'the module')}"
        if text.split()[0] in FRAGMENTS:
            yield f"{where} begins with {text.split()[0]}. Begin with a verb or with the subject."
        if not text.rstrip().endswith(ENDS):
            yield f"{where} does not end with a full stop."


def main(*folders: str) -> int:
    found = [line for folder in folders for file in sorted(Path(folder).rglob("*.py")) for line in wrong(file)]
    print("\n".join(found) or "All docstrings are sentences.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
