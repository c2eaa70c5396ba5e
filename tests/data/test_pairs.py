"""Rows of pairs: every pair is read once, complete and on one device, and each label belongs to its answer.

Rows are compared with the drawn answers token by token.
"""

import numpy as np
import pytest
import torch

from documents import split
from lowmem.data import pairs
from lowmem.data.loader import IGNORED, Share, ValidationLoader
from lowmem.data.packing import FILLER, NothingToLearn
from lowmem.data.pairs import PackedPairs, PaddedPairs, PairBatch
from lowmem.model.packed_attention import separate
from lowmem.system.errors import Refused
from lowmem.techniques.loss.preference import DPO
from networks import VOCABULARY, network

SEQ_LEN, COUNT = 40, 11


def drawn(count=COUNT, longest=9):
    """Returns (split of pairs whose answers have consecutive token ids, [(tokens of one answer, tokens of the
    other)])."""
    draw, at, texts, masks, answers = np.random.default_rng(1), 1, [], [], []
    for pair in range(count):
        prompt = np.full(draw.integers(1, 4), VOCABULARY - 1 - pair)  # both answers have the same prompt
        for length in draw.integers(1, longest, 2).tolist():
            answer = np.arange(at, at + length)
            texts.append(np.concatenate([prompt, answer]))
            masks.append(np.arange(len(texts[-1])) >= len(prompt))
            answers.append(tuple(answer.tolist()))
            at += length
    assert at < VOCABULARY - count
    return split(*texts, learned=masks), list(zip(answers[::2], answers[1::2], strict=True))


def answers_in(batch):
    """Returns (learned tokens of one answer, learned tokens of the other) for each pair of the batch that is not
    empty."""
    counts = batch.labels != IGNORED
    lengths = batch.lengths.flatten().tolist()
    each = [tuple(batch.labels[counts & (batch.answers == number)].tolist()) for number in range(len(lengths))]
    assert [len(one) for one in each] == lengths and len(each) % 2 == 0
    return [both for both in zip(each[::2], each[1::2], strict=True) if any(both)]


KINDS = {"padded": PaddedPairs, "documents": PackedPairs}
both_kinds = pytest.mark.parametrize("kind", KINDS)


@both_kinds
def test_every_pair_is_read_once_with_its_lengths_and_reference_log_probabilities(kind):
    documents, expected = drawn()
    made = KINDS[kind](documents, SEQ_LEN, "drop", "train")
    made.reference = np.arange(2.0 * made.unit_count).reshape(-1, 2) + 1
    indices = np.random.default_rng(0).permutation(len(made))
    batch, order = made.micro_batch(indices), made.units_of(indices)
    assert sorted(order) == list(range(COUNT)) and batch.weight == made.unit_count == COUNT
    assert answers_in(batch) == [expected[pair] for pair in order]
    assert np.array_equal(batch.reference[batch.lengths > 0].view(-1, 2), made.reference[order])


