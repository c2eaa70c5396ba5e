"""Tests how typed and stored overrides become the overrides that Hydra reads, and how invalid overrides are refused."""

import importlib
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

from conftest import ROOT
from lowmem.command import cli, sweep
from lowmem.config.typed_lines import composed, key, quoted
from lowmem.report import folders
from lowmem.system.errors import Refused
from typed import typed_run


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("precision=16", "precision='16'"),
        ("precision=32,16,bf16", "precision='32','16',bf16"),
        ("precision=bf16", "precision=bf16"),
        ("precision=17", "precision='17'"),
        ("precision='16'", "precision='16'"),
        ("precision=choice(16,32)", "precision='16','32'"),
        ("precision=choice(16, bf16-true)", "precision='16',bf16-true"),
        ('precision=choice("16",bf16)', "precision='16',bf16"),
        ("precision=sort(32,16)", "precision='16','32'"),
        ("precision=sort(choice(16,32),reverse=true)", "precision='32','16'"),
        ("precision=range(16,33,16)", "precision='16','32'"),
        ("precision=glob([16*,32],exclude=*true)", "precision='16',16-master,'32'"),
        ("precision=glob(16*),glob(bf16-*r)", "precision='16',16-master,16-true,bf16-master,bf16-sr"),
        ("precision=glob(16*),glob(*16)", "precision='16',16-master,16-true,bf16"),
        ("precision=32,glob(16-*)", "precision='32',16-master,16-true"),
        ("experiment=null,glob(chat_lora*)", "experiment=null,chat_lora_8gb"),
        ("precision='32',glob(bf16-s*)", "precision='32',bf16-sr"),
        ("+precision=16", "+precision='16'"),
        ("~precision=16", "~precision='16'"),
        ("precision@x=16", "precision@x='16'"),
        ("+precision@x=choice(16,32)", "+precision@x='16','32'"),
        ("precision=interval(1,2)", "precision=interval(1,2)"),  # Hydra refuses a sweep over an interval
        ("precision=choice(16", "precision=choice(16"),
        ("batch_size=choice(16,32)", "batch_size=choice(16,32)"),
        ("batch_size=16", "batch_size=16"),  # not a group: the value stays a number
        ("optim.lr=16", "optim.lr=16"),
        ("model=qwen3-8b", "model=qwen3-8b"),
        ("seed=1,2,3", "seed=1,2,3"),
        ("--help", "--help"),
        ("-m", "-m"),
    ],
)
def test_numeric_choices_of_a_group_are_quoted_for_hydra_and_other_values_are_not(typed, read):
    assert quoted(typed) == read


SWEEPS = {
    "precision=16,32": ["16", "32"],
    "precision=choice(16,32)": ["16", "32"],
    "precision=choice(16, bf16-true)": ["16", "bf16-true"],
    "precision=sort(32,16)": ["16", "32"],
    "precision=shuffle(16,32)": ["16", "32"],
    "precision=range(16,33,16)": ["16", "32"],
    "precision=glob(*6)": ["16", "bf16"],
    "precision=glob(bf16),glob(32*)": ["bf16", "32"],
}


@pytest.mark.parametrize("typed", SWEEPS)
def test_sweep_over_a_group_gives_each_job_its_choice(typed, command, monkeypatch):
    """Hydra composes the config of each job; a stand-in for `sweep.job` records the choice of precision and the
    overrides."""
    chosen = []

    def job(folder, number, overrides):
        chosen.append((HydraConfig.get().runtime.choices.precision, [*overrides]))
        return folders.RunFolder(folder, [], None, "done")

    monkeypatch.setattr("lowmem.command.sweep.job", job)
    monkeypatch.setattr("lowmem.command.sweep.folders.runs_below", lambda _: [])
    code, said = command("-m", typed, "seed=choice(1,2)", base=())
    assert code == 0, said
    assert sorted(choice for choice, _ in chosen) == sorted(2 * SWEEPS[typed])
    assert {line for _, lines in chosen for line in lines if key(line) == "seed"} == {"seed=1", "seed=2"}


def test_sweep_over_an_unknown_choice_is_refused_before_any_job_starts():
    with pytest.raises(Refused, match=r"precision=17: there is no such choice"):
        cli.prepare(["-m", "precision=choice(16,17)"])


def test_numeric_choice_with_a_plus_and_a_package_is_composed_into_the_package():
    assert composed(["+precision@mine=16"]).mine.init_scale == 65536


@pytest.fixture
def earlier(tmp_path):
    (tmp_path / ".hydra").mkdir()
    lines = ["precision='16'", "optim=adafactor", "lr=0.1", "resume=older"]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(lines))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


@pytest.mark.parametrize("what", ["", "checkpoints/step-00000001.ckpt"])
def test_resume_repeats_earlier_overrides_and_new_overrides_win(earlier, what):
    resume = f"resume={earlier / what}"
    assert cli.prepare([resume, "lr=0.2"]) == ["precision='16'", "optim=adafactor", resume, "lr=0.2"]


