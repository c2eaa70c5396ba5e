"""Checks the rules of docs/style.md that a script can check. `make lint` runs the two commands below.

`python tests/support/prose.py src/lowmem benchmarks tests` finds faults that readers of the code see: vague names of
functions and classes (outside tests/), names of tests that begin with a pronoun or lack a noun, and phrases in
docstrings and comments that a rule excludes.

`python tests/support/prose.py --texts src/lowmem conf docs README.md` finds phrases in texts that users see: strings of
src (also the comparison page), comments of conf/, and pages without their code.

A line that contains `# plain` is exempt from the rules for phrases.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Text(NamedTuple):
    """A text, and the line where it begins."""

    line: int
    words: str


PLAIN = "# plain"

# --- code, for its readers -------------------------------------------------------------------------------------------

# names that could mean anything
SAY_NOTHING = frozenset(
    """part whole held kept one of it what said told asked given made found there beside together trained
    shapes first""".split()  # noqa: SIM905
)
NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# A test's name must make sense alone in a report of failures, so a noun must follow `the_same`.
PRONOUN = re.compile(r"test_(it|they|so|these|those|what|one|both)_")
NO_NOUN = "as|at|by|each|for|from|if|in|of|on|only|or|the|to|too|twice|way|when|with|without"
SAME = re.compile(rf"_the_same(?:$|_(?:{NO_NOUN})(?:_|$))")
IS_NO = r"(?<!there )\b(is|are|was|were) no\b(?! (longer|more|less|fewer|other)\b| \w+er than\b)"
REMARKS = {  # phrase of a docstring or a comment -> advice; a space also stands for a line break
    IS_NO: "write `is not a ...`",
    r"(?<!from )(?<!than )(?<!with )(?<!to )\bthose of\b": "repeat the noun",
    r"(?<!twice )(?<!times )\bas many as\b(?! fit\b)": "give the number",
}


def wrong(file: Path) -> Iterator[str]:
    """Yields a message for each name, and for each phrase of a docstring or comment, that a rule excludes. Only code
    outside tests/ is checked for the names of SAY_NOTHING."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, NAMED) and (advice := about_name(node.name, "tests" in file.parts)):
            yield f"{file}:{node.lineno}: {node.name} {advice}"
    yield from phrases(file, [*docstrings(tree), *remarks(source)], REMARKS)


def about_name(name: str, is_of_test: bool) -> str | None:
    """Returns what is wrong with a name, or None."""
    if not is_of_test and name.strip("_").lower() in SAY_NOTHING:
        return "could be anything. Name what it returns, does or is."
    if PRONOUN.match(name):
        return "begins with a pronoun or a number. Name the subject, the condition and the result."
    if name.startswith("test_") and SAME.search(name):
        return "lacks the noun after `the_same`. Name what is equal."
    return None


def docstrings(tree: ast.AST) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.lineno, "\n".join(map(str.strip, node.value.value.split("\n"))))


def remarks(source: str) -> Iterator[Text]:
    """Yields the comments of a file. Comments on adjacent lines form one text."""
    lines: list[Text] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            if lines and token.start[0] == lines[-1].line + lines[-1].words.count("\n") + 1:
                lines[-1] = Text(lines[-1].line, f"{lines[-1].words}\n{words}")
            else:
                lines.append(Text(token.start[0], words))
    return iter(lines)


# --- texts, for users ------------------------------------------------------------------------------------------------

NUMBER = "\N{OBJECT REPLACEMENT CHARACTER}"  # replaces a computed count in a text
# plural nouns that must not follow 1
THINGS = """answers batches blocks cards checkpoints choices conversations devices documents epochs examples files keys
    layers lines messages micro-batches pairs prompts records rows runs samples sequences splits steps texts
    windows""".split()  # noqa: SIM905
RULES = {  # phrase of a text for users -> advice; a space also stands for a line break
    IS_NO: "write `is not a ...`",
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
QUOTES = "style.md"  # this page quotes wrong phrases, so it is not checked
COUNTS = re.compile(r"\blen\(|\bsum\(|\btotal\b|\bcount\b|\bnumber\b|\['(" + "|".join(THINGS) + r")'\]")


def dialect(file: Path) -> Iterator[str]:
    """Yields a message for each phrase in a file's texts for users that matches a rule of RULES."""
    yield from phrases(file, texts(file), RULES)


def phrases(file: Path, found: Iterable[Text], rules: Mapping[str, str]) -> Iterator[str]:
    """Yields a message (file, line, phrase and advice) for each phrase that matches a rule, except on exempt lines."""
    exempt = {number for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if PLAIN in line}
    for text in found:
        for rule, advice in rules.items():
            for match in re.finditer(rule.replace(" ", r"\s"), text.words, re.IGNORECASE):
                line = text.line + text.words.count("\n", 0, match.start())
                phrase = " ".join(match[0].replace(NUMBER, "{...}").split())
                if line not in exempt:
                    yield f'{file}:{line}: "{phrase}": {advice}.'


def texts(file: Path) -> Iterator[Text]:
    """Yields the texts for users in a file of src, conf/ or docs/."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        yield from strings(ast.parse(source))
    elif file.suffix in (".yaml", ".md"):
        lines = comments(source) if file.suffix == ".yaml" else outside_code(source)
        yield Text(1, "\n".join(line.strip() for line in lines))
    elif file.suffix in (".html", ".js"):
        yield Text(1, source)


def strings(tree: ast.AST) -> Iterator[Text]:
    """Yields all strings except docstrings, such as refusals, log lines and tables. In an f-string, a value that looks
    like a count (its format has a comma, or its code matches COUNTS) is replaced by NUMBER, and any other value by
    {}."""
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
    """Yields the comment of each line, or "" for a line without a comment, so that lines keep their numbers."""
    for line in yaml.splitlines():
        found = re.search(r"(?:^|\s)# (.*)", line)
        yield found[1] if found else ""


def outside_code(page: str) -> list[str]:
    """Returns the lines of a page without its code. Line breaks in the code are kept, so that lines keep their
    numbers."""
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
    print("\n".join(found) or ("All texts are plain." if check is dialect else "All names and remarks are plain."))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
