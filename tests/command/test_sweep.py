"""Tests sweeps: each job is a process, a killed job does not affect other jobs, and finished jobs are not repeated."""

import json
import resource
import signal
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lowmem.command import sweep
from lowmem.report import folders
from lowmem.system import signals
from made_runs import damaged, finished

FAILING = """
import os, signal
from lightning.pytorch import Callback

class Fails(Callback):
    \"\"\"Fails in the way that `how` names for the seed.\"\"\"

    def __init__(self, seed, how):
        self.how = how.get(f"s{seed}")

    def on_train_batch_start(self, *_):
        if self.how == "raise":
            raise ZeroDivisionError("a bug")
        if self.how:
            os.kill(os.getpid(), getattr(signal, self.how))
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Returns a function that takes arguments of the form s<seed>=<way to fail>, and returns overrides with which the
    jobs of these seeds fail."""
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def overrides(**how: str) -> list[str]:
        table = ",".join(f"{seed}:{way}" for seed, way in how.items())
        return [f"+callbacks.fails={{_target_:failing.Fails,seed:${{seed}},how:{{{table}}}}}", "max_steps=2"]

    return overrides


def summaries(folder: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/summary.json")}


@pytest.mark.process
def test_killed_job_does_not_stop_other_jobs_and_sweep_resume_repeats_only_the_killed_job(
    command, failing, tmp_path, monkeypatch
):
    code, said = command("-m", "seed=0,1,2", *failing(s1="SIGKILL"))
    assert code == 1 and "Traceback" not in said
    assert "job 0 done: " in said and "bits per byte" in said
    assert "job 1 failed: killed by SIGKILL (the host may have run out of memory" in said
    first = summaries(tmp_path / "sweep")
    assert first.keys() == {"0", "2"}
    assert said.count("killed by SIGKILL") == 1
    assert said.rstrip().endswith(
        f"1 of 3 jobs failed: 1. The full error of the first is in {tmp_path}/sweep/1/failed.txt."
    )
    table = said[said.index("run  seed") :].splitlines()  # has only keys that differ between jobs
    assert table[0].split()[:3] == ["run", "seed", "loss"] and table[0].endswith("status")
    assert [line.split()[:2] for line in table[1:4]] == [["0", "0"], ["1", "1"], ["2", "2"]]
    assert f"{first['2']['val_loss']:.4f}" in table[3] and table[3].endswith("done")

    (tmp_path / "failing.py").write_text(FAILING.replace("if self.how:", "if False:"))
    code, said = command(f"sweep.resume={tmp_path}/sweep", base=None)
    assert code == 0, said
    assert "job 0 was already done" in said and "job 1 done: " in said and "job 2 was already done" in said
    second = summaries(tmp_path / "sweep")
    assert second["0"] == first["0"] and second["2"] == first["2"] and second["1"]["steps"] == 2
    assert not (tmp_path / "sweep" / "1" / folders.FAILED).exists()


@pytest.mark.process
def test_sweep_with_3_failing_jobs_of_18_leaves_15_results_and_3_reasons(command, failing, tmp_path):
    ways = failing(s3="SIGKILL", s8="SIGSEGV", s13="raise")
    code, said = command("-m", f"seed={','.join(map(str, range(18)))}", *ways)
    assert code == 1 and len(summaries(tmp_path / "sweep")) == 15
    reasons = {run.folder.name: run.reason for run in folders.runs_below(tmp_path / "sweep") if run.status == "failed"}
    assert reasons.keys() == {"3", "8", "13"}
    assert reasons["3"].startswith("killed by SIGKILL") and reasons["8"] == "killed by SIGSEGV"
    assert reasons["13"].splitlines()[-1] == "ZeroDivisionError: a bug"
    assert all(f"job {number} failed: " in said for number in reasons)


@pytest.fixture
def small_files():
    """Limits files to 1 MB, so that only writes of larger files fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.process
def test_job_on_a_full_disk_fails_with_a_reason_and_later_jobs_run(command, small_files, tmp_path):
    code, said = command("-m", "model.architecture.n_embd=128,32", "max_steps=1")
    assert code == 1 and "Traceback" not in said
    assert "job 0 failed: " in said and "File too large" in said
    why = (tmp_path / "sweep" / "0" / folders.FAILED).read_text()
    assert "step-00000001.ckpt cannot be written (File too large), so training ended at step 1, and " in why
    assert "/model cannot be written either (" in why
    assert why.endswith("Free disk space, and type the same line again.\n")
    ended = {run.folder.name: run.status for run in folders.runs_below(tmp_path / "sweep")}
    assert ended == {"0": "failed", "1": "done"}  # so `sweep.resume=` repeats job 0


@pytest.mark.process
def test_failure_reason_that_cannot_be_written_is_printed(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit('no room on the disk')")
    monkeypatch.setattr(sweep, "script", script)
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(sweep, "_write", lambda *_: None)
    ended = sweep.job(tmp_path / "job", 4, ["lr=1"])
    assert (ended.status, ended.reason) == ("failed", "no room on the disk")
    assert "job 4 failed: no room on the disk" in capsys.readouterr().out


@pytest.mark.process
def test_ctrl_c_lets_the_running_job_save_a_checkpoint_and_then_ends_the_sweep(tmp_path, monkeypatch):
    """The terminal also sends the signal to the job, which ends after its step with a checkpoint and exit code 130."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(1)\n"
        "pathlib.Path(sys.argv[1]).write_text('checkpoint')\n"
        "sys.exit(130)\n"
    )
    monkeypatch.setattr(sweep, "script", script)
    (tmp_path / "job").mkdir()
    with pytest.raises(KeyboardInterrupt):
        sweep.job(tmp_path / "job", 0, [str(tmp_path / "written")])
    assert (tmp_path / "written").read_text() == "checkpoint"


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Returns a function that takes the code of a stand-in for train.py, and returns the result of `sweep.job`. In the
    code, the word `summarised` stands for a line that writes a summary."""
    (tmp_path / "job").mkdir()
    monkeypatch.setattr(sweep, "script", tmp_path / "train.py")
    summary = json.dumps({"interrupted": True, "overrides": ["lr=1"]})
    written = f"pathlib.Path('{tmp_path}/job/summary.json').write_text('''{summary}''')"

    def run(does: str) -> folders.RunFolder:
        lines = ("import os, pathlib, signal, sys, time", does.replace("summarised", written))
        (tmp_path / "train.py").write_text("\n".join(lines))
        return sweep.job(tmp_path / "job", 7, ["lr=1"])

    return run


@pytest.mark.process
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("summarised; sys.exit(143)", "ended by SIGTERM"),
        ("sys.exit(143)", "ended by SIGTERM"),
        ("summarised; sys.exit(129)", "ended by SIGHUP"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by SIGTERM"),
        ("sys.exit(0)", "exited with code 0, but wrote no summary"),
    ],
)
def test_job_ended_by_a_signal_or_without_a_summary_has_failed(job, tmp_path, capsys, does, reason):
    ended = job(does)
    assert (ended.status, ended.reason) == ("failed", reason)
    assert (tmp_path / "job" / folders.FAILED).read_text() == reason
    assert f"job 7 failed: {reason}" in capsys.readouterr().out


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Returns a function that takes an exit code, a text for stderr, and whether the job writes a summary, and returns
    the result of `sweep.job`, which starts no process. `ran.words` is the command of the job."""
    summary = json.dumps({"interrupted": False, "overrides": ["lr=1"]})

    def run(code=0, stderr="", summarised=True):
        def made(words, folder):
            run.words = words
            if summarised:
                (folder / "summary.json").write_text(summary)
            return code, stderr, None

        monkeypatch.setattr(sweep, "_run", made)
        (tmp_path / "job").mkdir()
        return sweep.job(tmp_path / "job", 7, ["lr=1", "precision='16'"])

    return run


