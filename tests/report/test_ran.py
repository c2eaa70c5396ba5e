"""Tests the title of a run, which lists its group choices, and the list of its other overrides."""

from lowmem.report import ran

CHOICES = {  # in the form in which Hydra lists choices
    "experiment": None,
    "logger": "wandb",
    "gradient_checkpointing": "none",
    "optim": "adam8bit",
    "precision": "32",
    "model": "tiny",
    "hydra/launcher": "basic",
}


def test_title_of_a_run_begins_with_its_model_and_omits_inactive_groups():
    assert ran.chosen(CHOICES) == ["model=tiny", "precision=32", "optim=adam8bit"]
    assert ran.chosen({}) == []  # as in a notebook


def test_overrides_other_than_group_choices_are_listed_apart_from_the_title():
    typed = ["optim=adam8bit", "lr=1e-3", "+trainer.precision=1", "logger=wandb"]
    assert ran.besides(CHOICES, typed) == ["lr=1e-3", "+trainer.precision=1"]


def test_title_of_the_memory_picture_lists_group_choices_but_not_other_overrides(command, tmp_path, monkeypatch):
    from lowmem.report import picture

    titles = []
    monkeypatch.setattr(
        picture, "memory_picture", lambda file, rows, timeline, title, *more: titles.append((title, more))
    )
    monkeypatch.setattr(picture, "send", lambda *_: None)
    code, said = command("optim=sgd", "precision=bf16", "max_steps=1", "gradient_checkpointing=every_layer")
    assert code == 0, said
    ((title, (typed, limit, *_)),) = titles
    assert (
        title == "model=tiny data=text precision=bf16 optim=sgd scheduler=cosine "
        "gradient_checkpointing=every_layer weights=resident loss=full"
    )
    assert "max_steps=1" in typed.split() and "optim" not in typed and limit is None
