"""Tests validation sets. The loss of each set must equal the loss that plain transformers computes with the exported
model, document by document. Also tests that small sets are reported."""

import csv
import json
import math
import os
import re
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from conftest import ROOT
from lowmem.command import cli
from lowmem.config.settle import run_of
from lowmem.config.typed_lines import quoted
from lowmem.system.errors import Refused
from lowmem.training import build
from lowmem.training.module import CausalLM

pytestmark = pytest.mark.kernels
LINES = ("val_every=2", "max_steps=2", "val_sequences=12", "lr=1e-2", "seq_len=24")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a folder with training text (the folder `train`) and validation text: the folder `near`, and the file
    `train/99.txt`."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "train").mkdir()
    for number in range(40):
        (folder / "train" / f"{number:02d}.txt").write_text(
            f"def f{number}(x): return {number} * x + x\n" * (number % 7 + 1)
        )
    for number in range(20):
        (folder / "near").mkdir(exist_ok=True)
        (folder / "near" / f"{number}.txt").write_text(f"def g{number}(y): return y\n" * (number % 5 + 1))
    (folder / "train" / "99.txt").write_text("Quite another kind of text, which nobody has seen. " * 30)
    return folder


def typed(files, *more):
    sets = f"data.val_path={{near:{files / 'near'},far:{files / 'train' / '99.txt'}}}"
    return ("data=text", f"data.path={files / 'train'}", sets, *LINES, *more)


def plain(folder, micro_batches):
    """Computes the loss of each document alone with plain transformers. Returns (mean over all tokens with a label,
    mean of the micro-batches' means)."""
    model, sums = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for batch in micro_batches:
        nats, count = 0.0, 0
        for row, labels in enumerate(batch.labels):
            starts = [0] if batch.position_ids is None else (batch.position_ids[row] == 0).nonzero()[:, 0].tolist()
            for start, stop in pairwise([*starts, len(labels)]):
                with torch.no_grad():
                    logits = model(batch.input_ids[row : row + 1, start:stop]).logits[0]
                nats += cross_entropy(logits, labels[start:stop], reduction="sum", ignore_index=-100).item()
                count += int((labels[start:stop] != -100).sum())
        sums.append((nats, count))
    return sum(n for n, _ in sums) / sum(c for _, c in sums), sum(n / c for n, c in sums) / len(sums)


def test_validation_set_without_learned_tokens_has_a_nan_loss_and_another_set_keeps_its_loss(fit, tmp_path):
    def written(name, prompt):
        lines = (json.dumps({"q": f"{prompt} {number}", "a": f"{number}"}) + "\n" for number in range(40))
        (tmp_path / name).write_text("".join(lines))
        return tmp_path / name

    empty, full = written("empty.jsonl", "a long question " * 30), written("full.jsonl", "what is")
    sets = f"data.val_path={{empty:{empty},full:{full}}}"
    texts = ("data=jsonl", f"data.path={written('train.jsonl', 'say')}", sets, "data.prompt=q", "data.completion=a")
    summary, run = fit(*texts, "data.packing=joined", "data.too_long=cut", *LINES)
    none, other = summary["validation"]
    assert math.isnan(none["loss"]) and math.isnan(none["perplexity"]) and math.isfinite(other["loss"])
    (row,) = (row for row in csv.DictReader((run / "metrics.csv").open()) if row["val_loss_full"])
    assert float(row["val_loss_full"]) == other["loss"] and row["val_loss"] == "nan"


