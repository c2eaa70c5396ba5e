"""Tests the samples of each evaluation: they equal texts that are generated with the exported model and transformers,
and do not change training or peak memory."""

import json
import shlex
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT
from lowmem.config.typed_lines import in_shell
from lowmem.data.loader import MicroBatch
from lowmem.data.sources import jsonl
from lowmem.report import sample
from lowmem.system.errors import Refused
from lowmem.training import build
from same import last, same

DRAWS = ("model.architecture.resid_pdrop=0.2", "val_every=2", "save_every=2", "max_steps=4", "log_every=4")
PROMPTS = "sample_prompts=['def return','class']"


def rows(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def weights(run):
    return last(run)["state_dict"]


def test_greedy_samples_equal_decoding_with_the_exported_model_also_after_a_resume(fit):
    lines = (*DRAWS, PROMPTS, "sample_tokens=6")
    _, run = fit(*lines)
    assert [(row["step"], row["prompt"]) for row in rows(run)] == [
        (n, p) for n in (2, 4) for p in ("def return", "class")
    ]
    model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for row in rows(run)[2:]:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        for _ in range(6):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert sample.printable(tokenizer.decode(ids[0])) == row["prompt"] + row["greedy"]
    whole = rows(run)
    fit(*lines, f"resume={run / 'checkpoints' / 'step-00000002.ckpt'}")
    assert rows(run) == whole  # earlier samples stay, and samples after the resumed step are written again


def test_sampling_does_not_change_training(fit, monkeypatch):
    plain = weights(fit(*DRAWS, folder="plain")[1])
    assert same(weights(fit(*DRAWS, "sample_tokens=8", folder="sampled")[1]), plain)
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda *_: nullcontext()
    )  # wrong on purpose: sampling advances the random state of training
    assert not same(weights(fit(*DRAWS, "sample_tokens=8", folder="wrong")[1]), plain)


@pytest.mark.rows("precision=bf16-master*")
@pytest.mark.parametrize(
    "technique",
    [
        (),
        ("gradient_checkpointing=offload", "loss=chunked", "optim=sgd", "batch_size=1"),
        ("precision=bf16-master", "gradient_checkpointing=every_layer", "loss=chunked", "batch_size=1"),
        ("adapter=lora", "gradient_checkpointing=every_layer", "loss=chunked", "batch_size=1"),
        (
            "adapter=qlora",
            "model.architecture.n_embd=64",
            "gradient_checkpointing=every_layer",
            "loss=chunked",
            "batch_size=1",
        ),
    ],
    ids=" ".join,
)
def test_evaluation_with_samples_needs_no_more_memory_than_training(fit, technique):
    longest = ("seq_len=64", "sample_tokens=32", f"sample_prompts=['{'def return ' * 40}']", "val_sequences=1")
    summary, run = fit("max_steps=1", *longest, *technique)
    peaks = {phase: sizes["device"] for phase, sizes in summary["peak_bytes_by_phase"].items() if "device" in sizes}
    assert rows(run)[0]["greedy"] and peaks["evaluation"] <= max(peaks["forward"], peaks["backward"], peaks["step"])


def test_peak_memory_of_an_evaluation_includes_the_generation_of_samples(fit):
    def peak(*more):
        summary = fit("max_steps=1", "val_sequences=1", "batch_size=1", "seq_len=4", "loss=chunked", *more)[0]
        return summary["peak_bytes_by_phase"]["evaluation"]["device"]

    held = []

    def hoards(*_, **__):
        held.append(torch.zeros(1 << 20))
        return ""

    plain = peak()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sample.TextGenerator, "continuation", hoards)
        assert peak("sample_tokens=2") >= 2 * held[0].nbytes > 2 * plain


def test_samples_are_logged_to_tensorboard_as_text_and_to_wandb_as_a_table():
    texts, tables = [], []
    board = TensorBoardLogger.__new__(TensorBoardLogger)
    board._experiment = SimpleNamespace(add_text=lambda *text: texts.append(text))
    wandb = SimpleNamespace(log_table=lambda *table, step: tables.append((*table, step)))
    for step in (2, 4):
        sample.send(
            [{"step": step, "prompt": "a", "greedy": "b", "sampled": "c"}], [board, wandb, SimpleNamespace()], step
        )
    assert texts == [("samples", "a**b**\n\n*drawn:* c", step) for step in (2, 4)]
    assert tables == [
        ("samples", ["step", "prompt", "greedy", "sampled"], [[step, "a", "b", "c"]], step) for step in (2, 4)
    ]


