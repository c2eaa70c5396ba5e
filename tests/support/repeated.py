"""Lists pairs of places in the code that share six or more lines, by text or by shape. `make lint` runs this script.

`python tests/support/repeated.py src/lowmem` prints each pair, and the number of pairs. With `--most 4`, more than four
pairs are an error.

Two places have equal shapes if only names, strings and numbers differ, and names differ consistently. Comments,
imports, docstrings and lines of punctuation are ignored. The comparison by shape also ignores data: lines without a
name, and groups of six lines that have fewer than three different shapes, such as rows of a table.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

LEAST = 6  # smallest number of lines of a place
SHAPES = 3  # smallest number of different shapes among LEAST lines; rows of a table have fewer
PLACEHOLDERS = {tokenize.STRING: '"', tokenize.NUMBER: "0"}
BEGINS, ENDS = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))  # since Python 3.12
BREAKS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Line(NamedTuple):
    file: Path
    number: int
    text: str  # without a comment
    tokens: tuple[str, ...]  # with placeholders for strings and numbers


def code(file: Path) -> Iterator[Line]:
    """Yields the lines of a file that have a name, a string or a number. Skips docstrings and imports."""
    source = file.read_text(encoding="utf-8")
    texts, tokens, depth = source.splitlines(), defaultdict(list), 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        depth -= token.type == ENDS
        if token.type == tokenize.COMMENT:
            texts[row - 1] = texts[row - 1][:column]
        elif not depth and token.type not in BREAKS | {ENDS}:
            tokens[row].append('"' if token.type == BEGINS else PLACEHOLDERS.get(token.type, token.string))
        depth += token.type == BEGINS
    left_out = {row for node in ast.walk(ast.parse(source)) if is_left_out(node) for row in rows(node)}
    for row in sorted(tokens.keys() - left_out):
        if any(token.isidentifier() or token in ('"', "0") for token in tokens[row]):
            yield Line(file, row, texts[row - 1].strip(), tuple(tokens[row]))


def is_left_out(node: ast.AST) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.Import | ast.ImportFrom)


def rows(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)


def text(place: Sequence[Line]) -> Hashable:
    return tuple(line.text for line in place)


def shape(place: Sequence[Line]) -> Hashable:
    """Returns the tokens of each line, with names replaced by numbers in the order of their appearance; None for rows
    of a table."""
    numbers: dict[str, int] = {}
    lines = [
        tuple(numbers.setdefault(t, len(numbers)) if t.isidentifier() and not iskeyword(t) else t for t in line.tokens)
        for line in place
    ]
    shapes = {tuple("" if isinstance(token, int) else token for token in line) for line in lines}
    return tuple(lines) if len(shapes) >= SHAPES else None


def pairs(lines: Sequence[Line], like: Callable[[Sequence[Line]], Hashable]) -> Iterator[str]:
    """Yields "file:first-last ~ file:first-last" (line numbers) for each pair of equal places. The two places are as
    long as possible and do not overlap.

    Args:
        like: function that takes the lines of a place and returns a key, which is equal for equal places, or None if
            the place is ignored.
    """
    found = defaultdict(list)
    for start in range(len(lines) - LEAST + 1):
        place = lines[start : start + LEAST]
        if place[0].file == place[-1].file and (key := like(place)):
            found[key].append(start)
    alike = {pair for starts in found.values() for pair in combinations(starts, 2)}
    for first, second in sorted(alike):
        size = LEAST
        while (first + size - LEAST + 1, second + size - LEAST + 1) in alike:
            size += 1
        size = min(size, second - first)
        both = [lines[start : start + size] for start in (first, second)]
        is_known = like is shape and text(both[0]) == text(both[1])
        if size >= LEAST and (first - 1, second - 1) not in alike and not is_known:
            yield " ~ ".join(f"{place[0].file}:{place[0].number}-{place[-1].number}" for place in both)


def repeated(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Returns a dict: "text" -> the pairs of places with equal text, "shape" -> the pairs with equal shapes but
    different text."""
    lines = [line for folder in folders for file in sorted(folder.rglob("*.py")) for line in code(file)]
    named = [line for line in lines if any(map(str.isidentifier, line.tokens))]
    return {"text": list(pairs(lines, text)), "shape": list(pairs(named, shape))}


def main(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--most", type=int, help="number of pairs that are not an error")
    typed = parser.parse_args(arguments)
    found = repeated(typed.folders)
    for kind, places in found.items():
        for place in places:
            print(f"{place} by {kind}")
    counts = ", ".join(f"{len(places)} by {kind}" for kind, places in found.items())
    print(f"Pairs of places that share {LEAST} lines or more: {counts}.")
    return typed.most is not None and sum(map(len, found.values())) > typed.most


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
