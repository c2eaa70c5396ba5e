"""Copies tables of results from benchmarks/results/ into README.md and the pages of docs/. Run it after benchmarks.

python -m benchmarks.pages               # less than a second

A comment such as `<!-- table 2 of ../benchmarks/results/speed.md -->` in a page names a table, which replaces the lines
between this comment and the next empty line.
"""

import re
from pathlib import Path

from benchmarks.runner import ROOT

DOCS = ROOT / "docs"
MARK = re.compile(r"^<!-- table ([1-9]\d*) of (\S+) -->\n(?:(?!\n).*\n?)*", re.MULTILINE)


def tables(text: str) -> list[str]:
    """Returns the Markdown tables of a page, each with a final line break."""
    return [match[0] for match in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def filled(page: str, folder: Path = DOCS) -> str:
    """Returns the page with the current tables of results. Args: page: its text; folder: its folder, to which the paths
    of results are relative.

    Raises:
        FileNotFoundError: a file of results does not exist.
        IndexError: a file of results has too few tables.
    """

    def table(mark: re.Match) -> str:
        number, file = mark.groups()
        return f"<!-- table {number} of {file} -->\n{tables((folder / file).read_text())[int(number) - 1]}"

    return MARK.sub(table, page)


def main() -> None:
    for file in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        before = file.read_text()
        if (after := filled(before, file.parent)) != before:
            file.write_text(after)
            print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
