"""Tests that a config is settled once into a frozen `Run`, and that facts known later produce a new `Run` from the same
overrides."""

import pytest
from pydantic import ValidationError

from lowmem.config.check import settled
from lowmem.config.settle import run_of
from lowmem.config.typed_lines import composed
from lowmem.model.loading import architecture
from lowmem.system.errors import Refused


def test_assignment_to_a_field_of_a_run_or_of_its_sections_raises_an_error():
    run = run_of([])
    for one, key in ((run, "lr"), (run.model, "name"), (run.optim, "lr"), (run.precision, "target")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(one, key, 1)


def test_building_a_transformers_config_does_not_change_the_run():
    """Some configs of transformers modify the mappings from which they are built, such as rope_scaling."""
    run = run_of(["model=qwen3-0.6b", "model.pretrained=false"])
    others = {key: value for key, value in run.model.architecture.items() if key != "rope_parameters"}
    run = run.replacing("model.architecture", others | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    architecture(run.model)
    assert run.model.architecture["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_max_steps_known_later_sets_the_scheduler_steps_unless_the_run_was_resolved():
    run = run_of(["scheduler=cosine"])
    later = run.knowing(max_steps=77)
    assert later.scheduler.total_steps == 77 == later.max_steps and run.scheduler.total_steps == run.max_steps != 77
    alone = run.resolved().knowing(max_steps=77)
    assert alone.scheduler.total_steps == run.max_steps and alone.max_steps == 77


def test_replaced_architecture_keeps_no_keys_of_the_old_architecture():
    run = run_of([])
    other = {"model_type": "llama"}
    assert "n_layer" in run.knowing(model={"architecture": other}).model.architecture
    assert run.replacing("model.architecture", other).model.architecture == other


def test_settling_a_config_reports_an_invalid_lr_and_an_invalid_max_steps_together():
    with pytest.raises(Refused) as refusal:
        settled(composed(["lr=-1", "max_steps=0"]))
    assert str(refusal.value).count("\n") >= 1 and "lr=-1" in str(refusal.value) and "max_steps=0" in str(refusal.value)


def test_settling_a_valid_run_returns_this_run_unchanged():
    run = run_of([])
    assert settled(run) is run and settled(composed([])).as_dict() == run.as_dict()
