"""Tests that rows and prompts have the tokens that a call of the tokenizer returns, and that the exported tokenizer
returns the same tokens for a text."""

import json
import logging
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizer

from lowmem.data import token_store
from lowmem.data.bits_per_byte import bits_per_byte
from lowmem.data.loader import IGNORED, Share, ValidationLoader
from lowmem.data.mix import Mix
from lowmem.data.opening import RowSettings
from lowmem.data.packing import Joined
from lowmem.data.sources import framing, jsonl, pieces, text_files
from lowmem.data.sources.bad_record import BadRecord
from lowmem.data.sources.preference import Preference
from lowmem.data.sources.records import Completion, Text
from lowmem.model.generation import end_tokens, prompt_ids
from lowmem.system.errors import Refused
from lowmem.training.task import lines_of_older
from same import last, same
from tokenizers_of_all_kinds import AROUND, BOS, EOS, IDS, MODELS, PRE_TOKENIZERS, tokenizer

WORDS = (
    "Q:",
    "what",
    "the",
    "cat",
    "42",
    " ",
    "  ",
    "\n",
    "\t",
    ".",
    "a",
    "é",
    "Größe",
    "数据",
    "🙂",
    "A:",
    "</",
    "s>",
)
shared = cache(tokenizer)  # for tests that do not change the tokenizer
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map("".join)
VISIBLE = TEXTS.filter(str.strip)
KINDS = st.tuples(st.sampled_from(MODELS), st.sampled_from([*PRE_TOKENIZERS]))
# Tokenizers for which the decoded tokens of every text equal the text.
EXACT = [("bpe", "byte level"), ("bpe", "sequence"), ("bpe with bytes", "none"), ("bpe with bytes", "split")]


def encoded(made, prompt, completion, **how):
    (document,) = Completion("p", "c", **how).encode(made, [{"p": prompt, "c": completion}])
    return document


def decoded(made, ids):
    return made.decode(list(ids), clean_up_tokenization_spaces=False)


def own(made, text):
    return made(text)["input_ids"]


def check_text(made, around, text):
    """Checks that a row has the tokens of the tokenizer's call and exactly one end token, that its begin tokens are not
    learned, and that `prompt_ids` returns the same tokens without the end token."""
    _, begin, end = AROUND[around]
    (row,) = Text("text").encode(made, [{"text": text}])
    assert list(row.ids) == own(made, text) + [IDS[EOS]] * (not end)
    learned = np.ones(len(row.ids), bool) if row.learned is None else row.learned
    assert learned.tolist() == [index >= len(begin) for index in range(len(row.ids))]
    assert row.text_bytes == len(text.encode())
    assert prompt_ids(made, text, False)[0].tolist() == own(made, text)[: len(row.ids) - 1]


def check_answer(made, around, prompt, completion, never_refused=False):
    """Checks that a row begins with the tokens of its prompt, ends with its only end token, and decodes to the two
    texts or to the decoded tokens of the joined text. A `BadRecord` is accepted, unless `never_refused`, if the tokens
    of the joined text do not begin with the tokens of the prompt, or if the completion adds no token."""
    _, begin, end = AROUND[around]
    row, whole = encoded(made, prompt, completion), own(made, prompt + completion)
    asked = framing.prompt_ids(made, prompt)
    behind = len(whole) - len(end)
    if isinstance(row, BadRecord):
        assert not never_refused and (whole[: len(asked)] != asked or len(whole[:behind]) == len(asked))
        return
    ids = row.ids.tolist()
    assert ids[: len(asked)] == asked and ids[-1] == IDS[(end or [EOS])[0]] and ids.count(ids[-1]) == 1
    assert row.learned.tolist() == [index >= len(asked) for index in range(len(ids))]
    assert row.text_bytes == len((prompt + completion).encode())
    if whole[: len(asked)] == asked and behind > len(asked):
        assert ids[:-1] == whole[:behind]
    text = decoded(made, ids[len(begin) : -1])
    assert text in (prompt + completion, decoded(made, whole[len(begin) : behind]))


@pytest.mark.matrix
@settings(max_examples=400, deadline=None, derandomize=True)
@given(kind=KINDS, around=st.sampled_from([*AROUND]), lower=st.booleans(), text=VISIBLE.filter(lambda t: EOS not in t))
def test_text_row_equals_tokenizer_call_with_one_end_token(kind, around, lower, text):
    made = shared(*kind, around, lower)
    if own(made, text) != own(made, ""):  # a text of white space may have no token
        check_text(made, around, text)


