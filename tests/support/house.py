"""Checks three rules of the architecture that ruff cannot check. `make lint` runs this script.

- Code must not compare a value with the name of a technique or of its class. Instead, a technique declares its
  properties.
- Code must not test whether an object has a member that a class of lowmem defines (`hasattr(x, "chat")`). Instead, the
  base class has the member, with a default. A line that contains `# theirs` is exempt, because it tests an object of
  another library.
- Top-level classes of two files must not share a name, so that a search for a name finds one class.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ASKS = {("hasattr", 2), ("getattr", 3)}  # (function, number of arguments with which it tests for a member)
ENDS = {"startswith", "endswith"}
CLASS = {"target", "_target_"}  # attributes that hold the name of a class
EVERYWHERE = {"auto"}  # names of techniques that many keys also have as a value


def techniques(source: Path, conf: Path) -> set[str]:
    """Returns the names of the choices of all groups that have a folder in techniques/, without EVERYWHERE."""
    groups = (room.name for room in (source / "techniques").iterdir() if room.is_dir())
    return {file.stem for group in groups for file in (conf / group).glob("*.yaml")} - EVERYWHERE


def wrong(source: Path, names: set[str]) -> Iterator[str]:
    """Yields a message for each violation of a rule under `source`. Args: names: names of techniques."""
    files = {file: file.read_text(encoding="utf-8") for file in sorted(source.rglob("*.py"))}
    trees = {file: ast.parse(text) for file, text in files.items()}
    own = {name for tree in trees.values() for name in members(tree)}
    yield from same_names(trees)
    for file, tree in trees.items():
        lines = files[file].splitlines()
        for node in ast.walk(tree):
            if hasattr(node, "lineno") and "# theirs" in lines[node.lineno - 1]:
                continue
            for name in compared(node) & names:
                yield f"{file}:{node.lineno}: {name} is a technique. Let it declare what is asked here."
            if compared(node) and any(isinstance(part, ast.Attribute) and part.attr in CLASS for part in sides(node)):
                yield f"{file}:{node.lineno}: the name of a class is looked into. Let it declare what is asked here."
            for name in asked(node) & own:
                yield f"{file}:{node.lineno}: {name} is a member of our classes. Give their base class a default."


def same_names(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Yields a message for each top-level class that has the name of a class in an earlier file.

    Args:
        trees: file -> its syntax tree.
    """
    first: dict[str, Path] = {}
    for file, tree in trees.items():
        for ours in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            if first.setdefault(ours.name, file) != file:
                yield f"{file}:{ours.lineno}: {first[ours.name]} has a class {ours.name} too. Rename one of them."


def compared(node: ast.AST) -> set[str]:
    """Returns the values of the string constants among the nodes that `sides` yields."""
    return {part.value for part in sides(node) if isinstance(part, ast.Constant) and text(part)}


def sides(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes of the expressions that a node compares if it is a comparison, a `case`, or a call of startswith
    or endswith. Yields nothing for other nodes."""
    if isinstance(node, ast.Compare):
        both = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        both = [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ENDS:
        both = [node.func.value, *node.args]
    else:
        both = []
    for side in both:
        yield from ast.walk(side)


def text(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def asked(node: ast.AST) -> set[str]:
    """Returns a set with the name of the member that a call of hasattr, or of getattr with a default, asks for. The set
    is empty for other nodes."""
    if not isinstance(node, ast.Call) or (ast.unparse(node.func), len(node.args)) not in ASKS:
        return set()
    return {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()


def members(tree: ast.AST) -> Iterator[str]:
    """Yields the names of methods, and of attributes that a class body or an assignment to `self` defines."""
    for ours in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for line in ours.body:
            if isinstance(line, ast.FunctionDef):
                yield line.name
            elif isinstance(line, ast.Assign | ast.AnnAssign):
                yield from (node.id for node in ast.walk(line) if isinstance(node, ast.Name))
        for node in ast.walk(ours):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                yield node.attr


def main(source: str, conf: str) -> int:
    found = list(wrong(Path(source), techniques(Path(source), Path(conf))))
    print("\n".join(found) or "No code asks for a technique or a member by its name, and no two classes share a name.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
