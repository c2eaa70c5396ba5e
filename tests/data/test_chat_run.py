"""Runs on conversations: the trained tokenizer, the chat template in the exported model, resume, and refusals."""

import csv
import json

import pytest
import torch
from transformers import AutoTokenizer

from conftest import ROOT
from lowmem.config.check import check_places
from lowmem.data.loader import IGNORED
from lowmem.data.sources.chat_template import CHATML
from lowmem.system.errors import Refused
from lowmem.training import build
from lowmem.training.module import CausalLM

CHAT = (
    "data=chat",
    "model.architecture.vocab_size=400",
    "model.architecture.n_positions=512",
    "seq_len=128",
    "batch_size=8",
    "logger=none",
)


@pytest.fixture
def chat(config):
    """Returns a function that takes overrides and returns the config of a small run on conversations of examples/."""

    def make(*overrides, path=ROOT / "examples" / "chat.jsonl"):
        another = any(line.startswith("model=") for line in overrides)  # has other architecture keys
        lines = [line for line in CHAT if not (another and line.startswith("model."))]
        return config(*lines, f"data.path={path}", *overrides)

    return make


@pytest.fixture
def run(chat, tmp_path):
    from lowmem.fit import fit

    return lambda *overrides, folder="run", **how: fit(chat(*overrides, **how), tmp_path / folder)


def test_tokenizer_trained_on_conversations_has_chatml_and_no_tokens_of_markup_text(chat):
    data = build.data(chat())
    tokenizer = data.tokens.tokenizer
    assert tokenizer.chat_template == CHATML and tokenizer.eos_token == "<|im_end|>"
    words = [token for token in tokenizer.get_vocab() if token not in tokenizer.get_added_vocab()]
    assert not any("im_" in word or "|>" in word for word in words)
    end = tokenizer.eos_token_id
    batch = next(iter(data.train)).micro_batches[0]
    learned = tokenizer.decode(batch.labels[batch.labels != IGNORED])
    assert "<|im_start|>" not in learned and "user" not in learned and (batch.labels == end).any()
    assert 0.2 < data.tokens.train.learned(0, len(data.tokens.train.ids)).mean() < 0.7


def test_training_on_shipped_conversations_lowers_the_loss_and_exports_the_template(run, tmp_path):
    summary = run("max_steps=25", "lr=1e-2", "val_sequences=16")
    assert summary["val_loss"] < 5.5  # 6.0 = ln(400) at the start
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert exported.chat_template == CHATML and config["eos_token_id"] == exported.eos_token_id
    asked = exported.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("packing", ["documents", "padded"])
def test_counts_of_tokens_and_learned_tokens_in_summary_and_metrics_exclude_padding(run, chat, tmp_path, packing):
    typed = (f"data.packing={packing}", "logger=csv", "max_steps=2")
    summary = run(*typed)
    windows = [next(windows) for windows in [iter(build.data(chat(*typed)).train)] for _ in range(2)]
    batches = [batch for window in windows for batch in window.micro_batches]
    assert all(batch.real is not None for batch in batches)
    tokens = sum(int(batch.real.sum()) for batch in batches)
    learned = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    assert (summary["tokens"], summary["learned_tokens"]) == (tokens, learned) and learned < 0.8 * tokens
    assert summary["learned_tokens_per_second"] == pytest.approx(summary["tokens_per_second"] * learned / tokens)
    with (tmp_path / "run" / "metrics.csv").open() as lines:
        last = [row for row in csv.DictReader(lines) if row["train_loss"]][-1]
    assert (int(last["tokens"]), int(last["learned_tokens"])) == (tokens, learned)


def test_resume_from_a_checkpoint_without_a_count_of_learned_tokens_takes_its_count_of_tokens(caplog):
    """Checkpoints of earlier versions have one count, `tokens`, which contains only learned tokens. A resumed run
    continues both of its counts from this number."""
    resumed = CausalLM.__new__(CausalLM)
    torch.nn.Module.__init__(resumed)
    saved = {"position": {}, "tokens": 7, "skipped_steps": 0}
    for more, expected in (({}, 7), ({"learned_tokens": 5}, 5)):
        caplog.clear()
        with caplog.at_level("INFO", logger="lowmem"):
            resumed.on_load_checkpoint({"lowmem": saved | more})
        assert (resumed.tokens, resumed.learned_tokens) == (7, expected)
        assert ("counted only learned tokens" in caplog.text) == (not more)


def test_resume_with_another_chat_template_is_refused(run, tmp_path):
    run("max_steps=2")
    own = tmp_path / "own.jinja"
    own.write_text(CHATML.replace("assistant\\n", "assistant\\n"))
    assert run(f"resume={tmp_path / 'run'}", "max_steps=3", folder="next")["steps"] == 3
    own.write_text(CHATML.replace("<|im_start|>' + m", "<|im_start|> ' + m"))
    typed = (f"data.template={own}", "model.added_tokens=['<|im_start|>','<|im_end|>']", "max_steps=3")
    with pytest.raises(Refused, match=r"different chat template.* data\.template="):
        run(f"resume={tmp_path / 'run'}", *typed, folder="other")


def test_bad_conversation_is_refused_with_its_line_and_with_skip_bad_is_skipped_and_counted(run, tmp_path, caplog):
    lines = (ROOT / "examples" / "chat.jsonl").read_text().splitlines()[:40]
    lines[2] = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(Refused, match=r"some\.jsonl, line 3: the conversation has no message of the assistant"):
        run("max_steps=1", path=file)
    with caplog.at_level("INFO", logger="lowmem"):
        assert run("max_steps=1", "seq_len=96", "data.skip_bad=true", path=file, folder="skips")["steps"] == 1
    assert "1 of" in caplog.text and "some.jsonl, line 3" in caplog.text


def test_missing_chat_template_file_is_refused_with_its_name(chat):
    with pytest.raises(Refused, match=r"data\.template=own\.jinja: there is no such file"):
        check_places(chat("data.template=own.jinja"))
    check_places(chat("data.template=chatml"))


def test_base_model_without_a_chat_template_is_refused_or_gets_two_tokens_with_template_chatml(run, fit, tmp_path):
    fit("max_steps=1", "model.architecture.n_positions=512", folder="base")
    base = ("model=hf", f"model.name={tmp_path / 'base' / 'model'}", "lr=1e-3", "max_steps=1")
    with pytest.raises(Refused, match=r"base.model has no chat template.*Type data\.template=chatml"):
        run(*base, folder="none")
    run(*base, "data.template=chatml", folder="chats")
    exported = AutoTokenizer.from_pretrained(tmp_path / "chats" / "model")
    before = AutoTokenizer.from_pretrained(tmp_path / "base" / "model")
    generation = json.loads((tmp_path / "chats" / "model" / "generation_config.json").read_text())
    assert exported.chat_template == CHATML and len(exported) == len(before) + 2
    end = exported.convert_tokens_to_ids("<|im_end|>")
    assert generation["eos_token_id"] == end or end in generation["eos_token_id"]