def test_job_runs_the_script_with_its_own_overrides_and_folder(ran, tmp_path):
    assert ran().status == "done"
    assert ran.words == [sys.executable, str(sweep.script), "lr=1", "precision='16'", f"hydra.run.dir={tmp_path}/job"]


@pytest.mark.parametrize(
    ("code", "stderr", "summarised", "reason"),
    [
        (1, "Traceback\nRefused: no room\n\n", True, "Refused: no room"),
        (-9, "", True, "killed by SIGKILL (the host may have run out of memory, or somebody killed the process)"),
        (143, "", True, "ended by SIGTERM"),
        (0, "", False, "exited with code 0, but wrote no summary"),
    ],
)
def test_job_with_nonzero_exit_code_or_without_a_summary_has_failed(ran, tmp_path, code, stderr, summarised, reason):
    ended = ran(code, stderr, summarised)
    assert (ended.status, ended.reason) == ("failed", reason)
    assert (tmp_path / "job" / folders.FAILED).read_text() == reason


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_to_a_sweep_is_forwarded_and_ends_the_sweep_after_the_job(job, tmp_path, capsys, name):
    with signals.handled(signals.at_once), pytest.raises(signals.Ended) as ended:
        job(
            f"told = []; signal.signal(signal.{name}, lambda *_: told.append(1))\n"
            f"os.kill(os.getppid(), signal.{name})\n"
            "while not told: time.sleep(0.01)\n"
            f"summarised; sys.exit({128 + signal.Signals[name]})"
        )
    assert ended.value.code == 128 + signal.Signals[name]
    assert folders.load(tmp_path / "job").status == "interrupted"
    assert f"to continue the sweep, type python train.py sweep.resume={tmp_path}" in capsys.readouterr().out


