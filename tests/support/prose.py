"""Checks what a machine can check of names, and of texts that users read. `make lint` runs both checks.

The name of a function or class says what it is: it is not one of the words that have stood for many things each.

`python tests/support/prose.py --texts src/lowmem conf docs README.md` lists phrases that docs/style.md rules out: in
strings of src, comments of conf/, the page of comparisons, and pages outside of code. A line of code with `# plain` at
its end is exempt: a rule finds a phrase there that is right.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# words that have stood for many things each
SAY_NOTHING = frozenset(
    """part whole held kept one of it what said told asked given made found there beside together trained
    shapes first""".split()  # noqa: SIM905
)
NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# --- names -----------------------------------------------------------------------------------------------------------


def wrong(file: Path) -> Iterator[str]:
    """Yield a line for each function or class whose name says nothing. Tests may use such names."""
    if "tests" in file.parts:
        return
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, NAMED) and node.name.strip("_").lower() in SAY_NOTHING:
            yield f"{file}:{node.lineno}: {node.name} could be anything. Name what it returns, does or is."


# --- texts that users read -------------------------------------------------------------------------------------------

NUMBER = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands in a text for a number that is computed
# of which there may be one
THINGS = """answers batches blocks cards checkpoints choices conversations devices documents epochs examples files keys
    layers lines messages micro-batches pairs prompts records rows runs samples sequences splits steps texts
    windows""".split()  # noqa: SIM905
RULES = {  # what is not plain English here, and what to write; a space stands for a line break, too
    r"(?<!there )\b(is|are|was|were) no\b(?! (longer|more|less|fewer|other)\b| \w+er than\b)": "write `is not a ...`",
    r"\band no (text|object|number|list|function|group|prompt|file)\b(?! (is|are|was|can)\b)": "write `, not a ...`",
    r"(?<!there )\b(is|are) (?-i:none)\b": "write `is not a ...`",
    r"(?<!from )(?<!than )\bthose of\b": "repeat the noun",
    r"\|\s*(and )?the same\s*[|,;:(]": "repeat what it refers to: a cell stands alone",
    r"(?<!twice )(?<!times )\bas many\b(?!( \S+){1,6} as fit\b)": "give the number, or write `enough ... for`",
    r"\bof (its|their) own\b": "write `its own ...` or `a separate ...`, or leave it out",
    r"\bwho(so)?ever\b": "name who it is",
    r"\b(go|goes|go well) with\b": "write `works with`, `needs` or `belongs to`",
    r"\ball but\b": "write `all except`",
    r"\bsince then\b": "describe what is, not what was",
    r", say[,.)]": "write `for example` or `such as`",
    rf"(?<!of )(\b1|{NUMBER}) ({'|'.join(THINGS)})\b": "use the singular for 1",
}
QUOTES = "style.md"  # the page that quotes what is wrong
PLAIN = "# plain"
COUNTS = re.compile(r"\blen\(|\bsum\(|\btotal\b|\bcount\b|\bnumber\b|\['(" + "|".join(THINGS) + r")'\]")


class Text(NamedTuple):
    """A text that users read, and the line where it begins."""

    line: int
    words: str


def dialect(file: Path) -> Iterator[str]:
    """Yield file, line, phrase and advice for each phrase of a file's texts that a rule of RULES finds."""
    exempt = {number for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if PLAIN in line}
    for text in texts(file):
        for rule, advice in RULES.items():
            for match in re.finditer(rule.replace(" ", r"\s"), text.words, re.IGNORECASE):
                line = text.line + text.words.count("\n", 0, match.start())
                phrase = " ".join(match[0].replace(NUMBER, "{...}").split())
                if line not in exempt:
                    yield f'{file}:{line}: "{phrase}": {advice}.'


def texts(file: Path) -> Iterator[Text]:
    """Yield what users read of a file of src, conf/ or docs/."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        yield from strings(ast.parse(source))
    elif file.suffix in (".yaml", ".md"):
        lines = comments(source) if file.suffix == ".yaml" else outside_code(source)
        yield Text(1, "\n".join(line.strip() for line in lines))
    elif file.suffix in (".html", ".js"):
        yield Text(1, source)


def strings(tree: ast.AST) -> Iterator[Text]:
    """Yield all strings but docstrings: refusals, log lines, tables. A computed number is NUMBER, another value {}."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
    for node in ast.walk(tree):
        if node not in skipped and (words := in_words(node)):
            yield Text(node.lineno, " ".join(words.split()))


def in_words(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.FormattedValue):
        spec = in_words(node.format_spec) if node.format_spec else ""
        return NUMBER if "," in spec or COUNTS.search(ast.unparse(node.value)) else "{}"
    return "".join(map(in_words, node.values)) if isinstance(node, ast.JoinedStr) else ""


def comments(yaml: str) -> Iterator[str]:
    """Yield each line's comment, or nothing, so that lines keep their numbers."""
    for line in yaml.splitlines():
        found = re.search(r"(?:^|\s)# (.*)", line)
        yield found[1] if found else ""


def outside_code(page: str) -> list[str]:
    """Return a page's lines, without its code."""
    page = re.sub(r"^```.*?^```", line_breaks, page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^ {4,}.*$", "", page, flags=re.MULTILINE)
    return re.sub(r"`[^`]+`", lambda code: "`" + line_breaks(code) + "`", page).splitlines()


def line_breaks(code: re.Match) -> str:
    return "\n" * code[0].count("\n")


KINDS = {wrong: (".py",), dialect: (".py", ".yaml", ".md", ".html", ".js")}


def main(*arguments: str) -> int:
    check = dialect if "--texts" in arguments else wrong
    places = [Path(argument) for argument in arguments if argument != "--texts"]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    found = [line for file in files if file.suffix in KINDS[check] and file.name != QUOTES for line in check(file)]
    print("\n".join(found) or ("All texts are plain." if check is dialect else "All names say something."))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
