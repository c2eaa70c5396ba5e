"""Tests the plan at the start of a run: the prediction, the refusal of a run that cannot fit, and the choice of a
recipe that fits."""

import csv
import json
import re
from types import SimpleNamespace

import pytest
import torch

from devices import each_device
from lowmem.config import cards
from lowmem.plan import at_start, prediction
from lowmem.plan.column import DeviceBytes
from lowmem.plan.cost import machine
from lowmem.system import process
from lowmem.training import build


def test_predicted_memory_in_the_summary_of_a_run_equals_measured_memory_of_each_phase_and_row(command, tmp_path):
    code, said = command("plan=check", "max_steps=3", "val_every=3")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert code == 0 and "predicted / measured" in said
    for phase in ("forward", "backward", "step", "evaluation"):
        predicted = summary["predicted"]["phases"][phase]["device"]
        assert predicted == summary["peak_bytes_by_phase"][phase]["device"], phase
    libraries = summary["predicted"]["host"]["libraries"]
    assert libraries == summary["rss_before_model_bytes"]
    for row in ("weights", "gradients", "optimizer", "activations", "temporaries", "phase"):
        assert summary["predicted"]["device"][row] == summary["measured"]["device"][row], row
    assert set(summary["measured"]) <= set(summary["predicted"])


