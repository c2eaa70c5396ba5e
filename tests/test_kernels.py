"""Tests `make test-kernels`: each setting changes at most one variable besides the thread count, settings that the
processor does not support are reported, and the command fails if tests fail with any setting."""

import re
import subprocess

import pytest

import other_kernels as kernels

pytestmark = pytest.mark.docs


@pytest.fixture
def ran(monkeypatch):
    """Returns a function that takes the setting with which the tests fail, or "", and returns the exit code. After a
    call, `ran.settings` has the variables of each started pytest, and `ran.marks` the expression that selects tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    def run(failing="", units=("avx2",), shard="1/1"):
        run.settings = []

        def fake(command, env, **_):
            run.marks = command[command.index("-m", command.index("pytest")) + 1]
            run.settings.append({name: env[name] for name, *_ in kernels.SETTINGS if name in env})
            bad = failing in map("=".join, run.settings[-1].items())
            return subprocess.CompletedProcess(command, int(bad), "x\n1 failed, 2 passed in 3s" if bad else "3 passed")

        monkeypatch.setattr(kernels.subprocess, "run", fake)
        monkeypatch.setattr(kernels, "units", lambda: set(units))
        return kernels.main(f"--shard={shard}", "-n", "2")

    return run


def test_kernel_settings_missing_on_the_processor_are_skipped_and_reported(ran, capsys):
    assert ran() == 0
    assert {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"} in ran.settings
    assert not any("AVX512" in value for setting in ran.settings for value in setting.values())
    assert "AVX512_CORE_BF16: skipped, this processor has no avx512_bf16" in capsys.readouterr().out


def test_kernel_tests_are_selected_by_existing_marks(ran, pytestconfig):
    ran()
    known = {re.match(r"\w+", line)[0] for line in pytestconfig.getini("markers")}
    assert {*ran.marks.split()} <= known | {"and", "or", "not"}


def test_kernel_setting_changes_at_most_one_variable_besides_the_thread_count(ran):
    ran(units={needed for *_, needed in kernels.SETTINGS})
    assert len(ran.settings) == len(kernels.SETTINGS)
    assert all(len(setting) == 1 or setting["OMP_NUM_THREADS"] == "1" for setting in ran.settings)
    assert max(map(len, ran.settings)) == 2


def test_shards_of_make_test_kernels_run_each_setting_once(ran):
    found = []
    for number in range(1, 5):
        ran(units={needed for *_, needed in kernels.SETTINGS}, shard=f"{number}/4")
        found += ran.settings
    assert sorted(map(str, found)) == sorted({str(setting) for setting in found}) and len(found) == len(
        kernels.SETTINGS
    )


def test_failure_in_one_kernel_setting_fails_make_test_kernels(ran, capsys):
    assert ran("MKL_CBWR=COMPATIBLE") == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["MKL_CBWR=COMPATIBLE", "2", "1"]
