"""Tests the hints that a run logs for settings that may not suit it, and the list of written files."""

import pytest

from lowmem.report import hints

PUBLISHED = ("model=hf", "model.name=somewhere")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("adapter=lora",), True),
        (("adapter=qlora", "model.lr=2e-5"), True),
        (("adapter=lora", "lr=2e-4"), False),
        ((), False),  # all weights are trained, for which the model's lr is suitable
        (("adapter=lora", "model.pretrained=false"), False),  # no suitable lr is known for random weights
    ],
)
def test_lr_hint_is_logged_only_for_adapters_with_the_default_lr_of_full_training(config, caplog, typed, told):
    with caplog.at_level("INFO", logger="lowmem"):
        hints.tell_lr(config(*PUBLISHED, *typed, base=()))
    assert ("with AdamW, type lr=2e-4" in caplog.text) == told


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            "max_steps=20",
            "warmup of 50 steps is longer than this run (max_steps=20): the learning rate ends at 0.0004, "
            "below lr=0.001. Type",
        ),
        (
            "max_steps=50",
            "warmup of 50 steps is as long as this run (max_steps=50): the learning rate reaches 0.001 "
            "only in the last step. Type",
        ),
        ("max_steps=51", None),
        ("max_steps=1", "warmup of 50 steps is longer than this run (max_steps=1): the learning rate ends at 2e-05"),
        ("max_steps=20 scheduler.warmup=0.03", None),  # what the hint advises
        ("max_steps=20 scheduler.warmup=1", "warmup of 20 steps is as long as this run (max_steps=20)"),
        ("max_steps=20 scheduler=linear scheduler.warmup_steps=21", "warmup of 21 steps is longer than this run"),
        ("max_steps=20 scheduler=linear", None),
        ("max_steps=20 optim.lr=2e-3", "learning rate ends at 0.0008"),
    ],
)
def test_warmup_hint_is_logged_only_if_the_warmup_is_at_least_as_long_as_the_run(config, caplog, typed, told):
    with caplog.at_level("INFO", logger="lowmem"):
        hints.tell_schedule(config("lr=1e-3", *typed.split(), base=()))
    assert told in caplog.text if told else not caplog.text


@pytest.mark.parametrize(
    ("typed", "before", "told"),
    [
        ("max_steps=80", 0.0, True),
        ("max_steps=80 scheduler=linear", 0.0, True),
        ("max_steps=80", 5e-4, False),  # the earlier run would have had the same rate: half of the cosine is done
        ("max_steps=80 scheduler=constant lr=2e-4", 5e-4, False),  # a constant rate, which the hint would advise
    ],
)
def test_resume_hint_with_both_learning_rates_is_logged_only_if_the_schedule_changes(
    config, caplog, typed, before, told
):
    with caplog.at_level("INFO", logger="lowmem"):
        run = config("lr=1e-3", "scheduler.warmup_steps=0", *typed.split(), base=())
        hints.tell_schedule(run, ("resume=there", 40, before))
    says = "resume=there: the learning rate of step 41 is 0.0005 and would have been 0 in that run"
    assert (says in caplog.text and "type scheduler=constant scheduler.warmup=0 lr=5e-05" in caplog.text) == told
    assert told or not caplog.text


@pytest.mark.parametrize("optim", ["adamw4bit", "adamw8bit"])
def test_hint_of_compilation_in_the_first_step_is_logged_for_adamw4bit_but_not_for_adamw8bit(config, caplog, optim):
    with caplog.at_level("INFO", logger="lowmem"):
        hints.tell_compilation(config(f"optim={optim}"))
    assert ("the first step compiles this optimizer" in caplog.text) == (optim == "adamw4bit")


def test_files_written_by_a_run_are_listed_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run/model", "run/.hydra"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run" / "summary.json").write_text("{}")
    hints.tell_files(tmp_path / "run")
    assert capsys.readouterr().out == "wrote run/: model/, summary.json\n"
    hints.tell_export(tmp_path / "run")
    assert capsys.readouterr().out == "wrote run/model\n"
    (tmp_path / "run" / "model").rmdir()
    hints.tell_export(tmp_path / "run")
    assert capsys.readouterr().out == ""