def test_tensorboard_receives_the_ratio_of_predicted_to_measured_memory(fit, tmp_path):
    fit("plan=check", "logger=tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert any("predicted_over_measured" in tag for tag in events.Tags()["scalars"])


def test_run_that_cannot_fit_the_card_is_refused_before_loading_weights(command, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "module", None)  # loading weights would raise another error
    code, said = command(
        "plan=check", "memory.limit=200KiB", "precision=32", "gradient_checkpointing=none", "optim=adamw"
    )
    assert code == 1 and "Traceback" not in said
    assert "predicted to need" in said and "highest in backward" in said and "Type plan=off" in said
    assert "No recipe fits." in said or re.search(r"The fastest recipe that fits \(.*\): python train.py", said)
    assert not (tmp_path / "run").exists()


@pytest.mark.process
def test_run_predicted_to_exceed_host_memory_is_refused(command, monkeypatch):
    monkeypatch.setattr(process, "available_bytes", lambda: -(2**50))
    code, said = command("plan=check", "precision=bf16", "optim=adamw", "loss=full", "gradient_checkpointing=none")
    assert code == 1 and "GiB of host memory. The host has" in said and "No recipe fits." in said


@pytest.mark.process
def test_out_of_memory_of_a_planned_run_suggests_a_smaller_recipe(command, monkeypatch):
    from lowmem.techniques.loss import cross_entropy

    def too_much(model, batch):
        found = model(**batch.inputs, use_cache=False).logits.sum()
        if batch.labels.numel() > 1 and model.training and type(batch.labels) is torch.Tensor:  # not while tracing
            torch.empty(2**60)
        return found

    monkeypatch.setattr(cross_entropy, "full", too_much)
    code, said = command("plan=check", "precision=32", "model.architecture.n_embd=256")
    assert code == 1 and "Traceback" not in said
    need = float(re.search(r"The prediction was ([\d.]+) GiB of device memory", said)[1])
    line = re.search(r"predicted to need at least 10 % less, ([\d.]+) GiB \(.*\):\n  (python train.py .*)\n", said)
    assert float(line[1]) <= 0.9 * need + 0.01
    assert "precision=32 model.architecture.n_embd=256" in line[2]
    assert "Try these overrides" in said


def test_plan_off_trains_without_a_prediction(fit):
    summary, _ = fit("plan=off")
    assert summary["predicted"] is None and summary["steps"] == 4


def test_untraceable_model_trains_without_a_prediction(command, monkeypatch, tmp_path):
    def asks(*_, **__):
        raise RuntimeError("data-dependent: how many tokens does expert 3 get?")

    monkeypatch.setattr(prediction, "trace", asks)
    code, said = command("plan=check", "max_steps=2")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert code == 0 and summary["steps"] == 2 and summary["predicted"] is None, said
    assert "cannot be predicted: this model cannot be traced by shape (RuntimeError: data-dependent" in said
    assert "This run starts without one." in said


def test_batch_size_of_an_untraceable_model_is_assumed_to_fit(config, monkeypatch):
    def asks(*_, **__):
        raise RuntimeError("data-dependent: how many tokens does expert 3 get?")

    monkeypatch.setattr(prediction, "trace", asks)
    assert at_start.could_fit(config("plan=check", "memory.limit=1KiB", "batch_size=2"))
    assert at_start.smaller_recipe(config(), [], None) is None


def test_plan_given_as_a_size_trains_the_recipe_chosen_by_the_search(command, monkeypatch, tmp_path):
    """A stand-in replaces the search. The next tests run the real search."""
    cards_asked = []

    def searched(run, typed, card, may_change):
        cards_asked.append(card.size)
        overrides = ["batch_size=1", "gradient_checkpointing=every_layer"]
        chosen = SimpleNamespace(
            overrides=overrides, says="made up", prediction=SimpleNamespace(device=DeviceBytes("step"))
        )
        return SimpleNamespace(chosen=chosen, fitting=[chosen], recipes=[chosen], too_large=0)

    monkeypatch.setattr(at_start, "_searched", searched)
    code, said = command("plan=3GiB", "batch_size=2", "gradient_checkpointing=none", "max_steps=1")
    assert code == 0 and cards_asked == [cards.card("3GiB", "plan").size], said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tokens"] == 16  # one sequence of 16 tokens


MIDDLE = tuple(f"model.architecture.{line}" for line in ("n_layer=6", "n_embd=512", "n_head=8", "vocab_size=4096"))
SIZES = {"cpu": (), "cuda": (*MIDDLE, "seq_len=512")}


@pytest.mark.process
@each_device
def test_plan_given_as_a_size_chooses_a_recipe_that_fits_and_keeps_typed_overrides(command, tmp_path, device):
    """On a CPU the size is typed; on a card plan=auto derives the size from the memory limit."""
    full = (f"device={device}", *SIZES[device], "precision=32", "optim=adamw", "batch_size=8", "max_steps=3")
    command("plan=off", *full, "val_every=3")
    peak = json.loads((tmp_path / "run" / "summary.json").read_text())["peak_bytes"]["device"]
    limit = int(0.75 * peak)
    size = {"cpu": f"{limit}B", "cuda": "auto"}[device]
    code, said = command(
        f"plan={size}", f"memory.limit={limit}", *full, "val_every=3", f"hydra.run.dir={tmp_path}/chosen"
    )
    assert code == 0 and "the fastest of" in said, said
    summary = json.loads((tmp_path / "chosen" / "summary.json").read_text())
    assert summary["peak_bytes"]["device"] <= limit and summary["steps"] == 3
    with (tmp_path / "run" / "metrics.csv").open() as one, (tmp_path / "chosen" / "metrics.csv").open() as other:
        losses = [[float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]] for file in (one, other)]
    # precision and optimizer are typed, so both runs compute the same updates
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.process
def test_plan_given_as_a_size_with_device_auto_chooses_a_recipe_and_trains(command, tmp_path):
    """device=auto is the default. The search has to resolve it, because precisions depend on the device."""
    code, said = command("plan=1GiB", "device=auto", "optim=adamw", "precision=bf16", "loss=full", "max_steps=1")
    assert code == 0 and "the fastest of" in said, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["device"] in ("cpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


@pytest.mark.process
def test_plan_given_as_a_card_name_chooses_the_fastest_recipe_for_this_card_and_trains(command):
    typed = ("precision=32", "optim=adamw", "gradient_checkpointing=none", "loss=full", "max_steps=1")
    code, said = command("plan=rtx3060", *typed)
    assert code == 0 and "plan=rtx3060: " in said and "the fastest of" in said, said


ONE_WAY = ("precision=32", "gradient_checkpointing=none", "loss=full", "weights=resident", "accumulation=none")


@pytest.mark.process
def test_plan_given_as_a_size_too_small_for_every_recipe_is_refused(command):
    code, said = command("plan=1KiB", *ONE_WAY, "optim=adamw", "may_change=precision,optim")
    assert code == 1 and "plan=1KiB: no recipe fits; the smallest one, python train.py" in said


@pytest.mark.process
def test_plan_keeps_precision_and_optim_unless_may_change_allows_them(command):
    """AdamW's state does not fit into 900 KiB."""
    code, said = command("plan=900KiB", *ONE_WAY, "max_steps=1")
    assert code == 1 and "plan=900KiB: no recipe fits with the typed precision and optim; the smallest one" in said
    assert "Type may_change=precision,optim to allow another precision or optim" in said
    code, said = command("plan=900KiB", *ONE_WAY, "max_steps=1", "may_change=optim")
    assert code == 0 and re.search(r"plan=900KiB: chose optim=\w+ \(.* for adamw\), the fastest", said), said


@pytest.mark.parametrize("value", ["12", "yes", "12GB"])
def test_invalid_value_of_plan_is_refused(command, value):
    code, said = command(f"plan={value}")
    assert code == 1 and f"plan={value}: give check, auto, off, a size such as 12GiB" in said


def test_run_predicts_its_duration_if_machine_rates_are_stored(fit, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(machine, "CACHE", tmp_path / "rates")
    monkeypatch.setattr(at_start, "LONG", 0.0)
    caplog.set_level("INFO")

    def counted(steps):
        summary, _ = fit("plan=check", f"max_steps={steps}", folder=f"of {steps} steps")
        return summary["predicted"]["seconds_per_step"]

    assert counted(14) is None and not machine.CACHE.exists()
    assert "steps of about" not in caplog.text
    machine.store(machine.Machine("this", {"float32": 1e10}, 1e10), on_card=False)
    assert (seconds := counted(16)) > 0
    assert f"16 steps of about {seconds:.2g} s each take about" in caplog.text


@pytest.mark.parametrize("said", ["", '{"name": "half', '{"name": "any", "flops": {}, "bandwidth": 1.0}'])
def test_damaged_rates_file_does_not_end_a_run(fit, monkeypatch, tmp_path, said):
    monkeypatch.setattr(machine, "CACHE", tmp_path / "rates")
    machine.CACHE.mkdir()
    machine._file(False).write_text(said)
    summary, _ = fit("plan=check", "max_steps=16")
    assert summary["steps"] == 16 and summary["predicted"]["seconds_per_step"] is None


def test_error_in_the_step_time_prediction_does_not_end_a_run(fit, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(machine, "CACHE", tmp_path / "rates")
    machine.store(machine.Machine("this", {"float32": 1e10}, 1e10), on_card=False)
    monkeypatch.setattr(at_start, "of_trace", lambda *_: 1 / 0)
    caplog.set_level("INFO")
    summary, _ = fit("plan=check", "max_steps=16")
    assert summary["steps"] == 16 and summary["predicted"]["seconds_per_step"] is None
    assert "The time per step is not known: division by zero" in caplog.text
