"""Tests how typed lines become what Hydra reads."""

import importlib
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from conftest import ROOT
from lowmem.command import cli
from lowmem.config.typed_lines import quoted
from lowmem.report import folders
from lowmem.system.errors import Refused


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("precision=16", "precision='16'"),
        ("precision=32,16,bf16", "precision='32','16',bf16"),
        ("precision=bf16", "precision=bf16"),
        ("precision=17", "precision='17'"),
        ("precision='16'", "precision='16'"),
        ("batch_size=16", "batch_size=16"),  # no group: stays a number
        ("optim.lr=16", "optim.lr=16"),
        ("model=qwen3-8b", "model=qwen3-8b"),
        ("seed=1,2,3", "seed=1,2,3"),
        ("--help", "--help"),
        ("-m", "-m"),
    ],
)
def test_only_the_choices_of_a_group_are_quoted(typed, read):
    assert quoted(typed) == read


@pytest.fixture
def earlier(tmp_path):
    (tmp_path / ".hydra").mkdir()
    lines = ["precision='16'", "optim=adafactor", "lr=0.1", "resume=older"]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(lines))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


@pytest.mark.parametrize("what", ["", "checkpoints/step-00000001.ckpt"])
def test_a_resumed_run_remembers_and_what_is_typed_wins(earlier, what):
    resume = f"resume={earlier / what}"
    assert cli.prepare([resume, "lr=0.2"]) == ["precision='16'", "optim=adafactor", resume, "lr=0.2"]


def test_what_was_typed_for_another_choice_is_not_repeated(earlier):
    """weights.drive= belongs to weights=streamed, optim.in_backward= to every optim."""
    before = ["weights=streamed", "weights.drive=/d", "optim.in_backward=true", "optim.betas=[0.8,0.9]", "lr=0.1"]
    (earlier / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(before))

    def repeated(*typed):
        return [line for line in cli.prepare([f"resume={earlier}", *typed]) if line in before]

    assert repeated("weights=resident", "optim=sgd", "precision=32", "clip=null") == [before[2], before[4]]
    assert repeated("weights=resident", "optim=adam8bit", "precision=32", "clip=null") == before[2:]
    assert repeated("optim=sgd", "optim.in_backward=false", "precision=bf16-master", "gradient_checkpointing=sqrt") == [
        *before[:2],
        before[4],
    ]


@pytest.mark.parametrize("value", ["true", "Yes", "200GB", "http://x"])
def test_what_is_no_folder_makes_none(value):
    streamed = ("weights=streamed", "precision=bf16-master", "gradient_checkpointing=sqrt")
    with pytest.raises(Refused, match=f"weights.drive={value}: give a folder on it"):
        cli.prepare([*streamed, f"weights.drive={value}"])


def test_without_its_overrides_a_run_is_resumed_as_typed(tmp_path):
    assert cli.prepare([f"resume={tmp_path}", "precision=16"]) == [f"resume={tmp_path}", "precision='16'"]


def test_the_old_word_for_plan_is_answered_with_the_new_one_and_read_in_what_was_typed_before(tmp_path):
    for typed in ("fit=12GiB", "+fit=12GiB"):
        with pytest.raises(Refused, match=r"this key is plan\. Type plan=12GiB"):
            cli.prepare([typed])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- fit=12GiB\n- lr=0.1\n")
    assert cli.prepare([f"resume={tmp_path}"]) == ["plan=12GiB", "lr=0.1", f"resume={tmp_path}"]


@pytest.mark.rows("seq_len=999999*")
@pytest.mark.process
@pytest.mark.parametrize("typed", ["seq_len=999999", "lr=-1", "model=llama-3.2-1b seq_len=999999"])
def test_what_the_config_alone_can_tell_is_told_before_torch_is_imported(typed, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    line = [sys.executable, "train.py", *typed.split(), f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and done.stderr.startswith(typed.split()[-1])
    assert "Type seq_len=" in done.stderr or "give" in done.stderr


def test_the_folder_of_a_copy_of_train_py_is_a_run(command, tmp_path, monkeypatch):
    shutil.copy(ROOT / "train.py", tmp_path / "train_mine.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("train.main", importlib.import_module("train_mine").main)
    assert command("max_steps=1")[0] == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert [run.folder.name for run in folders.runs_below(tmp_path)] == ["run"]
    assert (tmp_path / "run" / "train.log").exists()


@pytest.mark.parametrize(("script", "line"), [("train.py", "seed=1"), ("plan.py", "rows=3")])
def test_a_copy_of_a_command_reads_the_config_of_the_command(tmp_path, script, line):
    copy = shutil.copy(ROOT / script, tmp_path / f"my_{script}")
    done = subprocess.run([sys.executable, copy, f"x{line}"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and f"Type {line}" in done.stderr, done.stderr
