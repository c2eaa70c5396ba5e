"""docs/add-a-technique.md, followed literally in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

PAGE = (ROOT / "docs" / "add-a-technique.md").read_text()
BLOCKS = re.findall(r"```(\w+)(?: ([^\n]+))?\n(.*?)```", PAGE, re.DOTALL)
PARTS = ("src", "conf", "tests", "docs", "benchmarks", "train.py", "README.md", "pyproject.toml", "Makefile", "LICENSE")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository with every block of the page in its place."""
    folder = tmp_path_factory.mktemp("copy")
    for part in (*PARTS, "requirements.txt", "environment.yml"):
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, folder / part)
    for _, where, text in BLOCKS:
        told = dict(re.findall(r"(\w+)=(\S+)", where))
        if "file" in told:
            assert not (folder / told["file"]).exists()
            (folder / told["file"]).write_text(text)
        elif "append" in told:
            with (folder / told["append"]).open("a") as file:
                file.write("\n\n" + text)
        elif "row" in told:
            page = (folder / told["row"]).read_text()
            row = re.search(rf"^\| `{told['after']}`.*\n", page, re.MULTILINE)[0]
            (folder / told["row"]).write_text(page.replace(row, row + text))
    return folder


def run(folder, line, *more):
    words = [sys.executable if word == "python" else word for word in line.split()]
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    done = subprocess.run([*words, *more], cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def commands():
    return next(text for language, _, text in BLOCKS if language == "sh").strip().splitlines()


def test_the_page_shows_a_class_a_yaml_a_test_and_a_row():
    places = [where for _, where, _ in BLOCKS if where]
    for wanted in ("file=src/", "file=conf/", "file=tests/", "row=README.md"):
        assert any(wanted in place for place in places)


def test_the_copy_is_tested_and_not_the_original(copy):
    code, said = run(copy, "python -c", "import lowmem; print(lowmem.__file__)")
    assert code == 0 and str(copy) in said, said


@pytest.mark.slow
def test_the_new_technique_trains_as_the_page_says(copy, small):
    code, said = run(copy, commands()[0], *(line for line in small if not line.startswith("lr=")))
    assert code == 0, said


def test_its_row_and_its_keys_are_what_the_tests_ask_for(copy):
    code, said = run(copy, "python -m pytest tests/test_conf.py tests/optim/test_unit.py -k unit")
    assert code == 0 and "failed" not in said, said


@pytest.mark.slow
def test_all_its_proofs_hold(copy):
    code, said = run(copy, commands()[1], "-rA")
    assert code == 0, said
    for proof in ("test_parity", "test_resume", "test_bytes_of_state", "test_decay_is_decoupled", "readme"):
        assert proof in said
    assert said.count("PASSED") >= 37


@pytest.mark.slow
def test_without_its_rule_parity_fails(copy):
    """The deliberately wrong variant: a technique that computes something else than it says."""
    oracle = copy / "tests" / "oracle.py"
    page = oracle.read_text()
    try:
        oracle.write_text(page.replace('RULES["unit"] = unit', ""))
        code, said = run(copy, "python -m pytest tests/test_parity.py -k", "is_the_oracle and unit and not +")
        assert code == 1 and "failed" in said.lower()
    finally:
        oracle.write_text(page)
