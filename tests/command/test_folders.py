"""Tests that each run gets its own folder, and that a refused run leaves an existing folder unchanged."""

import json
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

import claiming
from conftest import ROOT
from lowmem.command import sweep
from lowmem.command.folder_lock import HYDRAS, LEFT
from lowmem.report import folders
from lowmem.training import results

EIGHT = 8


@pytest.fixture
def race(processes, tmp_path):
    """Returns a function that starts several commands with the same arguments at once, and returns their exit codes and
    error outputs."""

    def run(*arguments, count=EIGHT, claims=True):
        together = processes.Barrier(count)
        every = [
            processes.Process(
                target=claiming.live, args=(str(ROOT), str(tmp_path), [*arguments], together, number, claims)
            )
            for number in range(count)
        ]
        for process in every:
            process.start()
        for process in every:
            process.join(120)
        said = [(tmp_path / f"said-{number}.txt").read_text() for number in range(count)]
        return [process.exitcode for process in every], said

    return run


def alone(folder: Path) -> dict[str, str]:
    """Returns a dict that maps the folder of each run to the number, as text, of the process that wrote its summary."""
    return {str(file.parent.relative_to(folder)): file.read_text() for file in folder.rglob("summary.json")}


def have_their_own(race, folder, *arguments, count=EIGHT, claims=True):
    """Asserts that each of `count` simultaneous commands ran in its own folder. Returns the folders."""
    codes, said = race(*arguments, count=count, claims=claims)
    assert codes == [0] * count, said
    found = alone(folder)
    assert sorted(found.values()) == [f"{number}\n" for number in range(count)], found
    return sorted(found)


@pytest.mark.process
def test_eight_runs_started_in_one_second_get_eight_folders(race, tmp_path):
    first = "outputs/2026-01-31/12-00-00"
    assert have_their_own(race, tmp_path) == [first, *(f"{first}-{n}" for n in range(2, EIGHT + 1))]


@pytest.mark.process
def test_three_sweeps_started_in_one_second_get_three_folders(race, tmp_path):
    found = have_their_own(race, tmp_path, "-m", "seed=1", count=3)
    assert found == sorted(f"multirun/2026-01-31/12-00-00{end}/0" for end in ("", "-2", "-3"))


@pytest.mark.process
@pytest.mark.wrong
def test_wrong_variant_without_a_folder_lock_fails_the_check_for_separate_folders(race, tmp_path):
    with pytest.raises(AssertionError):
        have_their_own(race, tmp_path, count=2, claims=False)


@pytest.mark.process
@pytest.mark.parametrize(("exists", "more"), [(False, ()), (True, ("resume=auto",))])
def test_of_eight_runs_started_at_once_in_one_folder_one_runs_and_seven_are_refused(race, tmp_path, more, exists):
    if exists:
        (tmp_path / "mine").mkdir()
    codes, said = race(f"hydra.run.dir={tmp_path}/mine", *more)
    assert sorted(codes) == [0] + [1] * (EIGHT - 1), said
    winner = codes.index(0)
    assert alone(tmp_path) == {"mine": f"{winner}\n"}
    for number in set(range(EIGHT)) - {winner}:
        assert " ".join(said[number].split()).startswith(f"hydra.run.dir={tmp_path}/mine: another run is ")
        assert "Type " in said[number] and f"resume={tmp_path}/mine" in said[number]


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_second_run_in_the_folder_of_a_run_is_refused_but_may_resume_that_run(command, tmp_path):
    run = tmp_path / "run"
    assert command("max_steps=2", "save_every=1")[0] == 0
    assert {path.name for path in run.iterdir()} <= {*HYDRAS, *LEFT}  # lowmem recognizes every file as a file of a run
    before = content(run)

    code, said = command("max_steps=3")
    assert (
        code == 1
        and f"another run is in this folder (.hydra). Type resume={run} to continue it, or another folder." in said
    )
    assert content(run) == before

    code, said = command(f"resume={run}", "max_steps=2")  # the run is done
    assert code == 1 and "2 steps are done" in said
    code, said = command(f"resume={run}", "batch_size=0")
    assert code == 1 and "batch_size=0" in said
    assert content(run) == before and folders.load(run).status == "done"

    assert command(f"resume={run}/checkpoints/step-00000001.ckpt", "max_steps=3")[0] == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_failed_run_has_status_done_after_a_successful_resume(command, tmp_path):
    assert command("max_steps=1")[0] == 0
    (tmp_path / "run" / folders.FAILED).write_text("SIGTERM: ended at once.\n")
    assert command(f"resume={tmp_path}/run", "max_steps=2")[0] == 0
    assert folders.load(tmp_path / "run").status == "done"


