"""Tests that runs with epochs= equal runs with max_steps=, and that tokenizer= uses the tokenizer of another folder."""

import pytest
import yaml

from lowmem.command import cli
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import run_of
from lowmem.config.typed_lines import in_place_of
from lowmem.data.opening import StoredSource
from lowmem.data.token_store import tokenize
from lowmem.model.loading import tokenizer
from lowmem.system.errors import Refused
from lowmem.training import build

RUN = ("accumulation=fixed", "accumulation.batches=7", "lr=1e-2", "scheduler.warmup=0.5", "data.pattern=file0[0-2].txt")


@pytest.fixture
def per_epoch(config):
    cfg = config(*RUN, "epochs=1")
    return build.open_texts(cfg).steps_in(cfg)


def curve(folder):
    """Returns, for each row of metrics.csv, the values that do not depend on time or memory."""
    names, *values = (line.split(",") for line in (folder / "metrics.csv").read_text().splitlines())
    kept = [i for i, name in enumerate(names) if "second" not in name and "gib" not in name]
    return [[line[i] for i in kept] for line in values]


def test_run_of_two_epochs_has_the_logged_values_of_a_run_of_as_many_steps(fit, per_epoch):
    assert per_epoch > 1
    by_epochs, folder = fit(*RUN, "epochs=2", folder="epochs")
    by_steps, other = fit(*RUN, f"max_steps={2 * per_epoch}", folder="steps")
    assert by_epochs["steps"] == by_steps["steps"] == 2 * per_epoch
    assert curve(folder) == curve(other)


def test_resumed_run_of_epochs_ends_with_the_steps_and_values_of_the_unbroken_run(fit, per_epoch):
    _, unbroken = fit(*RUN, "epochs=2", "save_every=1", "checkpoint.keep=9", folder="unbroken")
    stopped = unbroken / "checkpoints" / "step-00000001.ckpt"
    summary, folder = fit(*RUN, "epochs=2", f"resume={stopped}", folder="resumed")
    assert summary["steps"] == 2 * per_epoch
    assert curve(folder)[-2:] == curve(unbroken)[-2:]


def test_steps_of_an_epoch_do_not_depend_on_batch_size(config):
    of_size = ["accumulation=effective_batch", "accumulation.size=24", "epochs=3"]
    runs = [config(*of_size, f"batch_size={size}") for size in ("auto", 1, 8, 24)]
    assert len({build.open_texts(run).steps_in(run) for run in runs}) == 1


@pytest.mark.parametrize(
    "more", [(), pytest.param(("plan=auto",), marks=pytest.mark.matrix), ("show=1",)], ids=["train", "plan", "show"]
)
def test_run_of_epochs_opens_its_data_once(command, small, monkeypatch, more):
    """The steps of an epoch are computed from the rows on which the run then trains, so the data are opened once."""
    opened, open_source = [], StoredSource.opened
    monkeypatch.setattr(StoredSource, "opened", lambda self, wanted: opened.append(self) or open_source(self, wanted))
    base = tuple(line for line in small if not line.startswith(("max_steps=", "scheduler.")))
    code, said = command(*RUN, "epochs=1", *more, base=base)
    assert code == 0, said
    assert len(opened) == 1


def test_run_that_lacks_only_its_evaluation_opens_its_data_once(fit, monkeypatch):
    opened, open_texts = [], build.open_texts
    _, folder = fit(*RUN, "epochs=1", "resume=auto")
    (folder / "summary.json").unlink()
    monkeypatch.setattr(build, "open_texts", lambda run: opened.append(run) or open_texts(run))
    fit(*RUN, "epochs=1", "resume=auto")
    assert len(opened) == 1


def test_data_messages_are_logged_once_in_a_run_of_epochs(fit, caplog):
    with caplog.at_level("INFO"):
        fit(*RUN, "epochs=1", "data.packing=documents", "val_sequences=2")
    assert caplog.text.count("data.packing=documents, train") == caplog.text.count("data.packing=documents, val") == 1
    assert caplog.text.count("val_sequences=2: each evaluation reads the first 2 of") == 1
    assert caplog.text.count("data.packing, data.too_long and seq_len decide") == 1


@pytest.mark.parametrize("typed", ["epochs=3", "max_steps=7", "scheduler.warmup=0.1", "scheduler.warmup_steps=3"])
def test_override_typed_for_a_resume_drops_mutually_exclusive_stored_overrides(tmp_path, typed):
    (tmp_path / ".hydra").mkdir()
    earlier = ["lr=1.0", "max_steps=5", "scheduler.warmup=0.5"]
    (tmp_path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(earlier))
    lines = cli.prepare([f"resume={tmp_path}", typed])
    group = ("epochs", "max_steps") if "warmup" not in typed else ("scheduler.warmup", "scheduler.warmup_steps")
    assert [line for line in lines if line.split("=")[0] in group] == [typed]
    assert "lr=1.0" in lines


@pytest.fixture
def other_tokenizer(config, tmp_path):
    """Returns the folder of a tokenizer that was trained on other text and has fewer tokens than the data's own."""
    (tmp_path / "words.txt").write_text("elephants never forget " * 40)
    cfg = config(f"data.path={tmp_path / 'words.txt'}")
    tokenize(instantiate(cfg.data), tmp_path / "cache", 280).tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_tokenizer_of_another_folder_tokenizes_the_training_data(config, other_tokenizer):
    ours, theirs = (build.data(config(*more)).tokens for more in ((), (f"tokenizer={other_tokenizer}",)))
    assert len(theirs.tokenizer) < len(ours.tokenizer) <= 300
    text = "elephants never forget"
    assert len(theirs.tokenizer(text).input_ids) < len(ours.tokenizer(text).input_ids)
    assert len(theirs.train.ids) > len(ours.train.ids)  # it needs more tokens for the same files


def test_tokenizer_of_another_folder_is_exported_and_used_for_evaluation(fit, other_tokenizer):
    from transformers import AutoTokenizer

    trained, folder = fit(f"tokenizer={other_tokenizer}", folder="run")
    exported, given = (AutoTokenizer.from_pretrained(place) for place in (folder / "model", other_tokenizer))
    assert exported.get_vocab() == given.get_vocab()
    evaluated, _ = fit(f"evaluate={folder / 'model'}", folder="evaluated")
    assert evaluated["val_loss"] == pytest.approx(trained["val_loss"], abs=1e-6)


def test_tokenizer_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"\(the folder has no tokenizer.json\). Give a folder that contains a tokenizer"):
        tokenizer(str(tmp_path), False, key="tokenizer")


@pytest.mark.parametrize(("typed", "says"), [("/no/such", "there is no such folder"), ("no/such", "cannot be read")])
def test_missing_tokenizer_folder_is_refused(fit, typed, says):
    with pytest.raises(Refused, match=f"^tokenizer={typed}: .*{says}"):
        fit(f"tokenizer={typed}")


@pytest.mark.parametrize(
    ("typed", "added"),
    [
        (["experiment=chat_lora_8gb", "max_steps=2"], ["epochs=null"]),
        (["experiment=chat_lora_8gb", "scheduler.warmup_steps=2"], ["scheduler.warmup=null"]),
        (["experiment=chat_lora_8gb", "epochs=3"], []),
        (["max_steps=2"], []),
    ],
    ids=lambda lines: " ".join(lines) or "none",
)
def test_override_beside_an_experiment_sets_a_mutually_exclusive_key_of_the_experiment_to_null(typed, added):
    assert in_place_of(typed) == added
    cfg = run_of([*typed, *added])
    assert cfg.epochs is None or "max_steps=2" not in typed