def test_packed_rows_hold_complete_pairs_followed_by_filler():
    documents, expected = drawn()
    made = PackedPairs(documents, SEQ_LEN, "drop", "train")
    batch, texts = made.micro_batch(np.arange(len(made))), np.split(documents.ids, documents.ends[:-1])
    in_a_row = batch.lengths.shape[1]
    assert len({(row > 0).sum().item() for row in batch.lengths}) > 1  # some rows have fewer pairs than others
    for row in range(len(made)):
        at, ids, places = 0, batch.input_ids[row], batch.position_ids[row]
        for number, one in enumerate(n for pair in made.units(row) for n in (2 * pair, 2 * pair + 1)):
            here = slice(at, at + len(texts[one]))
            assert ids[here].tolist() == texts[one].tolist() and places[here].tolist() == list(range(len(texts[one])))
            for token in range(here.start, here.stop):
                if batch.labels[row, token] != IGNORED:
                    assert batch.answers[row, token] == row * in_a_row + number
                    assert batch.labels[row, token].item() in expected[one // 2][one % 2]
            at = here.stop
        assert places[at:].tolist() == list(range(SEQ_LEN - at))
        assert (ids[at:] == FILLER).all() and (batch.labels[row, at:] == IGNORED).all()


@pytest.mark.wrong
def test_wrong_variant_with_answers_shifted_by_one_token_fails_the_packed_pairs_test(monkeypatch):
    """The deliberately wrong variant gives each token the answer number of the token before it."""
    late = property(lambda self, right=PairBatch.answers: right.fget(self).roll(1, 1))
    monkeypatch.setattr(PairBatch, "answers", late)
    with pytest.raises(AssertionError):
        test_packed_rows_hold_complete_pairs_followed_by_filler()


@both_kinds
def test_no_pair_is_divided_over_devices(kind):
    documents, expected = drawn(10)
    found, made = [], KINDS[kind](documents, SEQ_LEN, "drop", "train")
    shares = [ValidationLoader(made, Share(2, rank, 3), len(made)) for rank in range(3)]
    for batches in zip(*shares, strict=True):
        found += [pair for batch in batches for pair in answers_in(batch)]
        assert [batch.weight for batch in batches] == [len(answers_in(batch)) for batch in batches]
    assert sorted(found) == sorted(expected)
    assert batches[-1].weight == 0 and batches[-1].learned_tokens == 0  # a device without pairs gets an empty batch


@pytest.mark.wrong
def test_wrong_variant_that_divides_a_pair_over_devices_fails_the_device_test(monkeypatch):
    monkeypatch.setattr(PairBatch, "ROWS", 1)
    with pytest.raises(AssertionError):
        test_no_pair_is_divided_over_devices("padded")


def test_empty_pair_batch_has_the_rows_of_one_pair_and_weight_0():
    for kind in KINDS.values():
        batch = kind(drawn()[0], SEQ_LEN, "drop", "train").micro_batch(np.arange(3))
        assert len(batch.nothing.input_ids) == batch.ROWS == len(batch.nothing.lengths)
        assert (batch.nothing.weight, batch.nothing.learned_tokens) == (0, 0) != (batch.weight, batch.learned_tokens)


@both_kinds
def test_rows_of_a_pair_do_not_depend_on_the_other_rows_of_the_batch(kind):
    made = KINDS[kind](drawn()[0], SEQ_LEN, "drop", "train")
    alone, beside = made.micro_batch(np.array([3])), made.micro_batch(np.array([1, 3]))
    fill = {"input_ids": FILLER, "labels": IGNORED, "lengths": 0, "real": False}
    for name, one in alone.tensors.items():
        if name == "position_ids":
            assert torch.equal(beside.position_ids[1:], one)
            continue
        rows, width = beside.tensors[name][len(one) :], min(one.shape[1], beside.tensors[name].shape[1])
        assert torch.equal(rows[:, :width], one[:, :width])
        assert all((left[:, width:] == fill[name]).all() for left in (rows, one))


@pytest.mark.kernels
def test_padded_and_packed_pairs_have_equal_log_probabilities():
    documents, expected = drawn()
    model, loss, found = network(n_positions=SEQ_LEN), DPO(), {}
    for name, kind in KINDS.items():
        made = kind(documents, SEQ_LEN, "drop", "train")
        if name == "documents":
            separate(model)
        with torch.no_grad():
            answers, real = loss.answers(model, made.micro_batch(np.arange(len(made))))
        assert real.sum() == COUNT
        found[name] = answers.logp[real][np.argsort(made.units_of(np.arange(len(made))))]
        assert answers.tokens[real].sum() == sum(len(one) for both in expected for one in both)
    torch.testing.assert_close(found["padded"], found["documents"], rtol=0, atol=1e-5)


def of_lengths(*lengths):
    """Returns a split of pairs whose documents have these lengths. The last four tokens of a document are learned, or
    all tokens of a shorter document."""
    texts = [100 * number + np.arange(length) for number, length in enumerate(lengths, 1)]
    return split(*texts, learned=[np.arange(length) >= length - 4 for length in lengths])


@pytest.mark.parametrize(
    ("kind", "how", "kept", "report"),
    [
        ("padded", "drop", [(5, 6), (3, 20)], {"too_long": 2, "cut": 0, "nothing_to_learn": 0}),
        ("documents", "drop", [(5, 6), (3, 20)], {"too_long": 2, "cut": 0, "nothing_to_learn": 0}),
        ("padded", "cut", [(5, 6), (3, 20), (7, 24)], {"too_long": 0, "cut": 2, "nothing_to_learn": 1}),
        ("documents", "cut", [(5, 6), (3, 20)], {"too_long": 0, "cut": 2, "nothing_to_learn": 2}),
    ],
)
def test_too_long_pairs_are_dropped_or_cut_and_counted(kind, how, kept, report):
    made = KINDS[kind](of_lengths(5, 6, 3, 20, 7, 26, 9, 60), 24, how, "train")
    assert made.pieces.lengths.reshape(-1, 2).tolist() == [list(both) for both in kept]
    assert report.items() <= made.report.items() and made.report["documents"] == len(kept)
    assert made.micro_batch(np.arange(len(made))).weight == len(kept)


def test_pairs_are_refused_with_too_long_refuse_or_if_all_are_dropped_or_with_packing_joined():
    refused = r"val split has 2 pairs longer than seq_len=24 \(of 3\), the longest with {} tokens \({}\)"
    for kind, *words in (
        ("padded", 60, "prompt and answer"),
        ("documents", 69, "both answers, each with its prompt"),
    ):
        with pytest.raises(Refused, match=refused.format(*words)):
            pairs.rows(of_lengths(5, 6, 7, 26, 9, 60), 24, kind, "refuse", "val")
        with pytest.raises(NothingToLearn, match=r"no pair of the val split has .* in each of its answers"):
            pairs.rows(of_lengths(7, 26), 4, kind, "drop", "val")
    with pytest.raises(Refused, match=r"data\.packing=joined: pairs support padded and documents only"):
        pairs.rows(of_lengths(5, 6), 24, "joined", "drop", "val")