@pytest.mark.parametrize("name", [None, "notes.txt", "train.log", "model"])
def test_refused_run_keeps_an_existing_folder_and_the_files_of_other_programs(command, tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    if name is not None:
        (folder / name).write_text("mine")
    before = content(folder)
    code, said = command("optim.in_backward=true")  # refused after the folder was claimed
    assert code == 1 and ("clip=null" in said) == (name in (None, "notes.txt"))
    assert folder.is_dir() and content(folder) == before


def test_error_while_inspecting_a_folder_refuses_the_run(command, tmp_path, monkeypatch):
    """Hydra would turn an exception of the callback that inspects the folder into a warning."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("mine")
    monkeypatch.setattr("lowmem.command.folder_lock._goes_on", lambda *_: 1 / 0)
    before = content(tmp_path / "run")
    code, said = command("max_steps=1")
    assert code == 1 and "cannot be read (division by zero)" in said and content(tmp_path / "run") == before


def test_second_run_in_a_folder_named_by_a_hydra_interpolation_is_refused(command, tmp_path):
    """Hydra resolves its own values only after it has called the callbacks, and turns exceptions of callbacks into
    warnings."""
    named = f"hydra.run.dir={tmp_path}/${{hydra:job.name}}-run"
    assert command("max_steps=1", named)[0] == 0
    (folder,) = tmp_path.glob("*-run")
    before = content(folder)
    code, said = command("max_steps=1", named)
    assert code == 1 and "another run is in this folder" in said and content(folder) == before
    code, said = command("max_steps=1", f"hydra.run.dir={tmp_path}/${{nothing}}")
    assert code == 1 and "name of the output folder cannot be resolved" in said and "warn" not in said.lower()


def test_refused_run_leaves_no_folder(command, tmp_path):
    assert command("lr=-1")[0] == 1 and command("optim.in_backward=true")[0] == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_other_sweep_in_an_occupied_folder_is_refused_and_the_same_sweep_continues(command, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "running", nullcontext)
    monkeypatch.setattr(sweep, "script", tmp_path / "train.py")
    summary = json.dumps({"interrupted": False, "overrides": ["seed=1", "max_steps=1"]})
    (tmp_path / "train.py").write_text(f"open('{tmp_path}/sweep/0/summary.json', 'w').write('''{summary}''')")
    assert command("-m", "seed=1", "max_steps=1", base=())[0] == 0
    before = content(tmp_path / "sweep")
    code, said = command("-m", "seed=1,2", "max_steps=1", base=())
    assert code == 1 and f"Type sweep.resume={tmp_path}/sweep" in said
    assert content(tmp_path / "sweep") == before
    code, said = command("-m", "seed=1", "max_steps=1", base=())
    assert code == 0 and "job 0 was already done" in said, said


@pytest.mark.parametrize(("left", "typed"), [("train.log", ()), ("multirun.yaml", ("-m",))])
def test_resume_advice_for_a_folder_name_with_a_quote_can_be_pasted_into_a_shell(command, tmp_path, left, typed):
    folder = tmp_path / "Müller's run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001.ckpt").touch()
    (folder / left).write_text("hydra: {overrides: {task: []}}" if typed else "")
    key = "sweep" if typed else "run"
    code, said = command(*typed, f"hydra.{key}.dir={folder}")
    told = shlex.split(said.partition("Type ")[2].replace(",", " "))
    assert code == 1 and (f"sweep.resume={folder}" if typed else f"resume={folder}") in told, said


def test_run_in_the_folder_of_a_plan_is_refused_also_with_resume_auto(command, tmp_path):
    """In the folder of a run, resume=auto would be accepted."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").touch()
    for more in ((), ("resume=auto",)):
        code, said = command(*more)
        assert code == 1 and "Type another folder." in said and "Traceback" not in said, said


def test_live_run_has_status_running_and_killed_run_has_status_broken(command, tmp_path, monkeypatch):
    seen, write = [], results.write

    def watched(file, summary):
        seen.append(folders.load(file.parent).status)
        write(file, summary)

    monkeypatch.setattr(folders, "QUIET", 0)  # ignore the age of the files
    monkeypatch.setattr(results, "write", watched)
    assert command("max_steps=1")[0] == 0 and seen == ["running"]
    (tmp_path / "run" / "summary.json").unlink()  # as kill -9 leaves a run
    ended = folders.load(tmp_path / "run")
    assert (ended.status, ended.reason) == ("broken", "the process ended without a summary.json")