def test_jobs_with_a_slash_in_their_name_are_listed_and_sweep_resume_names_the_sweep_folder(
    command, tmp_path, monkeypatch
):
    """With this hydra.sweep.subdir, the slash in data.path puts the folder of a job one level deeper."""
    sent = iter([None, signal.SIGTERM])

    def made(words, folder):
        (folder / "summary.json").write_text(json.dumps({"interrupted": True, "overrides": ["lr=1"]}))
        return 0, "", next(sent)

    monkeypatch.setattr(sweep, "_run", made)
    code, said = command("-m", "data=text", "data.path=d/a,d/b", "hydra.sweep.subdir='data.path=${data.path}'", base=())
    assert code == 143 and f"to continue the sweep, type python train.py sweep.resume={tmp_path}/sweep" in said, said
    names = {str(run.folder) for run in folders.runs_below(tmp_path / "sweep")}
    assert names == {f"{tmp_path}/sweep/data.path=d/{name}" for name in "ab"}


def test_table_of_a_sweep_shows_job_names_with_a_slash_completely(tmp_path, capsys):
    for name in ("d/a", "d/b"):
        finished(tmp_path / name, ["lr=0.001"])
    (tmp_path / "d/b" / folders.FAILED).write_text("killed")
    hydra = {"job": {"name": "train"}, "sweep": {"dir": str(tmp_path)}}
    sweep.Report().on_multirun_end(OmegaConf.create({"hydra": hydra}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[-1] in ("done", "failed")] == ["d/a", "d/b"]
    assert sweep.Report.failed[0].startswith("1 of 2 jobs failed: d/b. ")


@pytest.mark.parametrize(
    ("key", "flags", "says"),
    [
        ("hydra.sweep.subdir", ["-m"], "Type hydra.sweep.subdir=<a shorter name>."),
        ("hydra.run.dir", [], "Type hydra.run.dir=<a writable folder>."),
    ],
)
def test_too_long_run_or_sweep_folder_name_is_refused_with_its_key(command, tmp_path, key, flags, says):
    place = "x" * 300 if flags else f"{tmp_path}/{'x' * 300}"
    code, said = command(*flags, "seed=1", f"{key}={place}", base=())
    assert code == 1 and "File name too long" in said and said.rstrip().endswith(says), said


@pytest.mark.process
def test_sweep_continues_after_a_signal_to_one_job_and_reports_the_job_as_failed(command, failing, tmp_path):
    code, said = command("-m", "seed=0,1", *failing(s0="SIGTERM"))
    assert code == 1 and "job 0 failed: ended by SIGTERM" in said and "job 1 done: " in said
    summary = summaries(tmp_path / "sweep")["0"]
    assert summary["signal"] == "SIGTERM" and summary["steps"] == 1
    assert (tmp_path / "sweep" / "0" / "checkpoints" / "step-00000001.ckpt").exists()


def test_sweep_resume_of_a_folder_without_a_sweep_or_with_extra_overrides_is_refused(tmp_path, command):
    code, said = command(f"sweep.resume={tmp_path}", base=None)
    assert code == 1 and "this is not the folder of a sweep" in said and "multirun.yaml" in said
    code, said = command(f"sweep.resume={tmp_path}", "lr=1e-3", base=())
    assert code == 1 and "Leave out everything else" in said


def test_damaged_job_keeps_its_row_in_the_final_table_of_a_sweep(tmp_path, capsys):
    names = damaged(tmp_path)
    hydra = {"job": {"name": "train"}, "sweep": {"dir": str(tmp_path)}}
    sweep.Report().on_multirun_end(OmegaConf.create({"hydra": hydra}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()] == names
