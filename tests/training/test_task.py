"""Tests that a run is resumed, evaluated and exported from its folder, and that an interrupted run is completed."""

import csv
import errno
import json
import logging
import os
import resource
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lowmem import fit
from lowmem.command import cli
from lowmem.config.settle import run_of
from lowmem.report import hints
from lowmem.report.metrics import Metrics
from lowmem.saving import export
from lowmem.saving.checkpoint import AtomicCheckpointIO, complete
from lowmem.system.errors import Refused
from lowmem.training import model_folder, results
from lowmem.training.module import CausalLM
from lowmem.training.training import _evaluated
from same import last, same

LINES = ("save_every=2", "val_every=2")


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """Returns a function that takes a precision, and returns the folder of a run of four steps with checkpoints after
    steps 2 and 4. All tests share this folder, so they change only copies of it (except for one test, which adds
    .hydra)."""
    made = {}

    def run(precision="32"):
        if precision not in made:
            made[precision] = tmp_path_factory.mktemp("whole")
            fit.fit(run_of([*small, *LINES, f"precision={precision}"]), made[precision])
        return made[precision]

    return run


@pytest.fixture
def copy(whole, tmp_path):
    """Returns a function that copies `whole`'s run with a given precision to the folder in which `fit` runs by default,
    and returns the path of the copy."""
    return lambda precision="32": shutil.copytree(whole(precision), tmp_path / "run")


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def zero_a_page(file):
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(bytes(4096))


@pytest.fixture
def no_training(monkeypatch):
    """Returns a function that makes every later training step fail the test."""
    return lambda: monkeypatch.setattr(CausalLM, "training_step", lambda *_: pytest.fail("trained"))


# --- resume=auto ------------------------------------------------------------------------------------------------------


def test_resume_auto_starts_continues_and_finishes_a_run(fit, whole, caplog, no_training):
    caplog.set_level(logging.INFO)
    lines = (*LINES, "resume=auto")
    fit(*lines, "max_steps=2", "scheduler.total_steps=4")
    assert "training starts from step 0" in caplog.text
    summary, run = fit(*lines)
    assert summary["steps"] == 4 and summary["resumed_from"].endswith("step-00000002.ckpt")
    assert same(last(run)["state_dict"], last(whole())["state_dict"])
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == [1, 2, 3, 4]  # the steps of both attempts
    no_training()
    assert fit(*lines)[0]["val_loss"] == summary["val_loss"] and "the evaluation and the export are done" in caplog.text


def test_damaged_checkpoint_is_skipped_by_resume_auto_and_refused_by_name(fit, copy, whole, caplog):
    run = copy()
    broken = run / "checkpoints" / "step-00000004.ckpt"
    zero_a_page(broken)
    for named in (run, broken):
        with pytest.raises(Refused, match=r"step-00000004\.ckpt is damaged.*resume=.*step-00000002\.ckpt"):
            fit(*LINES, f"resume={named}", "max_steps=6", folder="other")
    summary, _ = fit(*LINES, "resume=auto")
    assert f"{broken} is damaged" in caplog.text and summary["resumed_from"].endswith("step-00000002.ckpt")
    assert same(last(run)["state_dict"], last(whole())["state_dict"])


@pytest.mark.wrong
def test_resume_from_a_damaged_checkpoint_without_digest_checks_fails_or_changes_weights(fit, copy, whole, monkeypatch):
    """Wrong variant: digests are not checked, so every checkpoint passes as intact."""
    run = copy()
    zero_a_page(run / "checkpoints" / "step-00000002.ckpt")
    (run / "checkpoints" / "step-00000004.ckpt").unlink()
    monkeypatch.setattr("lowmem.saving.checkpoint.intact", lambda path: True)
    try:
        fit(*LINES, "resume=auto")
    except Exception:  # damaged content may raise any error
        return
    assert not same(last(run)["state_dict"], last(whole())["state_dict"])


