"""Tests the metrics of a run: step times, the progress bar, metrics.csv, and the refusal of a NaN loss."""

import csv
import errno
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from lowmem.report import metrics
from lowmem.report.metrics import Metrics
from lowmem.system.errors import Refused
from lowmem.system.units import duration
from lowmem.techniques.loss import cross_entropy as losses


def test_evaluations_and_saves_are_excluded_from_step_time(fit, monkeypatch, tmp_path):
    from lowmem.saving.checkpoint import AtomicCheckpointIO
    from lowmem.training.module import CausalLM

    now = 0.0  # a clock that only evaluations and saves advance, so a busy machine does not change the times
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now))

    def slow(function):
        def wrapped(*arguments, **keywords):
            nonlocal now
            now += 1.0
            return function(*arguments, **keywords)

        return wrapped

    def saves(io, content, path, **options):
        if "00000007" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(io, content, path, **options)

    save = AtomicCheckpointIO.save_checkpoint
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", slow(saves))
    monkeypatch.setattr(CausalLM, "on_validation_epoch_start", slow(CausalLM.on_validation_epoch_start))
    seconds = []
    close = Metrics.close

    def closing(self):
        seconds.extend(self.step_seconds)
        close(self)

    monkeypatch.setattr(Metrics, "close", closing)
    with pytest.raises(Refused, match="cannot be written"):
        fit("max_steps=9", "save_every=1", "val_every=2")
    assert len(seconds) == 4  # seven windows, of which the first three are warm-up
    assert now > 7 and max(seconds) == 0.0
    with (tmp_path / "run" / "memory.csv").open() as file:
        saved = [row["step"] for row in csv.DictReader(file) if row["phase"] == "save"]
    assert saved == [str(step) for step in range(1, 8)]  # the failed save is also measured in its own step


def test_progress_bar_shows_loss_speed_and_peak(fit, monkeypatch):
    made, shown = [], []

    class Bar(metrics.tqdm):
        def __init__(self, **keywords):
            made.append(keywords)
            super().__init__(**(keywords | {"disable": False}))

        def set_postfix_str(self, text):
            shown.append((self.n, text))

    monkeypatch.setattr(metrics, "tqdm", Bar)
    fit("max_steps=5")
    assert [bar["total"] for bar in made] == [5, 2] and all(
        bar["disable"] is None for bar in made
    )  # training and evaluation
    assert [n for n, _ in shown] == [1, 2, 3, 4, 5]
    for word in ("loss ", "tokens/s", "peak ", " MiB"):
        assert word in shown[-1][1]


def test_remaining_time_of_a_long_run_is_printed_once_without_a_progress_bar(fit, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "LONG", 0)
    fit("max_steps=8")
    said = [line for line in capsys.readouterr().out.splitlines() if "of training left" in line]
    assert len(said) == 1 and said[0].startswith("step 4: about 0 s"), said  # the first three steps warm up
    monkeypatch.setattr(metrics, "LONG", 1000)
    fit("max_steps=8")
    assert "of training left" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"), [(45.2, "45 s"), (754, "13 min"), (7199, "2 h 0 min"), (12000, "3 h 20 min")]
)
def test_duration_is_formatted_in_seconds_minutes_or_hours(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(("margin", "read_by_early_stopping"), [(0.5, True), (None, False)])
def test_early_stopping_reads_no_accuracy_of_an_earlier_evaluation(tmp_path, margin, read_by_early_stopping):
    """`margin` is None if all answers of the validation set have the same rating. Then early stopping must read no
    accuracy, not even the accuracy of an earlier evaluation."""
    reported = Metrics(tmp_path / "metrics.csv", 1, {"": lambda loss: loss}, SimpleNamespace(), 0)
    reported._evaluation, reported._write = tqdm(disable=True), lambda *_: None
    trainer = SimpleNamespace(callback_metrics={"accuracy": 0.25}, sanity_checking=False, global_step=1)
    module = SimpleNamespace(val_loss=1.0, val_losses=[1.0], val_figures=[{"accuracy": 0.75, "margin": margin}])
    reported.on_validation_end(trainer, module)
    assert trainer.callback_metrics.get("accuracy") == (0.75 if read_by_early_stopping else None)


def test_nan_loss_stops_the_run_before_it_saves_a_checkpoint(fit, monkeypatch, tmp_path):
    full = losses.full
    monkeypatch.setattr(losses, "full", lambda *a: full(*a) * torch.tensor(float("nan")))
    with pytest.raises(Refused, match="smaller lr"):
        fit("log_every=2")
    calls = iter(range(100))
    monkeypatch.setattr(losses, "full", lambda *a: full(*a) * (1.0 if next(calls) < 2 else float("nan")))
    with pytest.raises(Refused, match=r"In step 2 the loss is nan.*not saved"):
        fit("log_every=100", "save_every=3", folder="saving")
    assert not list(tmp_path.glob("*/checkpoints/*"))


def test_metrics_csv_has_rows_for_evaluations_and_for_the_first_and_last_step(fit):
    _, run = fit("log_every=4", "max_steps=4", "val_every=2")
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    assert [(row[0], bool(row[3]), bool(row[4])) for row in rows] == [
        ("1", True, False),
        ("2", False, True),
        ("4", True, False),
        ("4", False, True),
    ]


def gradient_norms(folder):
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return [row.get("gradient_norm", "") for row in rows if row["train_loss"]]


@pytest.mark.parametrize(
    ("precision", "how"),
    [("32", "optim=adamw"), ("32", "optim.in_backward=true"), ("bf16-master", "precision.early_step=false")],
)
def test_metrics_csv_has_the_gradient_norm_without_clipping(fit, precision, how):
    """No gradient reaches clip=1e6, so a run with this bound does not clip either, and its first gradient norm is the
    reference."""
    _, free = fit(f"precision={precision}", how, "clip=null", "max_steps=2", folder="free")
    _, clipped = fit(f"precision={precision}", "clip=1e6", "max_steps=2", folder="clipped")
    assert float(gradient_norms(free)[0]) == pytest.approx(float(gradient_norms(clipped)[0]), rel=1e-6)
    assert all(gradient_norms(free))


def test_metrics_csv_has_no_gradient_norm_with_early_updates(fit):
    _, folder = fit("precision=bf16-master", "clip=null", "max_steps=2")
    assert gradient_norms(folder) == ["", ""]


def test_metrics_csv_has_the_learning_rate_of_each_step_also_after_a_resume(fit, caplog):
    """Resuming a run of two steps until step 4 changes its linear schedule, and resuming it until step 2 does not."""

    def rates(run):
        with (run / "metrics.csv").open() as file:
            return [float(row["lr"]) for row in csv.DictReader(file) if row["lr"]]

    lines = ("lr=1e-2", "scheduler=linear", "log_every=1", "save_every=1", "sample_tokens=0")
    whole, first = fit(*lines, "max_steps=2", folder="first")
    assert rates(first) == [1e-2, 0.5e-2] and whole["highest_lr"] == whole["lr"] == 1e-2
    caplog.set_level("INFO")
    _, longer = fit(*lines, "max_steps=4", f"resume={first}", folder="longer")
    assert (
        rates(longer) == [0.5e-2, 0.25e-2]
        and "the learning rate of step 3 is 0.005 and would have been 0 in that run" in caplog.text
    )
    caplog.clear()
    (saved,) = (first / "checkpoints").glob("step-00000001.ckpt")
    _, again = fit(*lines, "max_steps=2", f"resume={saved}", folder="again")
    assert rates(again) == [0.5e-2] and "would have been" not in caplog.text
