"""Tests docs/add-a-technique.md by following it in a copy of the repository: an optimizer, a checkpointing policy and a
precision are added, and the tests that depend on techniques must pass in the copy."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

pytestmark = pytest.mark.docs

PAGE = (ROOT / "docs" / "add-a-technique.md").read_text()
BLOCKS = re.findall(r"```(\w+)(?: ([^\n]+))?\n(.*?)```", PAGE, re.DOTALL)
PARTS = ("src", "conf", "tests", "docs", "benchmarks", "README.md", "pyproject.toml", "Makefile", "LICENSE")
PARTS += ("AGENTS.md", "train.py", "plan.py", "compare.py", "requirements.txt", "environment.yml", "examples")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Returns a copy of the repository with the code blocks of the page applied: new files, appended code and inserted
    table rows."""
    folder = tmp_path_factory.mktemp("copy")
    for part in PARTS:
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
    words = [sys.executable if word == "python" else word for word in shlex.split(line)]
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    done = subprocess.run([*words, *more], cwd=folder, env=environment, capture_output=True, text=True, timeout=1000)
    return done.returncode, done.stdout + done.stderr


def command(start):
    """Returns the first command of the page that begins with `start`."""
    text = next(text for language, _, text in BLOCKS if language == "sh")
    return next(line for line in text.splitlines() if line.startswith(start))


def test_page_on_adding_techniques_shows_an_optimizer_a_policy_and_a_precision():
    places = [where for _, where, _ in BLOCKS if where]
    for group in ("optim", "gradient_checkpointing", "precision"):
        assert any(place.startswith(f"file=conf/{group}/") for place in places)
        assert any(place.startswith(f"row=docs/techniques.md after={group}=") for place in places)


def test_copy_of_the_repository_with_techniques_added_as_documented_imports_its_own_package(copy):
    code, said = run(copy, "python -c", "import lowmem; print(lowmem.__file__)")
    assert code == 0 and str(copy) in said, said


NEW = ("optim=unit", "gradient_checkpointing=every_other", "precision=bf16-odd")


def test_techniques_added_as_documented_pass_the_tests_of_declared_memory_and_their_own_tests(copy):
    """A faster subset of the next test."""
    where = ("test_saves.py", "techniques/optim/test_unit.py", "techniques/precision/test_odd.py")
    code, said = run(copy, command("python -m pytest"), "-rA", *(f"tests/{name}" for name in where))
    assert code == 0 and all(f"saves_the_memory_that_it_declares[{name}]" in said for name in NEW), said


def test_techniques_added_as_documented_pass_the_tests_generated_from_conf(copy):
    """Some of these tests are generated for each technique, and others are listed on the page. The wrong variants among
    the generated tests need `-m matrix`."""
    own = "techniques/optim", "techniques/precision/test_odd.py"
    where = ("test_conf.py", "test_parity.py", "test_saves.py", "test_resume.py", *own)
    code, said = run(copy, command("python -m pytest"), "-rA", *(f"tests/{name}" for name in where))
    wrong = "wrong_variant_of_a_technique and (unit or every_other or odd)"
    wrong_code, of_wrong = run(copy, "python -m pytest -m matrix tests/test_parity.py -rA", "-k", wrong)
    code, said = code or wrong_code, said + of_wrong
    assert code == 0, said
    passed = [line for line in said.splitlines() if line.startswith("PASSED")]
    for name in ("unit", "every_other", "odd"):
        for proof in (
            "equals_the_oracle",
            "wrong_variant",
            "saves_the_memory_that_it_declares",
            "does_nothing_saves_less_memory",
            "has_a_table_row",
        ):
            assert any(proof in line and name in line for line in passed), (proof, name)
    for proof in (
        "unbroken_run[optim=unit]",
        "unbroken_run[precision=bf16-odd]",
        "rms_of_adamw_within_20_percent[unit]",
    ):
        assert any(proof in line for line in passed), proof


# (file, omitted text, test that must fail, words in the output of this test)
LEFT_OUT = [
    (
        "docs/techniques.md",
        "| `optim=unit` | 4 bytes: one moment | one step size per tensor |\n",
        "conf.py -k unit",
        "a row `optim=unit`",
    ),
    (
        "tests/support/oracle.py",
        'RULES["unit"] = unit',
        "parity.py::test_technique_equals_the_oracle[optim=unit]",
        "tests/support/oracle.py",
    ),
    (
        "tests/support/tolerances.py",
        'UPDATE["precision=bf16-odd"] = (0.2, 0.6)',
        "parity.py -k odd",
        "tests/support/tolerances.py",
    ),
    ("conf/gradient_checkpointing/every_other.yaml", "declares: ", "saves.py -k every_other", "say what it saves"),
]


@pytest.mark.parametrize(("name", "left_out", "tests", "says"), LEFT_OUT, ids=[name for name, *_ in LEFT_OUT])
def test_omitted_step_of_the_page_on_adding_techniques_fails_a_test_that_names_it(copy, name, left_out, tests, says):
    """Wrong on purpose: a step of the page is omitted. The failing test must say what to add, and where."""
    file = copy / name
    page = file.read_text()
    assert page.count(left_out) == 1
    try:
        file.write_text(page.replace(left_out, "# " if name.endswith(".yaml") else ""))
        code, said = run(copy, f"python -m pytest tests/test_{tests}")
        assert code == 1 and says in said, said
    finally:
        file.write_text(page)


# A new technique can change the results of test files that read lists of techniques, conf/, the source or the pages.
READS_TECHNIQUES = re.compile(r"\bCHOICES\b|\btechniques\(|\b(CONF|SOURCE|DOCS)\b|lowmem\.config\.refusals")


def test_make_test_passes_after_techniques_are_added_as_documented(copy, small):
    """Runs the command of `make test` only on the test files that a new technique can affect."""
    typed = command("python train.py")
    code, said = run(copy, typed, *(line for line in small if not line.startswith("lr=")))
    assert code == 0, said
    asked, said = run(copy, "python -m pytest tests/test_readme.py -k tables_on_the_techniques_page")
    assert asked == 1 and command("python -m benchmarks.techniques") in said, said
    for line in (command("python -m benchmarks.techniques"), command("python -m benchmarks.pages")):
        code, said = run(copy, line)
        assert code == 0, said
    assert "| precision=bf16-odd | weights=streamed" in (copy / "docs" / "techniques.md").read_text()
    files = [file for file in (copy / "tests").rglob("test_*.py") if READS_TECHNIQUES.search(file.read_text())]
    files.remove(copy / "tests" / "test_docs.py")  # would follow the page again in the copy
    assert {"test_conf.py", "test_parity.py", "test_trace.py", "test_readme.py"} <= {file.name for file in files}
    code, said = run(copy, make_test(), *map(str, files))
    assert code == 0, said[-20000:]


def make_test():
    """Returns the command that `make test` runs."""
    assert command("make") == "make test"
    makefile = (ROOT / "Makefile").read_text()
    typed = re.search(r"^test:.*\n\t\$\(BIN\)/(python .*)", makefile, re.MULTILINE)[1]
    return re.sub(r"\$\((\w+)\)", lambda name: re.search(rf"^{name[1]} = (.*)", makefile, re.MULTILINE)[1], typed)