def test_resume_drops_overrides_that_belong_to_a_replaced_choice(earlier):
    """weights.drive= belongs to weights=streamed, and optim.in_backward= to every choice of optim."""
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


@pytest.mark.parametrize("logger", ["none", "csv", "tensorboard"])
def test_resume_with_another_logger_drops_the_keys_of_the_replaced_logger(earlier, logger):
    (earlier / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["logger=wandb", "logger.wandb.name=mine"]))
    typed = [f"resume={earlier}", f"logger={logger}"]
    assert cli.prepare(typed) == typed
    assert cli.prepare(typed[:1]) == ["logger=wandb", "logger.wandb.name=mine", *typed[:1]]


@pytest.mark.parametrize("value", ["true", "Yes", "200GB", "http://x"])
def test_weights_drive_value_that_does_not_name_a_folder_is_refused(value):
    streamed = ("weights=streamed", "precision=bf16-master", "gradient_checkpointing=sqrt")
    with pytest.raises(Refused, match=f"weights.drive={value}: give a folder on a drive"):
        typed_run([*streamed, f"weights.drive={value}"])


DAMAGED = (b"", b"seed", b"{a", b"\xff\xfe")


@pytest.mark.parametrize("content", DAMAGED)
def test_resume_of_a_run_with_damaged_overrides_file_is_refused(earlier, content):
    (earlier / ".hydra" / "overrides.yaml").write_bytes(content)
    with pytest.raises(Refused, match=r"overrides\.yaml is damaged.*Delete it, and type the overrides again"):
        cli.prepare([f"resume={earlier}"])


@pytest.mark.parametrize("content", [*DAMAGED, b"hydra: {overrides: null}"])
def test_resume_of_a_sweep_with_damaged_overrides_file_is_refused(tmp_path, content):
    (tmp_path / "multirun.yaml").write_bytes(content)
    with pytest.raises(Refused, match=r"multirun\.yaml is damaged.*Type them again, with another folder"):
        cli.prepare([f"sweep.resume={tmp_path}"])


def test_resume_of_a_folder_without_overrides_uses_the_typed_overrides_only(tmp_path):
    assert cli.prepare([f"resume={tmp_path}", "precision=16"]) == [f"resume={tmp_path}", "precision='16'"]


def test_old_key_fit_is_refused_when_typed_and_renamed_to_plan_in_stored_overrides(tmp_path):
    for typed in ("fit=12GiB", "+fit=12GiB"):
        with pytest.raises(Refused, match=r"this key is now called plan\. Type plan=12GiB"):
            cli.prepare([typed])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- fit=12GiB\n- lr=0.1\n")
    assert cli.prepare([f"resume={tmp_path}"]) == ["plan=12GiB", "lr=0.1", f"resume={tmp_path}"]


def test_resume_drops_removed_keys_from_stored_overrides(earlier):
    gone = ["master.skips_in_a_row=7", "weights_dtype=float32", "weights.steps_in=device"]
    lines = ["precision=bf16-master", *gone, "precision.early_step=false"]
    (earlier / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(lines))
    assert cli.prepare([f"resume={earlier}"]) == [lines[0], lines[-1], f"resume={earlier}"]
    with pytest.raises(Refused, match=r"master\.skips_in_a_row was removed: one rule"):
        typed_run(lines)


@pytest.mark.parametrize(
    ("name", "then", "now"),
    [
        ("16-master", "trainer.plugins.precision.init_scale=8", "precision.init_scale=8"),
        ("bf16-master", "master.early_step=false", "precision.early_step=false"),
    ],
)
def test_old_precision_keys_are_renamed_in_stored_overrides_and_refused_when_typed(earlier, tmp_path, name, then, now):
    (earlier / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([f"precision={name}", then]))
    assert cli.prepare([f"export={earlier}"])[1:] == [now, f"export={earlier}"]
    typed = {"task": [f"precision={name}", "lr=1,2", then], "hydra": []}
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": typed}}))
    assert cli.prepare([f"sweep.resume={tmp_path}"])[2:4] == ["lr=1,2", now]
    with pytest.raises(Refused, match=f"this key is now called {key(now)}. Type {now}"):
        cli.prepare([f"precision={name}", then])


def test_run_with_a_removed_optimizer_can_be_evaluated_and_exported_but_not_resumed(earlier):
    (earlier / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["optim=adamw_fp8", "optim.eps=1e-7"]))
    for work in ("evaluate", "export"):
        assert cli.prepare([f"{work}={earlier}"]) == ["optim=adamw8bit", "optim.eps=1e-7", f"{work}={earlier}"]
    for typed in ([], ["optim=adamw8bit"]):
        with pytest.raises(Refused, match=r"no other optimizer can read its state\. Type optim=adamw8bit model=hf"):
            cli.prepare([f"resume={earlier}", *typed])


