"""hydra/sweeper=optuna: two objectives, in processes of their own."""

import json

import pytest

from lowmem.command import sweep

# A train.py in its place: an lr far from 0.01 loses, width costs memory, and a width of 4 dies.
STAND_IN = """
import json, pathlib, sys
typed = dict(line.split("=", 1) for line in sys.argv[1:])
lr, width = float(typed["lr"]), int(typed["max_steps"])
if width == 4:
    sys.exit("no such width")
folder = pathlib.Path(typed.pop("hydra.run.dir"))
summary = {"interrupted": False, "overrides": [f"{k}={v}" for k, v in typed.items()]}
figures = {"val_loss": abs(lr - 0.01) + 1 / width, "peak_bytes": {"device": 1000 * width, "host_rss": 0}}
(folder / "summary.json").write_text(json.dumps(summary | figures))
"""
SPACE = ("hydra/sweeper=optuna", "lr=tag(log,interval(1e-4,1e-1))", "max_steps=1,2,4,8")


@pytest.fixture
def searched(command, tmp_path, monkeypatch):
    """(overrides) -> (exit code, what was said, search.json)."""
    (tmp_path / "train.py").write_text(STAND_IN)
    monkeypatch.setattr(sweep, "TRAIN", tmp_path / "train.py")

    def run(*overrides: str):
        typed = {line.split("=")[0] for line in overrides}
        space = [line for line in SPACE if line.split("=")[0] not in typed]
        code, said = command("-m", *space, *overrides, base=())
        file = tmp_path / "sweep" / "search.json"
        return code, said, json.loads(file.read_text()) if file.exists() else None

    return run


def test_two_objectives_leave_the_runs_that_none_beats(searched):
    code, said, found = searched("hydra.sweeper.trials=14")
    assert len(found["trials"]) == 14 and found["objectives"] == ["val_loss", "peak_bytes.device"]
    values = {trial["job"]: trial["values"] for trial in found["trials"]}
    failed = {job for job, v in values.items() if v is None}
    assert failed == {t["job"] for t in found["trials"] if t["overrides"]["max_steps"] == 4} and failed
    assert code == 1 and "no such width" in said  # as in any sweep with a failed job
    finished = {job: v for job, v in values.items() if v}
    beaten = {
        job
        for job, (loss, peak) in finished.items()
        if any(a <= loss and b <= peak and [a, b] != [loss, peak] for a, b in finished.values())
    }
    assert set(found["best_jobs"]) == finished.keys() - beaten and beaten
    assert f"none is better in all of them than job {', '.join(map(str, found['best_jobs']))}" in said


@pytest.mark.slow
def test_one_objective_gets_better_and_is_found_again(searched):
    one = ("hydra.sweeper.trials=25", "hydra.sweeper.minimize=[val_loss]", "hydra.sweeper.at_once=5", "max_steps=2")
    code, said, found = searched(*one)
    assert code == 0, said
    losses = [trial["values"][0] for trial in found["trials"]]
    (best,) = found["best_jobs"]
    assert found["trials"][best]["values"][0] == min(losses) and f"val_loss: best is job {best}" in said
    assert min(losses[10:]) < min(losses[:10])  # the first ten are drawn at random
    code, said, again = searched(*one)  # into the same folder, as sweep.resume= does
    assert again == found and said.count("was done already") == 25


def test_what_cannot_be_searched_is_said(searched):
    said = searched("lr=1e-3", "max_steps=2")[1]
    assert "nothing to search. Type lr=interval(1e-4,1e-2)" in said and "Traceback" not in said
    said = searched("hydra.sweeper.minimize=[]")[1]
    assert "for what? Type hydra.sweeper.minimize=[val_loss]" in said
    said = searched("hydra.sweeper.minimize=[loss]")[1]
    assert "loss is no figure of" in said and "Give one of it" in said


def test_a_cluster_is_configured_and_its_launcher_asked_for(command, config):
    assert config("hydra/launcher=slurm").lr > 0
    code, said = command("-m", "hydra/launcher=slurm", "lr=1e-3,2e-3")
    assert code == 1 and "Type pip install hydra-submitit-launcher" in said and "Traceback" not in said


@pytest.mark.slow
def test_real_runs_are_searched(command, tmp_path):
    lines = ("hydra/sweeper=optuna", "hydra.sweeper.trials=4", "lr=tag(log,interval(1e-4,1e-2))", "precision=32,bf16")
    code, said = command("-m", *lines, "max_steps=2")
    assert code == 0, said
    found = json.loads((tmp_path / "sweep" / "search.json").read_text())
    for trial in found["trials"]:
        summary = json.loads((tmp_path / "sweep" / str(trial["job"]) / "summary.json").read_text())
        assert trial["values"] == [summary["val_loss"], summary["peak_bytes"]["device"]]
        assert f"precision={trial['overrides']['precision']}" in summary["overrides"]