@pytest.mark.matrix
@settings(max_examples=400, deadline=None, derandomize=True)
@given(kind=KINDS, around=st.sampled_from([*AROUND]), lower=st.booleans(), prompt=TEXTS, completion=VISIBLE)
def test_completion_row_begins_with_the_generation_prompt_and_decodes_to_both_texts(
    kind, around, lower, prompt, completion
):
    if EOS not in prompt and EOS not in completion:
        check_answer(shared(*kind, around, lower), around, prompt, completion)


@pytest.mark.parametrize("kind", EXACT, ids="-".join)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(prompt=st.text(max_size=8), completion=st.text(max_size=8).filter(str.strip))
def test_lossless_tokenizer_accepts_every_prompt_and_completion_without_changing_them(kind, prompt, completion):
    if "\0" not in prompt + completion:
        made = shared(*kind, "bos")
        check_answer(made, "bos", prompt, completion, never_refused=True)
        assert decoded(made, encoded(made, prompt, completion).ids[1:-1]) == prompt + completion


@pytest.mark.rows("*byte level-bos*", "*metaspace always-both*", "*white space-bert*")
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_text_and_completion_rows_have_the_tokens_of_the_call_of_every_kind_of_tokenizer(model, pre_tokenizer, around):
    made = tokenizer(model, pre_tokenizer, around)
    for prompt, completion in (("Q: what?\nA:", " 42"), ("Q: what?\nA: ", "42"), ("the c", "at sat"), ("", "the cat")):
        check_text(made, around, prompt + completion)
        check_answer(made, around, prompt, completion)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("texts", [("Q: what?\nA:", " 42"), ("Q: what?\nA: ", "42"), ("foo", "bar"), ("A:", "42 the")])
def test_metaspace_tokenizer_inserts_no_space_between_prompt_and_completion(scheme, texts):
    made = tokenizer("bpe with bytes", f"metaspace {scheme}", "bos")
    assert decoded(made, encoded(made, *texts).ids[1:-1]) == "".join(texts)


def test_prompt_and_completion_that_merge_in_one_token_are_refused_with_advice_to_move_white_space():
    made = tokenizer("wordlevel", "white space")
    bad = encoded(made, "the c", "at sat")
    assert isinstance(bad, BadRecord) and "'the c'" in str(bad) and "move white space" in str(bad)
    assert not isinstance(encoded(made, "the", " cat sat"), BadRecord)


def test_truncation_and_padding_stored_with_a_tokenizer_change_no_row(tmp_path):
    made = tokenizer("bpe", "byte level", "bos")
    plain = [list(row.ids) for row in Text("text").encode(made, [{"text": "the cat"}, {"text": "the cat sat on it"}])]
    made.backend_tokenizer.enable_truncation(3)
    made.backend_tokenizer.enable_padding(pad_id=IDS["<pad>"], pad_token="<pad>")
    made.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read.backend_tokenizer.truncation and read.backend_tokenizer.padding
    ids = pieces.ids_of(read, ["the cat", "the cat sat on it"])  # before any call of the tokenizer
    assert [list(row) for row in ids] == [row[1:-1] for row in plain]
    read = AutoTokenizer.from_pretrained(tmp_path)
    rows = Text("text").encode(read, [{"text": "the cat"}, {"text": "the cat sat on it"}])
    assert [list(row.ids) for row in rows] == plain


class Letters(PreTrainedTokenizer):
    """A tokenizer in pure Python with one token per letter."""

    def __init__(self, pattern, **names):
        self.letters = {letter: index for index, letter in enumerate("<>abc 42:")}
        super().__init__(special_tokens_pattern=pattern, bos_token="<s>", eos_token="</s>", unk_token="<", **names)

    vocab_size = property(lambda self: len(self.letters))

    def get_vocab(self):
        return self.letters | self.added_tokens_encoder

    def _tokenize(self, text):
        return [*text]

    def _convert_token_to_id(self, token):
        return self.letters.get(token, 0)

    def _convert_id_to_token(self, index):
        return "<>abc 42:"[index]


