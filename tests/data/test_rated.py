"""Rows of rated answers: each answer is read once, with its rating and a mismatched row, which has the same prompt and
the answer to another prompt.

The expected rows are written by hand, and compared token by token.
"""

import re

import numpy as np
import pytest
import torch

from documents import split
from lowmem.data import pairs, rated
from lowmem.data.loader import IGNORED, Share, ValidationLoader
from lowmem.data.packing import FILLER, NothingToLearn
from lowmem.data.rated import RatedAnswers
from lowmem.data.sources.preference import Preference
from lowmem.data.token_store import NO_TOKENS, Twice
from lowmem.system.errors import Refused

SEQ_LEN = 24
# (index of the prompt, tokens in the prompt, in the desirable answer, in the undesirable answer)
RECORDS = [(0, 2, 3, 4), (1, 3, 2, 0), (1, 3, 0, 5), (2, 1, 0, 3), (0, 2, 4, 0), (0, 2, 6, 2)]
UNITS = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (0, 4), (0, 6), (0, 2)]  # (index of the prompt, tokens in the answer)
DESIRABLE = [True, False, True, False, False, True, True, False]
OTHERS = [2, 2, 4, 4, 5, 2, 2, 2]  # index of the next unit with another prompt (wraps around)
PROMPTS = {0: [900, 901], 1: [910, 911, 912], 2: [920]}


def drawn():
    """Returns (split of RECORDS whose answers have consecutive token ids, [tokens of the answer of each unit])."""
    texts, masks, answers, at = [], [], [], 1
    for prompt, _, *lengths in RECORDS:
        for length in lengths:
            answer = list(range(at, at + length))
            texts.append(np.array(PROMPTS[prompt] + answer if length else [], int))
            masks.append(np.arange(len(texts[-1])) >= len(PROMPTS[prompt]))
            answers += [answer] * (length > 0)
            at += length
    return split(*texts, learned=masks), answers


def made(documents=None, seq_len=SEQ_LEN, too_long="drop", name="train"):
    return RatedAnswers(drawn()[0] if documents is None else documents, seq_len, too_long, name)


def read(ids, labels):
    """Returns the tokens of a row (its inputs up to the last learned label, and this label), and its learned labels."""
    learned = labels != IGNORED
    return [*ids[: int(learned.nonzero().max()) + 1].tolist(), int(labels[learned][-1])], labels[learned].tolist()


def check(batch, units):
    answers = drawn()[1]
    for row, unit in enumerate(units):
        prompt = PROMPTS[UNITS[unit][0]]
        assert read(batch.input_ids[row], batch.labels[row]) == (prompt + answers[unit], answers[unit])
        other = answers[OTHERS[unit]]
        assert read(batch.mismatched_ids[row], batch.mismatched_labels[row]) == (prompt + other, other)
        assert batch.desirable[row] == DESIRABLE[unit] and batch.lengths[row] == len(answers[unit])
        assert batch.mismatched.lengths[row] == len(other)


def test_every_rated_answer_is_read_once_with_its_rating_and_a_mismatched_row():
    rows = made()
    rows.reference = np.arange(2.0 * len(rows)).reshape(-1, 2)
    units = np.random.default_rng(0).permutation(len(rows))
    batch = rows.micro_batch(units)
    assert len(rows) == rows.unit_count == batch.weight == batch.mismatched.weight == len(UNITS)
    check(batch, units)
    assert np.array_equal(torch.cat([batch.reference, batch.mismatched.reference], 1), rows.reference[units])
    assert rows.report["documents"] == len(UNITS) and rows.report["nothing_to_learn"] == 0


@pytest.mark.wrong
def test_wrong_variant_that_mismatches_an_answer_of_the_same_prompt_fails_the_row_test(monkeypatch):
    """The deliberately wrong variant takes the answer of the next unit, even if this unit has the same prompt."""
    monkeypatch.setattr(RatedAnswers, "_next_prompt", lambda self, unit: (unit + 1) % len(self))
    with pytest.raises(AssertionError):
        test_every_rated_answer_is_read_once_with_its_rating_and_a_mismatched_row()


def test_mismatched_rows_do_not_depend_on_the_order_of_access():
    for order in (range(8), reversed(range(8)), (6, 0, 7, 3, 5, 1, 2, 4)):
        rows = made()
        for unit in order:
            assert rows._next_prompt(unit) == OTHERS[unit]


def test_rated_rows_do_not_depend_on_the_other_rows_of_the_batch():
    rows = made()
    alone, beside = rows.micro_batch(np.array([3])), rows.micro_batch(np.array([6, 3]))
    fill = {"input_ids": FILLER, "labels": IGNORED, "mismatched_ids": FILLER, "mismatched_labels": IGNORED}
    for name, tensor in alone.tensors.items():
        other, width = beside.tensors[name][1:], min(tensor.shape[1], beside.tensors[name].shape[1])
        assert torch.equal(other[:, :width], tensor[:, :width])
        assert all((left[:, width:] == fill.get(name)).all() for left in (other, tensor) if left.shape[1] > width)


def test_three_devices_read_every_rated_answer_once_and_one_without_rows_gets_weight_0():
    rows, found = made(), 0
    shares = [ValidationLoader(rows, Share(1, rank, 3), len(rows)) for rank in range(3)]
    for number, batches in enumerate(zip(*shares, strict=True)):
        for rank, batch in enumerate(batches):
            unit = 3 * number + rank
            assert batch.weight == batch.mismatched.weight == int(unit < len(rows))
            check(batch, [unit] if batch.weight else [])
            found += batch.weight
    assert found == len(UNITS) and batches[-1].learned_tokens == batches[-1].mismatched.learned_tokens == 0


