"""Checks what a machine can check of docstrings and names; `make lint` runs it.

A docstring is a sentence: it does not begin with a word that leaves the subject out, and it ends with a full stop. The
name of a function or class says what it is: it is none of the words that stood for many things each.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FRAGMENTS = ("Of", "What", "Whether", "That", "Where", "How", "Around")  # first words of a sentence without a subject
# words that stood for many things each
SAY_NOTHING = frozenset(
    """part whole held kept one of it what said told asked given made found there beside together trained
    shapes first""".split()  # noqa: SIM905
)
ENDS = (".", ":", "!", "?", ")", "`")


def wrong(file: Path) -> Iterator[str]:
    """Yields a line for each docstring that is no sentence, and for each name that says nothing."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = getattr(node, "name", "")
        if name.strip("_").lower() in SAY_NOTHING and "tests" not in file.parts:
            yield f"{file}:{node.lineno}: {name} could be anything. Name what it returns, does or is."
        if not (text := ast.get_docstring(node)):
            continue
        where = f"{file}:{getattr(node, 'lineno', 1)}: the docstring of {getattr(node, 'name', 'the module')}"
        if text.split()[0] in FRAGMENTS:
            yield f"{where} begins with {text.split()[0]}. Begin with a verb or with the subject."
        if not text.rstrip().endswith(ENDS):
            yield f"{where} does not end with a full stop."


def main(*folders: str) -> int:
    found = [line for folder in folders for file in sorted(Path(folder).rglob("*.py")) for line in wrong(file)]
    print("\n".join(found) or "All docstrings are sentences, and all names say something.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
