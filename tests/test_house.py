"""Tests tests/support/house.py, the part of `make lint` that checks rules of the architecture."""

import pytest

import house
from conftest import ROOT

pytestmark = pytest.mark.docs

OURS = "class Ours:\n    chat = None\n    size: int\n\n    def step_from(self):\n        self.limit = 1\n"
WRONG = [
    'hasattr(it, "step_from")',
    'getattr(it, "chat", None)',
    'getattr(it, "limit", 0)',
    'hasattr(it, "size")',
    'run.precision == "bf16-master"',
    '"adamw" in (run.optim, run.other)',
    'run.optim in ("adafactor", "lion")',
    'run.precision.startswith(("bf16-master", "32"))',
    '"Paged" in run.optim.target',
    'cfg.optim._target_.endswith("8bit")',
    'None\nmatch run.optim:\n    case "adamw": pass',
]
RIGHT = [
    'getattr(it, "chat")',
    'hasattr(it, "weight")',
    'hasattr(it, "chat")  # theirs',
    '"bf16-master"',
    "plan.target.drive is None",
]


@pytest.fixture
def found(tmp_path):
    """Returns a function that takes the right side of an assignment, and returns the violations that are reported for
    this line of code."""

    def write(line):
        (tmp_path / "ours.py").write_text(OURS)
        (tmp_path / "asks.py").write_text(f"found = {line}\n")
        return list(house.wrong(tmp_path, {"bf16-master", "adamw", "adafactor"}))

    return write


@pytest.mark.parametrize("line", WRONG)
def test_architecture_lint_finds_code_that_checks_technique_names_or_attributes(found, line):
    assert len(found(line)) == 1


@pytest.mark.parametrize("line", RIGHT)
def test_architecture_lint_allows_foreign_attributes_lines_marked_theirs_and_uncompared_technique_names(found, line):
    assert not found(line)


def test_architecture_lint_finds_two_classes_with_equal_names(found, tmp_path):
    (tmp_path / "beside.py").write_text("class Ours: pass\n\n\nclass Others:\n    class Theirs: pass\n")
    (tmp_path / "inside.py").write_text("class Theirs: pass\n")
    (line,) = found("None")
    assert "ours.py:1: " in line and "beside.py has a class Ours too" in line


def test_technique_names_of_the_architecture_lint_come_from_conf():
    names = house.techniques(ROOT / "src" / "lowmem", ROOT / "conf")
    assert {"bf16-master", "adafactor", "streamed"} <= names and not {"stdlib", "gpt2", "wandb"} & names