def test_each_too_long_answer_of_a_rated_pair_is_dropped_cut_or_refused_independently():
    dropped = made(seq_len=7)
    assert len(dropped) == 6 and dropped.report["too_long"] == 2
    assert dropped.desirable[:, 0].tolist() == [True, False, True, False, True, False]
    cut, answers = made(seq_len=4, too_long="cut"), drawn()[1]
    batch = cut.micro_batch(np.arange(len(cut)))
    assert len(cut) == len(UNITS) and cut.report["cut"] == 6 and batch.input_ids.shape[1] == 4
    for row, other in enumerate(OTHERS):
        prompt, before = PROMPTS[UNITS[row][0]], PROMPTS[UNITS[other][0]]
        answer = answers[other][: 5 - len(before)]  # the part of the answer that fits in the row of `other`
        tokens = (prompt + answer)[:5]
        assert read(batch.mismatched_ids[row], batch.mismatched_labels[row]) == (tokens, tokens[len(prompt) :])
    with pytest.raises(
        Refused, match=r"train split has 2 answers longer than seq_len=7 \(of 8\), the longest with 8 tokens"
    ):
        made(seq_len=7, too_long="refuse")
    with pytest.raises(NothingToLearn):
        made(seq_len=1)


def test_split_whose_rated_answers_all_have_the_same_prompt_is_refused():
    texts = [np.array([5, 6, at]) for at in (7, 8, 9, 10)]
    same = split(*texts, learned=[np.array([False, False, True])] * 4)
    with pytest.raises(
        Refused, match=r"the train split has 4 answers but only one prompt.*Add records with other prompts"
    ):
        made(same)
    with pytest.raises(Refused, match=r"the val split has 4 answers but only one prompt.*larger data.val_fraction="):
        made(same, name="val")


def test_empty_side_of_a_rated_answer_is_not_counted_as_a_duplicate():
    twice = Twice()
    for document in (NO_TOKENS, b"a", b"b"):
        twice.held_out(document)
    for document in (NO_TOKENS, b"a"):
        twice.trained_on(document)
    twice.check()  # one of two validation documents is also a training document, which is accepted
    twice.trained_on(b"b")
    with pytest.raises(Refused, match="2 of 2 distinct"):
        twice.check()


def test_preference_key_that_names_the_field_of_another_key_or_messages_null_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    for key, name, match in (
        ("completion", "prompt", "data.completion names this field, too"),
        ("messages", None, "data.messages=null: type data.messages=<a field>"),
    ):
        with pytest.raises(Refused, match=match):
            Preference(str(tmp_path / "a.jsonl"), **{key: name})


def test_mismatched_row_without_a_prompt_keeps_its_own_first_token():
    """No token predicts the first token of a row, so the first token is not a label."""
    texts = [np.array([5, 6, 7]), np.array([8, 9])]
    batch = made(split(*texts, learned=[np.ones(3, bool), np.ones(2, bool)])).micro_batch(np.arange(2))
    assert read(batch.mismatched_ids[0], batch.mismatched_labels[0]) == ([5, 9], [9])
    assert read(batch.mismatched_ids[1], batch.mismatched_labels[1]) == ([8, 6, 7], [6, 7])


@pytest.mark.parametrize("packing", ["padded", "documents"])
def test_pair_rows_from_single_rated_answers_are_refused(packing):
    with pytest.raises(Refused, match=r"val split has 4 records with a single rated answer .of 6..*Type loss=kto"):
        pairs.rows(drawn()[0], SEQ_LEN, packing, "drop", "val")


@pytest.mark.parametrize(
    ("name", "good", "told"),
    [
        (
            "train",
            True,
            "train: all answers are desirable and none are undesirable, so the loss has nothing to contr",
        ),
        ("train", False, "train: all answers are undesirable and none are desirable, so .* Check data.label="),
        (
            "val",
            True,
            r"val: all answers are desirable.*metrics of the other kind stay empty.*larger data.val_fraction=",
        ),
    ],
)
def test_answers_that_are_all_desirable_or_all_undesirable_are_reported_with_advice(caplog, name, good, told):
    answers = [np.array([number, 9]) for number in (5, 6)]
    sides = [side for answer in answers for side in ((answer, answer[:0]) if good else (answer[:0], answer))]
    documents = split(*sides, learned=[np.arange(len(side)) > 0 for side in sides])
    rated.rows(documents, SEQ_LEN, "padded", "drop", name)
    assert re.match(told, caplog.messages[-1]) and caplog.records[-1].levelname == "WARNING"
    caplog.clear()
    rated.rows(drawn()[0], SEQ_LEN, "padded", "drop", name)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_rated_answers_with_packing_documents_are_refused():
    for make in (
        lambda: rated.rows(drawn()[0], SEQ_LEN, "documents", "drop", "val"),
        lambda: rated.rows_class("documents"),
    ):
        with pytest.raises(Refused, match=r"data\.packing=documents: rated answers must be padded.*=padded"):
            make()


def test_planner_example_of_rated_answers_has_the_tensor_names_and_dtypes_of_real_rows_at_full_width():
    rows = made()
    rows.reference = np.zeros((len(rows), 2))
    batch, example = rows.micro_batch(np.arange(3)), RatedAnswers.example(3, SEQ_LEN)
    assert batch.tensors.keys() == example.tensors.keys()
    for name, tensor in example.tensors.items():
        assert tensor.dtype == batch.tensors[name].dtype and len(tensor) == 3, name
        assert tensor.shape[1] == (SEQ_LEN if batch.tensors[name].shape[1] > 1 else 1)
