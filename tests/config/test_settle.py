"""A config is settled once: a `Run` is frozen, follows what becomes known later, and is what everything else reads."""

import pytest
from pydantic import ValidationError

from lowmem.config.check import settled
from lowmem.config.settle import run_of
from lowmem.config.typed_lines import composed
from lowmem.model.loading import architecture
from lowmem.system.errors import Refused


def test_a_run_does_not_change():
    run = run_of([])
    for one, key in ((run, "lr"), (run.model, "name"), (run.optim, "lr"), (run.precision, "target")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(one, key, 1)


def test_a_configuration_of_transformers_changes_nothing_of_it():
    """Some write into the mappings that they are made of, such as rope_scaling."""
    run = run_of(["model=qwen3-0.6b", "model.pretrained=false"])
    others = {key: value for key, value in run.model.architecture.items() if key != "rope_parameters"}
    run = run.replacing("model.architecture", others | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    architecture(run.model)
    assert run.model.architecture["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_what_becomes_known_is_followed_by_what_depends_on_it():
    run = run_of(["scheduler=cosine"])
    later = run.knowing(max_steps=77)
    assert later.scheduler.total_steps == 77 == later.max_steps and run.scheduler.total_steps == run.max_steps != 77
    alone = run.resolved().knowing(max_steps=77)
    assert alone.scheduler.total_steps == run.max_steps and alone.max_steps == 77


def test_of_a_key_that_is_replaced_nothing_is_left():
    run = run_of([])
    other = {"model_type": "llama"}
    assert "n_layer" in run.knowing(model={"architecture": other}).model.architecture
    assert run.replacing("model.architecture", other).model.architecture == other


def test_all_that_is_wrong_is_said_at_once_and_a_run_is_taken_as_it_is():
    with pytest.raises(Refused) as refusal:
        settled(composed(["lr=-1", "max_steps=0", "+optim.lrs=1e-3"]))
    assert str(refusal.value).count("\n") >= 1 and "lr=-1" in str(refusal.value) and "max_steps=0" in str(refusal.value)
    run = run_of([])
    assert settled(run) is run and settled(composed([])).as_dict() == run.as_dict()
