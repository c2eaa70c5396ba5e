"""Tests that a snapshot of CUDA's allocator is recorded only on CUDA, and is written if requested or if memory runs
out."""

import pickle
from pathlib import Path

import pytest
import torch

import lowmem
import snapshots
from lowmem.memory import snapshot


@pytest.fixture
def asked(monkeypatch):
    """Replaces torch's snapshot functions, and returns a list of their calls: the keyword arguments of
    `_record_memory_history`, or "dump"."""
    asked = []

    def dump(file):
        asked.append("dump")
        with open(file, "w") as out:
            out.write("snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: asked.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return asked


OFF = {"enabled": None}


@pytest.mark.parametrize("stacks", [True, False], ids=["requested", "not requested"])
def test_successful_run_leaves_a_memory_snapshot_only_if_requested(asked, tmp_path, stacks, caplog):
    caplog.set_level("INFO", "lowmem")
    with snapshot.recorded(tmp_path, stacks, "cuda"):
        pass
    assert asked[0]["context"] == ("all" if stacks else None) and asked[-1] == OFF
    assert (
        ("dump" in asked) == (tmp_path / snapshot.FILE).exists() == ("_memory_viz trace_plot" in caplog.text) == stacks
    )


def test_out_of_memory_leaves_a_memory_snapshot_without_being_requested(asked, tmp_path):
    with pytest.raises(torch.OutOfMemoryError), snapshot.recorded(tmp_path, False, "cuda"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert asked[1:] == ["dump", OFF]


def test_error_other_than_out_of_memory_leaves_no_memory_snapshot(asked, tmp_path):
    with pytest.raises(ValueError), snapshot.recorded(tmp_path, False, "cuda"):
        raise ValueError
    assert asked[1:] == [OFF]


def test_unwritable_snapshot_does_not_hide_the_out_of_memory_error(asked, tmp_path):
    with pytest.raises(torch.OutOfMemoryError), snapshot.recorded(tmp_path / "nowhere", True, "cuda"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert asked[-1] == OFF


def test_memory_snapshot_on_a_cpu_is_not_recorded(asked, tmp_path):
    with snapshot.recorded(tmp_path, True, "cpu"):
        pass
    assert asked == []


def test_memory_snapshot_key_that_is_true_on_a_cpu_or_not_a_boolean_is_refused(command):
    code, said = command("memory.snapshot=true")
    assert code == 1 and "memory.snapshot=true: only the CUDA allocator records a snapshot" in said
    code, said = command("memory.snapshot=1")
    assert code == 1 and "memory.snapshot=1: give true or false." in said


def test_helper_reads_actions_and_source_files_from_a_snapshot_in_torchs_format(tmp_path):
    def file(*events):
        (tmp_path / "snapshot").write_bytes(pickle.dumps({"segments": [], "device_traces": [[], list(events)]}))
        return tmp_path / "snapshot"

    ours, theirs = ({"action": "alloc", "frames": [{"filename": f"/{name}/a.py"}]} for name in ("lowmem", "torch"))
    assert snapshots.actions(tmp_path / "none") == set()
    assert snapshots.actions(file(theirs, {"action": "oom"})) == {"alloc", "oom"}
    assert snapshots.asked_by(file(theirs, ours), Path("/lowmem"))
    assert not snapshots.asked_by(file(theirs, {"action": "oom"}), Path("/lowmem"))


@pytest.mark.gpu
@pytest.mark.parametrize("stacks", [True, False], ids=["requested", "not requested"])
def test_memory_snapshot_with_source_lines_of_lowmem_is_written_on_a_card_only_if_requested(fit, stacks):
    _, run = fit("device=cuda", f"memory.snapshot={str(stacks).lower()}")
    file = run / snapshot.FILE
    assert file.exists() == stacks == ({"alloc", "free_completed"} <= snapshots.actions(file))
    assert snapshots.asked_by(file, Path(lowmem.__file__).parent) == stacks
