"""Tests the exit code, the remaining files and the resumed run after SIGTERM, SIGINT or SIGHUP in any phase of a run,
and after a second signal.

Most tests start a process and send a signal to it. A run that is resumed after a signal must end with the weights of an
undisturbed run, bit for bit.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

import told
from conftest import ROOT
from lowmem.config.typed_lines import key
from lowmem.saving.checkpoint import complete
from lowmem.system import signals
from lowmem.training.module import CausalLM

# 4 steps, with an evaluation of 16 micro-batches and a checkpoint after every second step.
RUN = ("val_every=2", "save_every=2", "val_sequences=64", "sample_tokens=64", "seq_len=16")
KEEPS = ("step", "evaluation", "save", "sampling")  # a signal in these phases leaves a checkpoint and a summary
# Maximum CPU seconds from a signal in each phase to the end of the process. Wall-clock time would include the work of
# other programs on a busy machine.
SECONDS = {"load": 2.0, "step": 4.0, "evaluation": 2.0, "save": 4.0, "sampling": 4.0, "export": 2.0}
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}


@pytest.fixture
def start(processes, small, tmp_path):
    """Yields a function that takes a phase and arguments, starts a run, and returns its process when the run has
    reached the phase; with phase None, it returns when the run has ended. `deaf=True` installs no signal handlers."""
    started = []

    def run(phase, *arguments, deaf=False):
        typed = {key(a) for a in (*RUN, *arguments)}
        lines = [*(a for a in small if key(a) not in typed), *(a for a in RUN if key(a) not in map(key, arguments))]
        said = tmp_path / f"said-{len(started)}.txt"
        process = processes.Process(
            target=told.live, args=(str(ROOT), [*lines, *arguments], phase, str(said), deaf), daemon=True
        )
        process.start()
        started.append(process)
        process.said = said
        if phase is None:
            process.join(120)
            assert process.exitcode == 0, said.read_text()
            return process
        until(said.with_suffix(".reached").exists, process)
        return process

    yield run
    for process in started:
        process.kill()


def until(what, process, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert process.is_alive() and time.monotonic() < end, process.said.read_text()
        time.sleep(0.02)


def tell(process, *names, apart=0.4) -> float:
    """Sends signals at intervals of `apart` seconds. Returns the CPU seconds of the process from the last signal to its
    end."""
    for number, name in enumerate(names):
        time.sleep(apart * (number > 0))
        os.kill(process.pid, signal.Signals[name])
    sent, before, after = time.monotonic(), worked(process), 0.0
    while process.is_alive() and time.monotonic() < sent + 60:
        after = max(after, worked(process))
        time.sleep(0.005)
    process.join(0)
    assert time.monotonic() - sent < told.LONG / 2, process.said.read_text()
    return max(0.0, after - before)


def worked(process) -> float:
    try:
        return sum(psutil.Process(process.pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def weights(run: Path) -> dict:
    return torch.load(complete(run / "checkpoints")[-1], weights_only=True)["state_dict"]


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "writing" in path.name]


@pytest.fixture(scope="module")
def whole() -> dict:
    """Returns a dict that the first test fills with the weights of an undisturbed run."""
    return {}


def goes_on(start, run, folder, whole) -> None:
    """Resumes the run, and asserts that it ends with the weights of the undisturbed run."""
    if not whole:
        start(None, f"hydra.run.dir={folder}/whole")
        whole |= weights(folder / "whole")
    trained = complete(run / "checkpoints")[-1].name == "step-00000004.ckpt"
    again = run if trained else folder / "again"  # a trained run only evaluates and exports
    start(None, f"resume={run}", f"hydra.run.dir={again}")
    summary = json.loads((again / "summary.json").read_text())
    assert (summary["steps"], summary["interrupted"]) == (4, False) and summary["val_loss"] is not None
    assert (again / "model" / "config.json").exists() and not (again / "failed.txt").exists()
    other = weights(again)
    assert whole.keys() == other.keys() and all(torch.equal(whole[name], other[name]) for name in whole)


def ends_well(start, whole, folder, phase, name, deaf=False):
    """Sends a signal in a phase, and checks the exit code, the CPU seconds, the files and (except in the phase "load")
    the resumed run. Prints a line for `pytest -s`."""
    cache, run = folder / "cache", folder / "run"
    lines = [f"hydra.run.dir={run}", *([f"cache_dir={cache}"] if phase == "load" else [])]
    process = start(phase, *lines, deaf=deaf)
    seconds = tell(process, name)
    said = process.said.read_text()
    left = sorted(path.name for path in run.iterdir()) if run.exists() else []
    row = f"{phase:<11}{name:<8} exit {process.exitcode} after {seconds:.2f} s of work"
    print(f"{row}; left: {' '.join(left) or 'nothing'}")
    assert process.exitcode == CODES[name], said
    assert seconds < SECONDS[phase]
    assert "Traceback" not in said and drafts(folder) == []
    if phase in KEEPS:
        summary = json.loads((run / "summary.json").read_text())
        assert summary["interrupted"] and summary["signal"] == name
        assert complete(run / "checkpoints")[-1].name == f"step-{summary['steps']:08d}.ckpt"
        assert (summary["val_loss"] is None) == (phase != "sampling")
        assert "failed.txt" not in left and "model" not in left
    elif phase == "load":
        assert left == [] and list(cache.iterdir()) == []
    else:
        assert (run / "failed.txt").read_text() == f"{name}: ended at once.\n"
        assert complete(run / "checkpoints")[-1].name == "step-00000004.ckpt" and "model" not in left
        assert not json.loads((run / "summary.json").read_text())["interrupted"]
    if phase != "load":
        goes_on(start, run, folder, whole)


@pytest.mark.process
@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("load", "SIGTERM"),
        ("step", "SIGHUP"),
        ("evaluation", "SIGTERM"),
        ("export", "SIGINT"),
    ],
)
def test_signal_ends_a_run_without_losing_a_step(start, whole, tmp_path, phase, name):
    ends_well(start, whole, tmp_path, phase, name)


@pytest.mark.process
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("phase", told.PHASES)
def test_every_signal_in_every_phase_ends_a_run_without_losing_a_step(start, whole, tmp_path, phase, name):
    ends_well(start, whole, tmp_path, phase, name)


@pytest.mark.process
@pytest.mark.wrong
@pytest.mark.parametrize("phase", [pytest.param("load", marks=pytest.mark.matrix), "step"])
def test_run_without_signal_handlers_fails_the_checks_of_signals(start, whole, tmp_path, phase):
    with pytest.raises(AssertionError, match=f"== {CODES['SIGTERM']}"):  # the exit code
        ends_well(start, whole, tmp_path, phase, "SIGTERM", deaf=True)


@pytest.mark.process
@pytest.mark.parametrize(
    "phase",
    [
        "step",
        pytest.param("evaluation", marks=pytest.mark.matrix),
        pytest.param("save", marks=pytest.mark.matrix),
        pytest.param("sampling", marks=pytest.mark.matrix),
    ],
)
def test_second_signal_ends_the_run_at_once_and_is_recorded(start, tmp_path, phase):
    process = start(phase, f"hydra.run.dir={tmp_path}/run")
    seconds = tell(process, "SIGTERM", "SIGTERM", apart=0.3)
    assert process.exitcode == 143 and seconds < 2.0, process.said.read_text()
    assert (tmp_path / "run" / "failed.txt").read_text() == "SIGTERM and a second signal: ended at once.\n"
    assert drafts(tmp_path) == [] and "Traceback" not in process.said.read_text()


@pytest.mark.process
def test_duplicate_delivery_of_one_signal_counts_as_one_signal(start, tmp_path):
    """The command `timeout` signals both a process and its process group, so the process gets the signal twice."""
    process = start("step", f"hydra.run.dir={tmp_path}/run")
    tell(process, "SIGTERM", "SIGTERM", apart=0.05)
    assert process.exitcode == 143 and json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"]


@pytest.mark.parametrize("name", CODES)
def test_signal_inside_a_step_ends_the_run_after_the_step_with_a_checkpoint(command, tmp_path, monkeypatch, name):
    """Runs the command in this process."""
    step, steps = CausalLM.training_step, []

    def told_in_the_second(*args):
        steps.append(len(steps))
        if len(steps) == 2:
            signal.raise_signal(signal.Signals[name])
        return step(*args)

    monkeypatch.setattr(CausalLM, "training_step", told_in_the_second)
    code, said = command("max_steps=9", "save_every=1000", "val_every=1000")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert code == CODES[name] and len(steps) == summary["steps"] == 2, said
    assert summary["interrupted"] and [file.stem for file in complete(tmp_path / "run" / "checkpoints")] == [
        "step-00000002"
    ]


@pytest.mark.parametrize("signalled", [True, False])
def test_compiler_killed_by_ctrl_c_ends_the_run_as_interrupted(command, tmp_path, monkeypatch, signalled):
    """Ctrl+C in a terminal also kills the compiler, so torch raises a compile error. Without a signal, the same error
    must end the run with a traceback."""

    def compiles(*_):
        if signalled:
            signal.raise_signal(signal.SIGINT)
        try:
            raise subprocess.CalledProcessError(4, ["g++"])
        except subprocess.CalledProcessError:
            raise RuntimeError("C++ compile error") from None

    monkeypatch.setattr(CausalLM, "training_step", compiles)
    code, said = command()
    assert code == (130 if signalled else 1) and ("Traceback" in said) != signalled, said
    why = (tmp_path / "run" / "failed.txt").read_text()
    assert (why == "SIGINT: ended at once.\n") == signalled


def test_signals_that_were_ignored_before_a_run_stay_ignored():
    """For example, `nohup` starts a process that ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.handled(signals.at_once):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(signals.Ended) as ended:
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.value.code == 143 and signals.ending(RuntimeError()) is None


def test_signal_wrapped_in_another_error_is_recognized():
    """If a signal's exception interrupts torch's checkpoint writer, the writer raises a RuntimeError in its place."""
    try:
        try:
            raise signals.Ended(signal.SIGTERM)
        except signals.Ended:
            raise RuntimeError("unexpected position")  # noqa: B904
    except RuntimeError as error:
        assert signals.ending(error).code == 143
        error.__context__.__context__ = error  # a cycle of contexts
        assert signals.ending(ValueError()) is None