def test_sample_prompts_are_read_from_a_list_or_a_file_and_invalid_ones_are_refused(tmp_path):
    file, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    file.write_text("one\n\n two \n")
    said = [{"role": "user", "content": "hi"}]
    records.write_text("\n".join(map(json.dumps, ["one", {"prompt": "two"}, {"messages": said}])))
    assert sample.prompts(["a", "b"]) == ["a", "b"]
    assert sample.prompts(str(file)) == ["one", " two "]
    assert sample.prompts(str(records)) == ["one", "two", said]
    wrong = {
        "a.jsonl": "{",
        "b.jsonl": '{"text": "x"}',
        "c.jsonl": '{"messages": []}',
        "d.jsonl": "7",
        "e.txt": "",
        "f.txt": None,
    }
    for name, content in wrong.items():
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(Refused, match=r"sample_prompts"):
            sample.prompts(str(tmp_path / name))
    for given in ([1], [""], [[]], [[{"role": "user"}]], []):
        with pytest.raises(Refused, match=r"sample_prompts"):
            sample.prompts(given)


SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\r"  # where str.splitlines ends a line


def test_sample_prompt_files_are_split_only_at_line_feeds(tmp_path):
    said = [{"role": "user", "content": f"a{SEPARATORS[:3]}b"}]
    records = [{"prompt": f"one{SEPARATORS[:3]}two"}, {"messages": said}]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    texts = [f"one{SEPARATORS}two", " three "]
    for name, content in (("prompts.jsonl", lines), ("prompts.txt", texts)):
        for mark, end in (("", "\n"), ("\ufeff", "\r\n")):
            (tmp_path / name).write_bytes((mark + end.join([*content, ""])).encode())
            expected = texts if name == "prompts.txt" else [records[0]["prompt"], said]
            assert sample.prompts(str(tmp_path / name)) == expected
    read = [record.fields for record in jsonl.lines(tmp_path / "prompts.jsonl")]
    assert read == records


def test_invalid_json_line_of_a_prompt_file_is_named(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(Refused, match=r"sample_prompts: prompts.jsonl, line 3: .* JSON .*\. Fix this line\."):
        sample.prompts(str(tmp_path / "prompts.jsonl"))


def test_default_sample_prompt_is_the_beginning_of_the_validation_data():
    ids, none = torch.arange(20)[None], -100
    text = ids + 1
    assert sample.beginning(MicroBatch(ids, text)).tolist() == [list(range(8))]
    chat = torch.where(ids < 11, none, text)
    assert sample.beginning(MicroBatch(ids, chat)).tolist() == [list(range(12))]  # all tokens before the answer


CHAT = (
    *("data=chat", f"data.path={ROOT / 'examples' / 'chat.jsonl'}", "model.architecture.vocab_size=400"),
    *("model.architecture.n_positions=512", "seq_len=128"),
)
LLAMA_2 = (
    "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content }}{% endfor %}"
)
LLAMA_2 += "{% if add_generation_prompt %} {% endif %}"


def test_suggested_prompt_of_chat_data_is_a_first_user_message(config):
    """The prompt comes from the validation split, and the conversation begins with a system message."""
    tokens = build.data(config(*CHAT)).tokens
    asked = {
        next(one["content"] for one in json.loads(line)["messages"] if one["role"] == "user")
        for line in (ROOT / "examples" / "chat.jsonl").read_text().splitlines()
    }
    prompt = sample.example(tokens)
    assert any(question.startswith(prompt) for question in asked) and len(prompt) > 10
    start = tokens.val.ids[: tokens.val.ends[0]].tolist()
    assert prompt in tokens.tokenizer.decode(start) and "<|" not in prompt
    tokens.tokenizer.chat_template = LLAMA_2
    turn = sample.user_turn(tokens.tokenizer)
    assert turn.header == "[INST] " and turn.footer.startswith(" [/INST]")


def test_suggested_prompt_of_text_data_is_the_beginning_of_a_text(config, text_folder):
    tokens = build.data(config("data=text", f"data.path={text_folder}")).tokens
    prompt = sample.example(tokens)
    first = tokens.tokenizer.decode(tokens.val.ids[: tokens.val.ends[0]].tolist())
    assert prompt and prompt in " ".join(first.split()) and len(prompt) <= 40


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""Draws\tit. \n' + "words " * 20, "Draws it. words words words words words"),
        ("x" * 90, "x" * 40),
        ("It's $5; (a, b): {c}?", "It's $5; (a, b): {c}?"),
        (" \x00\n ", ""),
    ],
)
def test_suggested_prompt_is_shortened_and_quoted_for_the_shell(text, words, config):
    assert sample._first_words(text) == words
    assert shlex.split(in_shell("prompt", words)) == [f"prompt={words}"]


def test_suggested_prompt_skips_the_empty_document_of_a_rated_answer(config, tmp_path):
    """A rated answer is stored as two documents, one for each rating. The document of the other rating is empty."""
    lines = [{"prompt": f"say {number}", "completion": " so", "label": number % 2 == 0} for number in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = config("data=preference", "loss=kto", f"data.path={tmp_path / 'a.jsonl'}", "seq_len=16")
    tokens = build.data(run).tokens
    empty = [np.diff(split.ends, prepend=0).min() == 0 for split in (tokens.val, tokens.train)]
    assert all(empty) and sample.example(tokens).startswith("say")