@pytest.mark.parametrize("stage", [2, 3])
def test_run_with_a_removed_strategy_resumes_with_the_typed_replacement(earlier, stage):
    lines = [f"strategy=deepspeed_zero{stage}", "devices=2", "strategy.whole_below=1", "strategy.offload=true"]
    (earlier / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(lines))
    with pytest.raises(Refused, match=r"was removed \(PyTorch's FSDP.*\)\. Also type strategy=fsdp to continue"):
        cli.prepare([f"resume={earlier}"])
    for typed in ("strategy=fsdp", "strategy=fsdp_offload"):
        assert cli.prepare([f"resume={earlier}", typed]) == ["devices=2", f"resume={earlier}", typed]
    assert cli.prepare([f"evaluate={earlier}"]) == ["strategy=fsdp", "devices=2", f"evaluate={earlier}"]
    assert cli.prepare([f"export={earlier}"]) == [f"export={earlier}"]  # an export runs in one process


def test_run_with_the_removed_checkpointing_choice_budget_resumes_with_the_typed_memory_budget(earlier):
    lines = ["seed=7", "gradient_checkpointing=budget", "gradient_checkpointing.fraction=0.2", "compile=none"]
    (earlier / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(lines))
    instead = ["gradient_checkpointing=none", "compile=blocks", "compile.activation_memory_budget=0.5"]
    with pytest.raises(Refused, match=rf"Also type {' '.join(instead)} to continue"):
        cli.prepare([f"resume={earlier}"])
    typed = [*instead[:2], "compile.activation_memory_budget=0.2"]
    assert cli.prepare([f"resume={earlier}", *typed]) == ["seed=7", f"resume={earlier}", *typed]
    assert cli.prepare([f"evaluate={earlier}"]) == [*instead, "seed=7", f"evaluate={earlier}"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("devices=auto", "devices=auto: give a whole number of at least 1."),
        ("~devices", "devices has no value: type devices=<value>."),
        ("generate=${nope}", "generate: Interpolation key 'nope' not found."),
        ("export=${nope}", "export: Interpolation key 'nope' not found."),
        ("lr=-1", "lr=-1: give a positive learning rate"),
    ],
)
@pytest.mark.filterwarnings("error")  # Hydra only warns if a callback fails, and would run without a lock
def test_invalid_value_is_refused_and_leaves_an_existing_run_folder_unchanged(command, tmp_path, line, says):
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    for name in ("summary.json", ".hydra/overrides.yaml", ".hydra/config.yaml"):
        (run / name).write_text("{}")
    code, said = command(line)
    assert code == 1 and says in said and "Callback" not in said
    files = [file for file in run.rglob("*") if file.is_file()]
    assert len(files) == 3 and all(file.read_text() == "{}" for file in files)


def test_negative_lr_is_refused_in_a_command_with_a_hydra_runtime_interpolation(command, tmp_path):
    code, said = command("cache_dir=${hydra:runtime.output_dir}/cache", "lr=-1")
    assert code == 1 and "lr=-1: give a positive learning rate" in said and not (tmp_path / "run").exists()


@pytest.mark.rows("seq_len=999999*")
@pytest.mark.process
@pytest.mark.parametrize("typed", ["seq_len=999999", "lr=-1", "model=llama-3.2-1b seq_len=999999"])
def test_seq_len_beyond_the_model_and_negative_lr_are_refused_before_torch_is_imported(typed, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    line = [sys.executable, "train.py", *typed.split(), f"hydra.run.dir={tmp_path}/run"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and done.stderr.startswith(typed.split()[-1])
    assert "Type seq_len=" in done.stderr or "give" in done.stderr


def test_run_started_from_a_copy_of_train_py_has_a_train_log_and_is_listed_as_a_run(command, tmp_path, monkeypatch):
    shutil.copy(ROOT / "train.py", tmp_path / "train_mine.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("train.main", importlib.import_module("train_mine").main)
    assert command("max_steps=1")[0] == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert [run.folder.name for run in folders.runs_below(tmp_path)] == ["run"]
    assert (tmp_path / "run" / "train.log").exists()


def test_sweep_started_from_a_copy_of_train_py_runs_its_jobs_with_the_copy(command, tmp_path, monkeypatch):
    shutil.copy(ROOT / "train.py", tmp_path / "train_swept.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("train.main", importlib.import_module("train_swept").main)
    started, known = [], sweep.script
    monkeypatch.setattr(sweep, "_run", lambda words, folder: started.append(words[1]) or (1, "", None))
    command("-m", "max_steps=1")
    assert started == [str(tmp_path / "train_swept.py")] and sweep.script == known


@pytest.mark.process
@pytest.mark.parametrize(("script", "line"), [("train.py", "seed=1"), ("plan.py", "rows=3")])
def test_copy_of_train_py_or_plan_py_suggests_the_correct_spelling_of_a_misspelt_key(tmp_path, script, line):
    copy = shutil.copy(ROOT / script, tmp_path / f"my_{script}")
    done = subprocess.run([sys.executable, copy, f"x{line}"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and f"Type {line}" in done.stderr, done.stderr