# --- another model, another tokenizer, code ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("n_layer=3", r"missing in the checkpoint"),
        ("n_layer=1", r"missing in this model"),
        ("n_embd=64", r"\(300, 32\) in the checkpoint"),
    ],
)
def test_resume_with_another_model_shape_is_refused(fit, whole, other, says):
    with pytest.raises(Refused, match=f"{says}.*Type the model= and model.architecture of that run"):
        fit(f"resume={whole()}", f"model.architecture.{other}", "max_steps=6", folder="other")


def test_evaluation_of_a_run_with_another_tokenizer_is_refused_but_of_its_export_is_allowed(fit, whole, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(f"quite other words {number} " * 200)
    data = (f"data.path={text}", "data.val_fraction=0.5")
    with pytest.raises(Refused, match=r"that run had a different tokenizer.*evaluate=.*/model"):
        fit(f"evaluate={whole()}", *data, folder="other")
    summary, _ = fit(f"evaluate={whole()}/model", *data, folder="other")
    assert summary["val_loss"] > 0


@pytest.mark.parametrize("line", ["model.trust_remote_code=true", "+callbacks.x._target_=os.system"])
def test_overrides_that_can_run_code_are_not_repeated_by_resume(tmp_path, line):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(f"- lr=0.5\n- '{line}'\n")
    for name in ("resume", "evaluate", "export"):
        with pytest.raises(Refused, match="Type them again if you trust them: " + line.replace("+", r"\+")):
            cli.prepare([f"{name}={tmp_path}"])
        assert cli.prepare([f"{name}={tmp_path}", line]) == ["lr=0.5", f"{name}={tmp_path}", line]


# --- what comes after the last step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32", "bf16-master"])
@pytest.mark.parametrize("missing", ["evaluation", "export"])
def test_missing_evaluation_or_export_of_a_finished_run_is_completed_by_resume(
    fit, copy, whole, no_training, precision, missing
):
    run, unbroken = copy(precision), whole(precision)
    no_training()
    shutil.rmtree(run / "model")
    if missing == "evaluation":
        (run / "summary.json").unlink()
    summary, _ = fit(*LINES, f"precision={precision}", "resume=auto")
    assert same(weights(run), weights(unbroken))
    found, expected = summary_of(run), summary_of(unbroken)
    assert found.keys() == expected.keys() and summary["steps"] == 4
    for figure in ("steps", "tokens", "train_loss", "val_loss", "bits_per_byte", "parameters", "skipped_steps"):
        assert found[figure] == expected[figure], figure
    assert (run / "metrics.csv").read_text().startswith((unbroken / "metrics.csv").read_text())
    with pytest.raises(Refused, match="max_steps=8"):  # now nothing is missing
        fit(*LINES, f"precision={precision}", f"resume={run}", folder="other")


def test_evaluate_of_a_run_checkpoint_or_model_gives_the_val_loss_of_the_run_without_training(
    fit, whole, no_training, tmp_path
):
    run = whole()
    no_training()
    for named in (run, run / "checkpoints" / "step-00000004.ckpt", run / "model"):
        summary, other = fit(f"evaluate={named}", "sample_tokens=4", folder="other")
        assert summary["val_loss"] == pytest.approx(summary_of(run)["val_loss"], abs=1e-6)
        assert summary_of(other).keys() == summary_of(run).keys()
        assert not (other / "model").exists() and not (other / "checkpoints").exists()
    assert fit(f"evaluate={run / 'checkpoints' / 'step-00000002.ckpt'}", folder="other")[0]["steps"] == 2


@pytest.mark.parametrize("precision", ["32", "bf16-master"])
def test_export_of_a_run_or_checkpoint_writes_its_weights_without_training(fit, whole, no_training, precision):
    run = whole(precision)
    no_training()
    summary, other = fit(f"export={run}", f"precision={precision}", folder="other")
    assert same(weights(other), weights(run)) and summary["val_loss"] == summary_of(run)["val_loss"]
    earlier = run / "checkpoints" / "step-00000002.ckpt"
    summary, other = fit(f"export={earlier}", f"precision={precision}", "export_dtype=bfloat16", folder="earlier")
    saved = torch.load(earlier, weights_only=True)["state_dict"]
    assert all(torch.equal(w, saved[f"model.{name}"].bfloat16()) for name, w in weights(other).items())
    assert summary["steps"] == 2 and summary_of(other)["val_loss"] is None


def test_evaluate_and_export_commands_succeed_and_training_in_their_folder_is_refused(command, whole, tmp_path):
    (whole() / ".hydra").mkdir(exist_ok=True)
    (whole() / ".hydra" / "overrides.yaml").write_text("- lr=0.5\n")
    code, said = command(f"export={whole()}")
    assert code == 0 and "Traceback" not in said and (tmp_path / "run" / "model").is_dir(), said
    for _ in range(2):  # an evaluation can be repeated in the same folder
        code, said = command(f"evaluate={whole()}", f"hydra.run.dir={tmp_path}/evaluated")
        assert code == 0, said
    code, said = command("max_steps=1", f"hydra.run.dir={tmp_path}/evaluated")
    assert code == 1 and "another run is in this folder" in said and "resume" not in said
    code, said = command(f"evaluate={whole()}", f"hydra.run.dir={tmp_path}/evaluated")
    assert code == 0 and "step 4: validation " in said and "loss nan" not in said, said
    code, said = command(f"export={whole()}", "resume=auto", f"hydra.run.dir={tmp_path}/other")
    assert code == 1 and "one command can use only one of these keys" in said


@pytest.fixture
def typed_run(copy, small, monkeypatch):
    """Returns the folder of a finished run, with the overrides of its command in .hydra, where Hydra stores them."""
    run = copy()
    (run / ".hydra").mkdir(exist_ok=True)
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([*small, *LINES]))
    monkeypatch.chdir(run.parent)
    return run