@pytest.mark.rows("documents")
@pytest.mark.parametrize("packing", ["joined", "documents", "padded"])
def test_loss_of_every_validation_set_equals_transformers_on_the_export(fit, config, files, packing):
    lines = typed(files, f"data.packing={packing}", "data.too_long=cut")
    summary, run = fit(*lines)
    data = build.data(config(*lines))
    assert [one["name"] for one in summary["validation"]] == [one.name for one in data.val] == ["near", "far"]
    means = []
    for one, loader in zip(summary["validation"], data.val, strict=True):
        loss, mean_of_means = plain(run / "model", loader)
        assert one["loss"] == pytest.approx(loss, abs=1e-5)
        assert one["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        means.append(abs(mean_of_means - loss))
    assert summary["val_loss"] == summary["validation"][0]["loss"] != summary["validation"][1]["loss"]
    if packing != "joined":  # micro-batches have unequal numbers of labels, so a mean of means is a different number
        assert max(means) > 1e-4


@pytest.mark.parametrize("packing", ["documents", "padded"])
def test_validation_loss_of_a_chat_counts_assistant_tokens_only(fit, config, packing):
    where = ("data=chat", f"data.path={ROOT / 'examples' / 'chat.jsonl'}", f"data.packing={packing}")
    lines = (*where, *LINES, "seq_len=256", "model.architecture.vocab_size=400", "val_sequences=3", "batch_size=2")
    summary, run = fit(*lines, "sample_tokens=4", "sample_prompts=[Who are you?]")
    data = build.data(config(*lines))
    loss, _ = plain(run / "model", data.val[0])
    assert summary["val_loss"] == pytest.approx(loss, abs=1e-5)
    tokenizer, text, count = data.tokens.tokenizer, 0, 0
    for batch in data.val[0]:
        learned = batch.labels[batch.labels != -100]
        text, count = text + len(tokenizer.decode(learned, skip_special_tokens=True).encode()), count + len(learned)
    assert summary["bits_per_byte"] == pytest.approx(loss / math.log(2) * count / text, abs=1e-4)
    every = torch.cat([batch.input_ids.flatten() for batch in data.val[0]])
    assert text < 0.9 * len(tokenizer.decode(every, skip_special_tokens=True).encode())  # `text` excludes questions
    said = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])["prompt"]
    assert "Who are you?" in said and said != "Who are you?"  # the chat template surrounds it
    kept = json.loads((run / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in kept and (run / "model" / "chat_template.jinja").is_file()


def test_metrics_have_a_column_for_each_validation_set(fit, files):
    summary, run = fit(*typed(files, "val_every=1"))
    rows = [row for row in csv.DictReader((run / "metrics.csv").open()) if row["val_loss"]]
    assert len(rows) == 2 and all(row["val_loss_far"] and row["bits_per_byte_far"] for row in rows)
    assert float(rows[-1]["val_loss_far"]) == summary["validation"][1]["loss"]
    assert float(rows[-1]["val_loss"]) == summary["val_loss"] and "perplexity" not in rows[0]


def test_file_of_the_training_folder_that_is_a_validation_set_is_excluded_from_training(config, files):
    both = build.data(config(*typed(files)))
    alone = build.data(config(*typed(files, f"data.val_path={files / 'near'}")))
    assert len(both.tokens.train.ids) < len(alone.tokens.train.ids)  # 99.txt is not training text
    assert torch.equal(next(iter(both.val[0])).input_ids[:, 1:8], next(iter(both.val[0])).labels[:, :7])


def test_first_of_two_validation_sets_decides_early_stopping_and_the_best_checkpoint(fit, files, monkeypatch):
    losses = iter([[9.0, 9.0], [2.0, 5.0], [3.0, 4.0], [4.0, 3.0], [5.0, 1.0]])  # the losses of the second set fall
    evaluated = CausalLM.on_validation_epoch_end

    def given(self):
        evaluated(self)
        self.val_losses = next(losses)

    monkeypatch.setattr(CausalLM, "on_validation_epoch_end", given)
    lines = ("val_every=1", "max_steps=6", "checkpoint.keep=best", "early_stop.patience=2")
    summary, run = fit(*typed(files, *lines))
    assert summary["steps"] == 3 and summary["stopped_early"]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000001.ckpt", "step-00000003.ckpt"}


def test_invalid_validation_set_is_refused(fit, files):
    for val_path, says in (
        ("{a:/none}", "no such file"),
        (f"{{near:{files / 'train'}}}", "this is also data.path"),
        ("{a:x,b c:y}", "several with names"),
        ("{}", "no such file"),  # {} is read as a file name
    ):
        with pytest.raises(Refused, match=says):
            fit("data=text", f"data.path={files / 'train'}", f"data.val_path={val_path}", *LINES)
    read = cli.prepare(["data=text", "data.path=x", "data.val_path={a:~/b (2).txt,c:d}"])
    assert run_of(read).data.val_path == {"a": os.path.expanduser("~/b (2).txt"), "c": "d"}
    assert [quoted(line) for line in read] == read


def told_of_few(config, caplog, *lines):
    """Returns the log messages about small validation sets."""
    caplog.clear()
    caplog.set_level("INFO")
    build.data(config(*lines))
    return [message for message in caplog.messages if message.startswith("validation")]


PAIRS = [{"prompt": f"Q{i}", "chosen": f" {i}", "rejected": f" -{i}"} for i in range(400)]
SMALL_DATA = {  # name -> (overrides, records, regular expression of the message; None: no message)
    "ten pairs": (
        "data=preference loss=dpo",
        PAIRS[:10],
        "1 pair, so .* Type data.val_fraction=0.5 for more, or data.val_p",
    ),
    "forty pairs": (
        "data=preference loss=dpo data.packing=documents",
        PAIRS[:40],
        r"pairs?, .* data.val_fraction=0.25 for",
    ),
    "answers": ("data=jsonl data.field=chosen", PAIRS[:10], "has only 1 document, .* Type data.val_fraction=0.5 for"),
    "enough": ("data=preference loss=dpo", PAIRS, None),
}


@pytest.mark.parametrize("name", SMALL_DATA)
def test_small_validation_set_is_reported_with_advice_and_a_large_one_is_not(config, caplog, tmp_path, name):
    typed, records, told = SMALL_DATA[name]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = (*typed.split(), f"data.path={tmp_path / 'a.jsonl'}", "seq_len=32")
    found = told_of_few(config, caplog, *lines)
    assert len(found) == (told is not None) and all(re.search(told, one) for one in found)
    if told:
        share = re.search(r"data\.val_fraction=\S+", found[0])[0]
        still_few = len(records) == 10  # half of ten are five
        assert bool(told_of_few(config, caplog, *lines, share)) == still_few


@pytest.mark.parametrize(("count", "is_told"), [(9, True), (10, False)])
def test_nine_validation_documents_are_reported_as_few_and_ten_are_not(config, caplog, tmp_path, count, is_told):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, PAIRS[:30])))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, PAIRS[30 : 30 + count])))
    lines = ("data=jsonl", "data.field=chosen", f"data.path={tmp_path / 'a.jsonl'}", "seq_len=32")
    assert bool(told_of_few(config, caplog, *lines, f"data.val_path={tmp_path / 'b.jsonl'}")) == is_told


def test_small_validation_text_is_reported_in_sequences(config, caplog, tmp_path):
    """The second message does not suggest data.val_fraction, because the validation data come from data.val_path."""
    (tmp_path / "a.txt").write_text("some words and more of them, in lines\n" * 60)
    (tmp_path / "b.txt").write_text("other words, and then some more of these\n" * 4)
    text = ("data=text", f"data.path={tmp_path / 'a.txt'}", "seq_len=16")
    assert re.search(r"has only \d sequences?, so .* Type data\.val_fraction=", told_of_few(config, caplog, *text)[0])
    (told,) = told_of_few(config, caplog, *text, f"data.val_path={tmp_path / 'b.txt'}")
    assert told.endswith("Add more validation data.")


def test_export_reports_no_small_validation_set(config, caplog, tmp_path):
    """An export evaluates nothing."""
    (tmp_path / "a.txt").write_text("some words and more of them, in lines\n" * 60)
    text = ("data=text", f"data.path={tmp_path / 'a.txt'}", "seq_len=16")
    assert told_of_few(config, caplog, *text)
    assert not told_of_few(config, caplog, *text, "export=a-run")
