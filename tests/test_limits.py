"""Tests that a hanging test is ended at its time limit, and that every call of `communicate`, or of a function of
`subprocess` that waits for a process, has a timeout. Calls of `os.system`, which cannot have one, are reported."""

import ast
import os
import subprocess
import sys

import pytest

from conftest import ROOT

pytestmark = pytest.mark.docs

HANGS = {
    "in Python": "import time\ndef test_that_hangs(): time.sleep(600)\n",
    "in native code, with the GIL": "import ctypes\ndef test_that_hangs(): ctypes.PyDLL(None).sleep(600)\n",
}
THE_NEXT = "def test_of_the_next_process(): pass\n"


@pytest.mark.parametrize("code", HANGS.values(), ids=HANGS)
def test_hanging_test_is_ended_at_its_time_limit_with_its_stack_and_other_tests_run(tmp_path, code):
    (tmp_path / "test_it.py").write_text(code + THE_NEXT)
    line = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-o", "faulthandler_timeout=1"]
    line += ["--rootdir", str(tmp_path), "-n", "1", "-p", "no:cacheprovider", "-W", "ignore", str(tmp_path)]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(line, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "1 failed, 1 passed" in said, said
    assert "Timeout" in said and "in test_that_hangs" in said, said


def without_limit(code: str) -> list[int]:
    """Returns the line numbers of the calls of STARTS and `communicate` that have no timeout."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = [(call, ast.unparse(call.func)) for call in calls]
    waits = [call for call, name in names if name in STARTS or name.endswith(".communicate")]
    return [call.lineno for call in waits if "timeout" not in {keyword.arg for keyword in call.keywords}]


STARTS = ("subprocess.run", "subprocess.check_output", "subprocess.check_call", "subprocess.call", "os.system")


def test_every_subprocess_run_check_call_and_communicate_of_the_tests_has_a_timeout():
    files = [*(ROOT / "tests").rglob("*.py")]
    assert {str(file): lines for file in files if (lines := without_limit(file.read_text()))} == {}


@pytest.mark.parametrize("code", ["subprocess.run(line)", "child.communicate()", "os.system(line)"])
def test_check_of_timeouts_finds_a_process_started_without_one(code):
    assert without_limit(f"import os\n{code}") == [2]
    assert not without_limit(f"{code[:-1]}, timeout=60)".replace("(,", "("))
