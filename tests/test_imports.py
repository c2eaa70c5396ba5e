"""Tests the layers of the source: imports have no cycle, and no folder imports from a folder above it."""

import ast
from pathlib import Path

import pytest

from conftest import ROOT

# Folders of src/lowmem from the lowest layer up. A folder may import from itself and from the folders before it.
ROOMS = (
    *("system", "memory", "config", "data", "model", "step", "offload", "techniques"),
    *("report", "saving", "training", "plan", "fit", "command"),
)


def imports(source: Path) -> dict[str, set[str]]:
    """Returns {module: modules of lowmem that it imports, at the top level or inside functions}."""
    files = {_name(file, source): file for file in source.rglob("*.py")}
    return {name: _imported(name, file, files.keys()) for name, file in files.items()}


def _name(file: Path, source: Path) -> str:
    return ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _imported(name, file, known):
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & known) | ({node.module} if not full <= known else set())
    return (found & known) - {name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of an import cycle, or an empty list if there is none. Each module of the cycle imports the
    next, and the last module imports the first."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        found = next(filter(None, (walk(other, [*path, name]) for other in sorted(graph[name]))), [])
        done.add(name)
        return found

    return next(filter(None, (walk(name, []) for name in sorted(graph))), [])


def room(module: str) -> int:
    """Returns the index in ROOMS of the folder of a module `lowmem.<folder>...`."""
    return ROOMS.index(module.split(".")[1])


def upwards(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Returns (module, imported module) for each import from a higher folder."""
    inside = {name: {other for other in others if "." in other} for name, others in graph.items() if "." in name}
    pairs = {(name, other) for name, others in inside.items() for other in others if name.startswith("lowmem.")}
    return {(name, other) for name, other in pairs if room(other) > room(name)}


def test_imports_of_the_source_have_no_cycle():
    assert circle(imports(ROOT / "src")) == []


def test_source_has_exactly_the_folders_of_the_layer_order():
    source = ROOT / "src" / "lowmem"
    inside = {file.relative_to(source).with_suffix("").parts[0] for file in source.rglob("*.py")}
    assert inside - {"__init__"} == {*ROOMS}


def test_no_source_folder_imports_from_a_folder_above_it():
    assert upwards(imports(ROOT / "src")) == set()


@pytest.mark.parametrize("inside", ["", "def late():\n    "])
def test_import_cycle_and_upward_import_are_found_at_the_top_level_and_inside_functions(tmp_path, inside):
    package = tmp_path / "lowmem"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fit.py").write_text("from lowmem import plan\n")
    (package / "plan.py").write_text("from lowmem.system import GIB\n" + inside + "from lowmem.fit import fit\n")
    (package / "system.py").write_text("GIB = 1\n")
    graph = imports(tmp_path)
    assert sorted(circle(graph)) == ["lowmem.fit", "lowmem.plan"]
    assert upwards(graph) == {("lowmem.plan", "lowmem.fit")}