@pytest.mark.parametrize("pattern", ["none", "bos", "eos", "bos_eos"])
def test_rows_of_a_pure_python_tokenizer_have_the_tokens_of_its_call_and_one_end_token(pattern):
    made = Letters(pattern)
    assert not made.is_fast
    begin, end = [made.bos_token_id] * ("bos" in pattern), [made.eos_token_id] * ("eos" in pattern)
    (row,) = Text("text").encode(made, [{"text": "abc"}])
    assert list(row.ids) == own(made, "abc") + ([] if end else [made.eos_token_id])
    row = encoded(made, "ab:", " 42")
    assert row.ids.tolist() == own(made, "ab: 42") + ([] if end else [made.eos_token_id])
    assert row.learned.tolist() == [False] * (len(begin) + 3) + [True] * 4
    assert prompt_ids(made, "ab:", False)[0].tolist() == own(made, "ab:")[: len(begin) + 3]


def test_byte_tokenizer_with_its_own_end_token_ends_rows_once_and_prompts_without_it():
    made = ByT5Tokenizer()
    assert own(made, "A:")[-1] == made.eos_token_id
    row = encoded(made, "A:", " 42")
    assert row.ids.tolist() == own(made, "A: 42") and row.learned.tolist() == [False] * 2 + [True] * 4
    assert prompt_ids(made, "A:", False)[0].tolist() == own(made, "A:")[:-1]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("bos", [True, False])
def test_data_bos_sets_the_begin_token_of_the_tokenizer_call_and_of_its_export(bos, around, tmp_path):
    made, (_, begin, end) = tokenizer("bpe", "byte level", around), AROUND[around]
    source = text_files.Corpus("text", [], [], bos=bos)
    framing.dress(made, source)
    # the begin token of data.bos precedes [CLS]
    expected = [] if not bos else begin if BOS in begin else [BOS, *begin]
    text = made("the cat", add_special_tokens=False)["input_ids"]
    around_text = [IDS[one] for one in expected], [IDS[one] for one in end]
    assert own(made, "the cat") == [*around_text[0], *text, *around_text[1]]
    if expected != begin:
        assert made("the cat", "the cat")["input_ids"] == own(made, "the cat") * 2
    made.save_pretrained(tmp_path)
    assert own(AutoTokenizer.from_pretrained(tmp_path), "the cat") == own(made, "the cat")
    assert prompt_ids(made, "the cat", False)[0].tolist() == [*around_text[0], *text]


def test_data_bos_is_refused_if_the_tokenizer_cannot_apply_it():
    source = text_files.Corpus("text", [], [], bos=True)
    with pytest.raises(Refused, match=r"data.bos=true: .* has no begin-of-text token. Type data.bos=auto"):
        framing.dress(tokenizer("bpe", "byte level", bos_token=None), source)
    with pytest.raises(
        Refused, match=r"data.bos=true: .* does not allow changing its begin-of-text token. Type data.bos=auto"
    ):
        framing.dress(Letters("none"), source)


def test_data_bos_for_conversations_is_refused(tmp_path):
    file = tmp_path / "chat.jsonl"
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file.write_text(json.dumps({"messages": said}) + "\n")
    with pytest.raises(Refused, match=r"data.bos=true: the chat template renders"):
        jsonl.jsonl(path=str(file), pattern="*", val_fraction=0.5, messages="messages", bos=True)
    file.write_text(
        json.dumps({"chosen": said, "rejected": [*said[:1], {"role": "assistant", "content": "no"}]}) + "\n"
    )
    with pytest.raises(Refused, match=r"data.bos=false: the chat template renders"):
        Preference(str(file), prompt=None, bos=False).chat  # noqa: B018


def mixture(folder, **bos):
    """Returns a mixture of text sources.

    Args:
        bos: maps the name of each part to its data.bos.
    """
    for name in bos:
        (folder / f"{name}.txt").write_text("the cat sat on the mat\n" * 40)
    return Mix({name: text_files.text(str(folder / f"{name}.txt"), "*", 0.2, bos=value) for name, value in bos.items()})


def test_mixture_whose_parts_set_different_data_bos_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"data.parts: a and b have different values of data.bos"):
        mixture(tmp_path, a=True, b=False)


def test_data_bos_set_for_one_part_of_a_mixture_begins_the_rows_of_both_parts(tmp_path):
    made = tokenizer("bpe", "byte level")
    opened = mixture(tmp_path, a="auto", b=True).opened(RowSettings(tmp_path / "cache", 16, 0, made, []))
    assert [int(part.split.ids[0]) for part in opened.train.parts] == [IDS[BOS]] * 2


