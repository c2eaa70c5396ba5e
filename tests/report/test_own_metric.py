"""Tests a user's metric function: where its numbers are reported, that it does not change training, and how its errors
are reported."""

import csv
import json

import pytest
import torch

from conftest import ROOT
from lowmem.command import cli
from lowmem.report import summary as report
from lowmem.report.own_metric import OwnMetric
from lowmem.system.errors import Refused
from same import last, same

LINES = ("val_every=2", "model.architecture.resid_pdrop=0.2", "save_every=2")
seen = []


def draws(model, tokenizer):
    seen.append((model.training, torch.is_grad_enabled(), next(model.parameters()).dtype))
    return {"drawn": torch.rand(()), "one": 1}


def raises(model, tokenizer):
    raise KeyError("my own")


def a_list(model, tokenizer):
    return [1]


def taken(model, tokenizer):
    return {"val_loss": 1.0}


def test_example_metric_is_in_metrics_csv_summary_and_table(fit):
    summary, run = fit("metric=examples.metric.accuracy", "val_every=2", "save_every=2")
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    measured = {row["step"]: float(row["accuracy"]) for row in rows if row["val_loss"]}
    assert measured.keys() == {"2", "4"} and summary["metric"] == {"accuracy": measured["4"]}
    assert [row["step"] for row in rows if row["train_loss"]] == [
        "1",
        "2",
        "3",
        "4",
    ]  # rows of training steps do not change
    assert json.loads((run / "summary.json").read_text())["metric"] == summary["metric"]
    assert f"accuracy                  {measured['4']:.4g}" in report.table(summary)
    before = (run / "metrics.csv").read_text()
    fit("metric=examples.metric.accuracy", "val_every=2", f"resume={run / 'checkpoints' / 'step-00000002.ckpt'}")
    again = list(csv.DictReader((run / "metrics.csv").open()))
    assert [row["accuracy"] for row in again] == [row["accuracy"] for row in rows] and before.startswith("step,")


def freezes(model, tokenizer):
    model.requires_grad_(False)
    return {"one": 1}


def two_lines(model, tokenizer):
    return {"a\nb": 1}


def test_metric_that_freezes_weights_does_not_change_training(fit):
    plain = last(fit(*LINES, folder="plain")[1])["state_dict"]
    assert same(last(fit(*LINES, f"metric={__name__}.freezes", folder="own")[1])["state_dict"], plain)


def test_metric_that_cannot_be_imported_is_refused_in_one_sentence(command):
    code, said = command("metric=foo.accuracy")
    assert code == 1 and "metric=foo.accuracy: No module named 'foo'. Type" in said and "Error" not in said


def test_metric_that_draws_random_numbers_does_not_change_training(fit):
    plain = last(fit(*LINES, folder="plain")[1])["state_dict"]
    assert same(last(fit(*LINES, f"metric={__name__}.draws", folder="own")[1])["state_dict"], plain)
    assert len(seen) == 3 and all(one[:2] == (False, False) for one in seen)  # also called before the first step


def test_every_evaluation_seeds_the_random_numbers_of_a_metric_equally(fit, monkeypatch):
    """Ranks draw different dropout masks. Without a common seed, a metric could run more forward passes on one rank
    than on another, and the ranks would wait for each other forever."""
    own, drawn = OwnMetric._called, []

    def called(self, model):
        drawn.append(own(self, model)["drawn"])
        return {}

    monkeypatch.setattr(OwnMetric, "_called", called)
    fit(*LINES, f"metric={__name__}.draws")
    assert len(drawn) == 3 and len({*drawn}) == 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", r"the function raised KeyError \('my own'\)"),
        ("a_list", "the function returned '\\[1\\]'"),
        ("taken", "val_loss"),
        ("two_lines", "a dict of numbers"),
    ],
)
def test_metric_that_raises_or_returns_an_invalid_result_is_refused(fit, function, says):
    with pytest.raises(Refused, match=says):
        fit(f"metric={__name__}.{function}")


@pytest.mark.parametrize("name", ["nothing.there", "examples.metric.nothing", "examples.metric.TEXT", "accuracy"])
def test_metric_that_is_not_an_importable_function_is_refused_with_advice(fit, name):
    with pytest.raises(Refused, match=rf"metric={name}: .*Type metric="):
        fit(f"metric={name}")


def test_resume_refuses_a_stored_metric_unless_it_is_typed_again(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- metric=os.system\n- max_steps=3\n")
    with pytest.raises(Refused, match=r"can run code.*metric=os.system"):
        cli.prepare([f"resume={tmp_path}"])
    assert "metric=os.system" in cli.prepare([f"resume={tmp_path}", "metric=os.system"])
    assert (ROOT / "examples" / "metric.py").is_file()
