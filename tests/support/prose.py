"""Checks what a machine can check of names; `make lint` runs it.

The name of a function or class says what it is: it is not one of the words that have stood for many things each.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# words that have stood for many things each
SAY_NOTHING = frozenset(
    """part whole held kept one of it what said told asked given made found there beside together trained
    shapes first""".split()  # noqa: SIM905
)
NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def wrong(file: Path) -> Iterator[str]:
    """Yield a line for each function or class whose name says nothing. Tests may use such names."""
    if "tests" in file.parts:
        return
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, NAMED) and node.name.strip("_").lower() in SAY_NOTHING:
            yield f"{file}:{node.lineno}: {node.name} could be anything. Name what it returns, does or is."


def main(*folders: str) -> int:
    found = [line for folder in folders for file in sorted(Path(folder).rglob("*.py")) for line in wrong(file)]
    print("\n".join(found) or "All names say something.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
