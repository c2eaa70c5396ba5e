"""Tests that the docstring of training/build.py lists every file outside plan/ that replaces a module's forward or
class, or that sets hooks on a module or parameter."""

import re

import pytest

from conftest import ROOT
from lowmem.training import build

SOURCE = ROOT / "src" / "lowmem"
WRAPS = re.compile(
    r"\.forward = (?!None)|(?<!self)\.__class__ = |"
    r"patch\.object\(\w[\w.]*, \"forward\"|\.register_(?!load)[a-z_]*hook\(|\.register_hook\("
)
OTHERS = {"plan"}  # folders that are not searched; the planner sets hooks only while it traces a run


def wrapping(files) -> set[str]:
    return {name for name, text in files.items() if WRAPS.search(text)}


def named(text: str) -> set[str]:
    """Returns the files that a docstring names, as folder/file.py."""
    found, folder = set(), ""
    for path in re.findall(r"[\w/]+\.py", text):
        folder = path.rpartition("/")[0] or folder
        found.add(f"{folder}/{path.rpartition('/')[2]}")
    return found


def test_docstring_of_build_lists_every_file_that_wraps_a_module():
    files = {
        f"{file.parent.name}/{file.name}": file.read_text()
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE).parts[0] not in OTHERS
    }
    assert wrapping(files) == named(build.__doc__)


@pytest.mark.parametrize(
    "line", ["block.forward = compiled", "p.register_hook(f)", 'patch.object(self.head, "forward", f)']
)
def test_file_that_wraps_a_module_is_found_by_the_search(line):
    assert wrapping({"loss/new.py": line}) == {"loss/new.py"}