def corpus(tmp_path, made, **how):
    """Returns (source of three files, one of which is held out for validation; tokens of the source)."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("the cat sat on the mat\n" * (5 + number))
    source = text_files.text(str(tmp_path), "*.txt", 0.3, **how)
    return source, token_store.tokenize(source, tmp_path / "cache", 0, made)


def test_every_text_file_has_one_begin_and_end_token_and_begin_tokens_are_not_labels(tmp_path):
    made = tokenizer("bpe", "byte level", "both")
    source, tokens = corpus(tmp_path, made)
    documents = np.split(tokens.train.ids, tokens.train.ends[:-1])
    assert [document.tolist() for document in documents] == [own(made, file.read_text()) for file in source.train]
    labels = Joined(tokens.train, 7, "train").micro_batch(np.arange(len(tokens.train.ids) // 7)).labels
    assert IDS[BOS] not in labels and IDS[EOS] in labels and IGNORED in labels


def test_begin_and_end_tokens_do_not_count_as_text_in_bits_per_byte(tmp_path):
    made = tokenizer("bpe", "byte level", "bos")
    _, tokens = corpus(tmp_path, made)
    rows = Joined(tokens.val, 5, "val")
    nats = bits_per_byte(tokens, ValidationLoader(rows, Share(2), 100, ""))(1.0)
    row = rows.micro_batch(np.arange(len(rows)))
    ids = row.labels[row.labels != IGNORED].tolist()
    text = made.decode(ids, skip_special_tokens=True)
    assert nats == pytest.approx(len(ids) / len(text.encode()) / np.log(2))


def test_long_text_tokenized_in_pieces_has_one_begin_token(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 40)
    monkeypatch.setattr(pieces, "AROUND", 30)
    made = tokenizer("bpe", "byte level", "both")
    source, tokens = corpus(tmp_path, made)
    assert len([*pieces.pieces([source.train[0].read_text()], pieces.Cuts(made))]) > 1
    assert tokens.train.ids.tolist() == [index for file in source.train for index in own(made, file.read_text())]


def test_data_bos_is_part_of_the_token_cache_key(tmp_path):
    first = [corpus(tmp_path, tokenizer("bpe", "byte level"), bos=bos)[1].train.ids for bos in ("auto", True, "older")]
    assert [int(ids[0] == IDS[BOS]) for ids in first] == [0, 1, 0]
    assert len({*(tmp_path / "cache").iterdir()}) == 3


@pytest.mark.parametrize("around", ["nothing", "eos", "bert"])
def test_token_that_ends_a_row_and_the_end_token_of_the_model_both_end_generation(around):
    made = tokenizer("bpe", "byte level", around)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=77))
    assert encoded(made, "A:", " 42").ids[-1] in end_tokens(made, model) and 77 in end_tokens(made, model)


def test_rows_of_a_pair_begin_with_the_token_ids_of_their_prompt(tmp_path):
    made = tokenizer("bpe", "byte level", "bos")
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"Q: {i}?\nA:", "chosen": f" the {i}", "rejected": f" cat {i}"} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, pairs)))
    tokens = token_store.tokenize(Preference(str(file)), tmp_path / "cache", 0, made)
    for split in (tokens.train, tokens.val):
        starts = [0, *split.ends[:-1].tolist()]
        for start, stop in zip(starts, split.ends.tolist(), strict=True):
            ids, learned = split.ids[start:stop], split.learned(start, stop)
            prompt = decoded(made, ids[~learned][1:])
            assert ids[~learned].tolist() == own(made, prompt) and ids[-1] == IDS[EOS]
            assert ids[:-1].tolist() == own(made, prompt + decoded(made, ids[learned][:-1]))


def test_tokenizer_without_an_end_token_is_refused_for_answers_and_reported_for_texts(tmp_path, caplog):
    made = tokenizer("bpe", "byte level", eos_token=None)
    with pytest.raises(Refused, match=r"no end-of-text token, so the model would never learn to stop. Set"):
        encoded(made, "A:", " 42")
    (row,) = Text("text").encode(made, [{"text": "the cat"}])
    assert list(row.ids) == own(made, "the cat")
    with caplog.at_level(logging.INFO):
        framing.tell(made)
    assert "no end-of-text token, so nothing separates documents" in caplog.text


def test_tokenizer_that_alters_text_is_reported(caplog):
    with caplog.at_level(logging.INFO):
        framing.tell(tokenizer("bpe", "byte level"))
        assert not caplog.text
        framing.tell(tokenizer("wordpiece", "white space", lower=True))
    assert r"'One  two,\n\tThree.' becomes" in caplog.text


def test_data_bos_older_tokenizes_prompt_and_completion_apart_and_adds_no_begin_token():
    made = tokenizer("bpe", "metaspace always", "both")
    row = encoded(made, "Q: what?\nA:", " 42", bos="older")
    parts = [made(text, add_special_tokens=False)["input_ids"] for text in ("Q: what?\nA:", " 42")]
    assert row.ids.tolist() == [*parts[0], *parts[1], IDS[EOS]]
    assert row.learned.tolist() == [index >= len(parts[0]) for index in range(len(row.ids))]
    (row,) = Text("text", bos="older").encode(made, [{"text": "the cat"}])
    assert row.ids.tolist() == [*made("the cat", add_special_tokens=False)["input_ids"], IDS[EOS]]
    assert row.learned is None


def test_data_bos_older_is_set_only_by_a_checkpoint_of_an_earlier_version(config, small):
    of_earlier, of_today = SimpleNamespace(begin=None), SimpleNamespace(begin="[]")
    run = config()
    assert lines_of_older(run, of_earlier) == {"data.bos": "older"}
    assert lines_of_older(run, of_today) == lines_of_older(run, None) == {}
    assert lines_of_older(config("data.bos=true"), of_earlier) == {}
    parts = ("+data@data.parts.a=text", "data.parts.a.path=x", "+data@data.parts.b=chat", "data.parts.b.path=y")
    base = tuple(line for line in small if not line.startswith("data"))
    assert lines_of_older(config("data=mix", *parts, base=base), of_earlier) == {"data.parts.a.bos": "older"}
    assert lines_of_older(config("data=random", base=base), of_earlier) == {}


def test_run_without_begin_tokens_of_an_earlier_version_resumes_bit_exactly_and_refuses_another_data_bos(fit, tmp_path):
    tokenizer("bpe", "metaspace always", "bos").save_pretrained(tmp_path / "tokenizer")
    records = [{"p": f"Q: what is {i}?\nA:", "c": f" the cat {i}"} for i in range(40)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, records)))
    typed = ("data=jsonl", f"data.path={tmp_path / 'qa.jsonl'}", "data.prompt=p", "data.completion=c", "save_every=2")
    typed += (f"tokenizer={tmp_path / 'tokenizer'}", "model.architecture.vocab_size=512", "seq_len=64")
    _, earlier = fit(*typed, "data.bos=older", folder="earlier")  # writes checkpoints as earlier versions did
    resume = f"resume={earlier / 'checkpoints' / 'step-00000002.ckpt'}"
    _, resumed = fit(*typed, resume, folder="resumed")
    assert same(last(earlier)["state_dict"], last(resumed)["state_dict"])
    assert "begin" not in last(resumed)["lowmem"]
    with pytest.raises(Refused, match="a different order"):
        fit(*typed, resume, "data.bos=true", folder="other")
    _, today = fit(*typed, "max_steps=2", folder="today")
    assert last(today)["lowmem"]["begin"] == f"[{IDS[BOS]}]"
    with pytest.raises(Refused, match=r"texts began with the tokens \[0\] .*Type the data.bos= of that run"):
        fit(*typed, f"resume={today / 'checkpoints' / 'step-00000002.ckpt'}", "data.bos=false", folder="refused")


@pytest.mark.wrong
def test_planted_missing_or_second_begin_token_fails_check_text_and_check_answer(monkeypatch):
    real = framing.framing_of
    for wrong in ([], [IDS[BOS]] * 2):
        monkeypatch.setattr(
            "lowmem.data.sources.records.framing_of",
            lambda made, bos, wrong=wrong: real(made, bos)._replace(begin=wrong),
        )
        with pytest.raises(AssertionError):
            check_text(tokenizer("bpe", "byte level", "bos"), "bos", "the cat")
        with pytest.raises(AssertionError):
            check_answer(tokenizer("bpe", "byte level", "bos"), "bos", "the", " cat")