def contents(run):
    """Returns a dict that maps the path of every file of a run, except the files of model/ and Hydra's log, to its
    bytes."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != "train.log")
    return {path.relative_to(run): path.read_bytes() for path in files if path.parent != run / "model"}


def test_export_of_a_run_writes_only_its_model_folder(command, typed_run, no_training):
    run, before, trained = typed_run, contents(typed_run), weights(typed_run)
    no_training()
    shutil.rmtree(run / "model")
    code, said = command(f"export={run}", "logger=tensorboard", base=None)
    assert code == 0 and said.index(f"export={run}: writes run/model.") < said.index("wrote run/model\n"), said
    assert same(weights(run), trained) and contents(run) == before
    assert not (run.parent / "outputs").exists() and said.count("wrote ") == 1
    assert "validation loss" not in said and "peak host memory" not in said


def test_export_of_a_failed_run_keeps_its_failure_reason(command, typed_run):
    (typed_run / "summary.json").unlink()
    (typed_run / "failed.txt").write_text("killed")
    code, said = command(f"export={typed_run}", base=None)
    assert code == 0 and "and replaces the old one" in said, said
    assert (typed_run / "failed.txt").read_text() == "killed" and not (typed_run / "summary.json").exists()


def test_export_of_an_earlier_checkpoint_or_live_run_keeps_the_model_of_the_run(command, typed_run, monkeypatch):
    """The export goes to a new folder, which the output names before the export begins."""
    trained = (typed_run / "model" / "model.safetensors").read_bytes()
    earlier = typed_run / "checkpoints" / "step-00000002.ckpt"
    busy = lambda folder: folder == typed_run  # noqa: E731
    for named, locked in ((earlier, None), (typed_run, busy)):
        if locked:
            monkeypatch.setattr("lowmem.system.folder_locks.is_locked", locked)
        code, said = command(f"export={named}", base=None)
        assert code == 0 and said.index(f"export={named}: writes outputs/") < said.index("wrote outputs/"), said
        assert (typed_run / "model" / "model.safetensors").read_bytes() == trained
    assert len(list(typed_run.parent.glob("outputs/*/*/summary.json"))) == 2


# --- the end of training ----------------------------------------------------------------------------------------------


def test_early_stop_ends_a_run_that_no_longer_learns(fit, no_training):
    lines = ("lr=1e-30", "val_every=1", "early_stop.patience=2", "max_steps=9", "resume=auto")
    summary, run = fit(*lines)
    assert summary["steps"] == 3 and summary["stopped_early"] and not summary["interrupted"]
    assert [path.name for path in complete(run / "checkpoints")][-1] == "step-00000003.ckpt"
    no_training()
    assert fit(*lines)[0]["steps"] == 3  # the repeated command has nothing to do


def test_early_stop_refuses_a_validation_set_without_labels(command, tmp_path):
    """The validation loss would be nan, at which Lightning would end training in the first evaluation."""
    for name, question in (("path", "short"), ("val_path", "long " * 200)):
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 8)
    lines = [f"data.{name}={tmp_path}/{name}.jsonl" for name in ("path", "val_path")]
    lines += ["data=chat", "data.template=chatml", "data.packing=joined"]
    lines += ["seq_len=32", "val_sequences=2", "max_steps=1"]
    code, said = command(*lines, "early_stop.patience=1")
    assert code == 1 and "early_stop.patience=1: the first 2 validation sequences" in said and "Traceback" not in said
    code, said = command(*lines)  # without early_stop the run trains, in the same folder
    assert code == 0, said


def test_advice_after_non_finite_steps_does_not_suggest_the_current_precision(fit):
    with pytest.raises(Refused, match=r"The 20 steps before it were not finite either\. Type a smaller lr") as refused:
        fit("precision=bf16-master", "optim=sgd", "on_nonfinite=skip", "lr=1e30")
    assert "precision=" not in str(refused.value)


def test_lightning_early_stopping_ends_a_run_and_learning_rate_monitor_logs_the_learning_rate(fit):
    summary, run = fit(
        "+callbacks.early._target_=lightning.pytorch.callbacks.EarlyStopping",
        "+callbacks.early.monitor=val_loss",
        "+callbacks.early.patience=1",
        "+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor",
        *("+logger.rows._target_=lightning.pytorch.loggers.CSVLogger", "+logger.rows.save_dir=${output_dir}"),
        *("+trainer.log_every_n_steps=1", "lr=1e-30", "val_every=1", "max_steps=9"),
    )
    assert summary["steps"] == 2 and summary["stopped_early"]
    rates = [row for row in csv.DictReader(next(run.rglob("version_0/metrics.csv")).open()) if row.get("lr-AdamW/pg1")]
    assert rates and float(rates[0]["lr-AdamW/pg1"]) <= 1e-30


def test_lightning_model_checkpoint_and_learning_rate_monitor_without_a_logger_are_refused(command, tmp_path):
    code, said = command("+callbacks.x._target_=lightning.pytorch.callbacks.ModelCheckpoint")
    assert code == 1 and "checkpoint.keep=best" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()
    code, said = command("+callbacks.x._target_=lightning.pytorch.callbacks.LearningRateMonitor", "logger=none")
    assert code == 1 and "logger" in said and "Traceback" not in said


def test_best_and_newest_checkpoint_are_kept_after_a_resume(fit, monkeypatch):
    losses = iter([9.0, 5.0, 1.0, 4.0, 3.0, 2.0])  # the first loss is for the evaluation before step 1
    evaluated = CausalLM.on_validation_epoch_end

    def given(self):
        evaluated(self)
        self.val_losses = [next(losses)]

    monkeypatch.setattr(CausalLM, "on_validation_epoch_end", given)
    lines = ("val_every=1", "save_every=1", "checkpoint.keep=best", "scheduler.total_steps=5", "resume=auto")
    _, run = fit(*lines, "max_steps=3")
    assert [path.name[-6:] for path in complete(run / "checkpoints")] == ["2.ckpt", "3.ckpt"]
    losses = iter([9.0, 3.0, 2.0])
    _, run = fit(*lines, "max_steps=5")
    assert [path.name[-6:] for path in complete(run / "checkpoints")] == ["2.ckpt", "5.ckpt"]


def test_evaluation_and_completion_of_a_run_with_checkpoint_keep_best_give_the_val_loss_of_the_run(
    fit, copy, no_training
):
    run = copy()
    no_training()
    summary, other = fit(*LINES, "checkpoint.keep=best", f"evaluate={run}", folder="other")
    assert summary["val_loss"] == summary_of(run)["val_loss"] and not (other / "checkpoints").exists()
    (run / "summary.json").unlink()  # killed in its last evaluation
    assert fit(*LINES, "checkpoint.keep=best", "resume=auto")[0]["val_loss"] == summary["val_loss"]


def test_failed_save_of_a_better_checkpoint_keeps_the_previous_best(fit, full, monkeypatch, tmp_path):
    losses = iter([9.0, 5.0, 1.0, 0.5, 3.0])  # the first loss is for the evaluation before step 1
    evaluated = CausalLM.on_validation_epoch_end

    def given(self):
        evaluated(self)
        self.val_losses = [next(losses)]

    monkeypatch.setattr(CausalLM, "on_validation_epoch_end", given)
    full(AtomicCheckpointIO, "save_checkpoint", {3})  # the third save is for the loss 0.5
    with pytest.raises(Refused, match="only the weights were written"):
        fit("val_every=1", "save_every=100", "checkpoint.keep=best")
    assert [path.name[-6:] for path in complete(tmp_path / "run" / "checkpoints")] == ["2.ckpt"]


def test_resume_accepts_a_checkpoint_path_relative_to_the_working_directory(fit, whole, monkeypatch):
    monkeypatch.chdir(whole() / "checkpoints")
    with pytest.raises(Refused, match="4 steps are done and max_steps=4"):
        fit(*LINES, "resume=step-00000004.ckpt")
    assert fit(*LINES, "resume=step-00000004.ckpt", "max_steps=5")[0]["steps"] == 5


def test_suggested_resume_is_quoted_for_the_shell(fit, copy, tmp_path):
    run = copy().rename(tmp_path / "Müller's run")
    broken = run / "checkpoints" / "step-00000004.ckpt"
    zero_a_page(broken)
    with pytest.raises(Refused) as refused:
        fit(f"resume={run}")
    good = f"resume={run}/checkpoints/step-00000002.ckpt"
    assert good in shlex.split(str(refused.value).partition("Type ")[2].rstrip("."))


def test_resume_from_a_checkpoint_saved_after_an_evaluation_equals_the_unbroken_run(fit):
    lines = ("val_every=1", "save_every=100", "checkpoint.keep=best", "model.architecture.resid_pdrop=0.1", "lr=1e-2")
    _, whole = fit(*lines, "max_steps=5", folder="whole")
    _, part = fit(*lines, "max_steps=3", "scheduler.total_steps=5", folder="part")
    saved = torch.load(complete(part / "checkpoints")[-1], weights_only=True)
    assert saved["callbacks"]["Checkpoints"]["best_step"] == 3  # the checkpoint was written again after the evaluation
    _, run = fit(*lines, "max_steps=5", f"resume={part}", folder="run")
    assert same(last(run)["state_dict"], last(whole)["state_dict"])
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows if row["val_loss"]] == [4, 5]


def test_save_every_minutes_keeps_the_requested_number_of_checkpoints(fit, monkeypatch):
    from lowmem.saving import checkpoint

    class Clock:
        now = 0.0

        def monotonic(self):
            self.now += 20.0  # seconds between two calls
            return self.now

    monkeypatch.setattr(checkpoint, "time", Clock())
    _, run = fit("save_every=1min", "max_steps=20", "checkpoint.keep=3")
    steps = [int(path.name[5:13]) for path in complete(run / "checkpoints")]
    assert steps == [15, 18, 20]


def test_commands_printed_at_the_end_of_a_run_are_accepted_and_resume_continues_the_run(command, tmp_path):
    _, said = command(f"hydra.run.dir={tmp_path}/a run")
    typed = [line for line in said.splitlines() if line.startswith("python train.py ")]
    assert [line.split("=")[0].split()[-1].strip("'") for line in typed] == ["generate", "evaluate", "resume"]
    for line in typed:
        cli.prepare(shlex.split(line)[2:])  # the command is not refused
    code, said = command(*shlex.split(typed[-1])[2:], f"hydra.run.dir={tmp_path}/run", base=())
    new, old = tmp_path / "run", tmp_path / "a run"
    assert code == 0 and summary_of(new)["steps"] == 8
    assert said.startswith(f"resume={old}: continues in a new folder, {new}. The old folder is not changed.\n")


def test_end_of_a_run_prints_evaluate_and_resume_commands_and_generate_unless_interrupted(
    capsys, tmp_path, monkeypatch
):
    for name in (".hydra", "model"):
        (tmp_path / "run" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for interrupted, steps, expected in (
        (True, 2, ["evaluate=run", "resume=run"]),
        (False, 2, ["generate=run 'prompt=It is 1 o'\"'\"'clock'", "evaluate=run", "resume=run"]),
    ):
        hints.tell_commands(
            tmp_path / "run", "train", {"interrupted": interrupted, "steps": steps}, 4, lambda: "It is 1 o'clock"
        )
        assert capsys.readouterr().out.split("python train.py ")[1:] == [f"{line}\n" for line in expected]


# --- full disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch):
    """Returns a function (owner, name, which) that simulates a full disk: during the calls of `owner.name` whose
    numbers (from 1) are in `which`, no file can grow beyond 2 kB."""

    def arrange(owner, name, which):
        function, calls = getattr(owner, name), iter(range(1, 1000))

        def without_room(*arguments, **keywords):
            if next(calls) not in which:
                return function(*arguments, **keywords)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
            try:
                return function(*arguments, **keywords)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        monkeypatch.setattr(owner, name, without_room)

    return arrange


def drafts(run):
    return list(run.rglob("*.writing"))


def test_failed_save_ends_the_run_and_keeps_old_checkpoint_and_current_weights(command, full, tmp_path):
    full(AtomicCheckpointIO, "save_checkpoint", {3})
    code, said = command("save_every=1")
    run = tmp_path / "run"
    assert code == 1 and "Traceback" not in said
    assert "step-00000003.ckpt cannot be written (File too large), so training ended at step 3, and only the" in said
    assert f"resume={run}/checkpoints/step-00000002.ckpt to continue from the last checkpoint" in said
    assert [path.name[-6:] for path in complete(run / "checkpoints")] == ["1.ckpt", "2.ckpt"] and not drafts(run)
    assert (run / "model" / "model.safetensors").is_file() and not summary_of(run)["stopped_early"]


def test_full_disk_at_the_last_checkpoint_leaves_weights_that_can_be_evaluated(command, full, tmp_path):
    full(AtomicCheckpointIO, "save_checkpoint", {1})
    code, said = command()
    run = tmp_path / "run"
    assert code == 1 and "Traceback" not in said and "resume=" not in said
    assert summary_of(run)["steps"] == 4 and "only the weights were written" in (run / "failed.txt").read_text()
    loss = summary_of(run)["val_loss"]
    for typed in (f"evaluate={run}/model", f"model=hf model.name={run}/model"):
        assert typed in said
    code, said = command(f"evaluate={run}/model", f"hydra.run.dir={tmp_path}/other", base=())
    assert code == 0 and summary_of(tmp_path / "other")["val_loss"] == pytest.approx(loss), said


def test_full_disk_for_checkpoint_and_weights_reports_the_last_checkpoint(command, full, tmp_path):
    full(AtomicCheckpointIO, "save_checkpoint", {2})
    full(model_folder, "_write", {1})
    code, said = command("save_every=2")
    run = tmp_path / "run"
    assert code == 1 and "Traceback" not in said and f"{run}/model cannot be written either (" in said
    assert "type resume=" in said and "step-00000002.ckpt to continue" in said and not (run / "model").exists()
    assert summary_of(run)["steps"] == 4  # summary.json is written, because it fits


def test_full_disk_at_export_keeps_other_files_and_export_can_be_repeated(command, full, tmp_path):
    full(export, "export", {1})
    code, said = command()
    run = tmp_path / "run"
    assert code == 1 and "Traceback" not in said and f"{run}/model cannot be written: File too large" in said
    assert f"type export={run}" in said and "bits per byte" in said
    assert summary_of(run)["steps"] == 4 and not drafts(run) and not (run / "model").exists()
    code, said = command(f"export={run}", f"hydra.run.dir={tmp_path}/other", base=())
    assert code == 0 and (tmp_path / "other" / "model" / "model.safetensors").is_file(), said


def test_full_disk_while_writing_metrics_is_reported_without_a_traceback(command, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a file name, as in errors of an open file

    monkeypatch.setattr(Metrics, "_write", full)
    code, said = command()
    assert code == 1 and "Traceback" not in said and f"{tmp_path}/run: No space left on device" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None),  # raised by an experiment tracker
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "g++"), None),  # raised by a compiler
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "{run}/curve/of a bug"), None),
        (PermissionError(errno.EACCES, "Permission denied", "/etc/shadow"), None),
        (
            PermissionError(errno.EACCES, "Permission denied", "{cache}/some/file"),
            "{cache}/some/file: Permission denied",
        ),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "{cache}"), "{cache}: Not a directory"),
        (OSError(errno.EIO, "Input/output error", "/a/disk/file"), "/a/disk/file: Input/output error"),
    ],
)
def test_system_error_is_reported_without_a_traceback_only_if_another_folder_helps(
    command, tmp_path, monkeypatch, error, said
):
    places = {"run": tmp_path / "run", "cache": tmp_path / "cache"}
    if error.filename:
        error.filename = error.filename.format(**places)

    def fails(*_):
        raise error

    monkeypatch.setattr(Metrics, "_write", fails)
    code, printed = command(f"cache_dir={tmp_path}/cache", "max_steps=1")
    assert code == 1 and ("Traceback" in printed) == (said is None)
    assert (said or error.strerror).format(**places) in printed
    assert (said is None) != ("Type a path that is readable and writable" in printed)


def test_full_disk_for_the_summary_is_reported_and_resume_completes_the_run(command, fit, full, tmp_path, monkeypatch):
    write = results.write
    monkeypatch.setattr(results, "write", lambda file, summary: write(file, {**summary, "long": "x" * 3000}))
    full(results, "write", {1})
    code, said = command()
    run = tmp_path / "run"
    assert code == 1 and "Traceback" not in said and f"{run}/summary.json: File too large" in said
    assert not drafts(run) and not (run / "summary.json").exists()
    fit("resume=auto")
    assert summary_of(run)["val_loss"] > 0 and (run / "model").is_dir()


def test_evaluation_reports_the_number_of_its_sequences(config, text_folder):
    held = SimpleNamespace(count=8, name="", sequences=range(20))
    of = ("data=text", f"data.path={text_folder}")
    cfg = config(*of, "evaluate=x", "data.val_fraction=0.2")
    said = _evaluated(cfg, [held])
    assert "evaluating 8 of 20 sequences" in said
    assert "data.val_fraction=0.2" in said and "data.val_path=<a file or folder>" in said
    sets = [held, SimpleNamespace(count=3, name="far", sequences=range(3))]
    said = _evaluated(config(*of, "evaluate=x", "data.val_path=y"), sets)
    assert "3 of 3 sequences of far" in said and "held out" not in said
