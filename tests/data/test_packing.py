"""Tests rows of documents: every token that follows another in its document is a label exactly once, positions restart
at each document, and the order of rows depends on the seed alone (the order of padded rows also on the batch size)."""

from itertools import combinations, islice, pairwise

import numpy as np
import pytest
import torch

from documents import split
from lowmem.config.accumulation import fixed
from lowmem.data import packing
from lowmem.data.loader import IGNORED, Rows, Share, WindowLoader
from lowmem.data.packing import Documents, Joined, Padded, packed, rows, with_positions
from lowmem.system.errors import Refused

SEQ_LEN = 16


def texts(count=60, longest=40, seed=0):
    """Returns documents in which token j of document i is 1000 * i + j."""
    lengths = np.random.default_rng(seed).integers(1, longest, count)
    return [1000 * i + np.arange(length) for i, length in enumerate(lengths, start=1)]


def pairs(batch):
    """Returns (token, label) for every token that has a label."""
    counts = batch.labels != IGNORED
    return list(zip(batch.input_ids[counts].tolist(), batch.labels[counts].tolist(), strict=True))


def every(made: Rows):
    return made.micro_batch(np.arange(len(made)))


def following(documents):
    return [(int(a), int(b)) for document in documents for a, b in pairwise(document)]


@pytest.mark.parametrize("kind", ["documents", "padded"])
def test_every_next_token_inside_a_document_is_a_label_exactly_once(kind):
    """Some documents are longer than a row, and are cut into several rows."""
    made = rows(split(*texts()), SEQ_LEN, kind, "cut", "train")
    assert sorted(pairs(every(made))) == following(texts())


@pytest.mark.parametrize("kind", ["documents", "padded"])
def test_real_mask_is_true_for_document_tokens_and_false_for_filler(kind):
    batch = every(rows(split(*texts()), SEQ_LEN, kind, "cut", "train"))  # no token of a document has the filler's id
    assert not batch.real.all() and torch.equal(batch.real, batch.input_ids != packing.FILLER)


def test_joined_rows_are_the_concatenated_text_cut_into_equal_lengths():
    text = np.concatenate(texts())
    batch = every(rows(split(*texts()), SEQ_LEN, "joined", "cut", "train"))
    count = (len(text) - 1) // SEQ_LEN
    assert batch.input_ids.flatten().tolist() == text[: count * SEQ_LEN].tolist()
    assert batch.labels.flatten().tolist() == text[1 : count * SEQ_LEN + 1].tolist()
    assert batch.position_ids is None


def layout(batch):
    """Returns ([(shape, dtype, strides, bytes of the storage) of each tensor], number of distinct storages)."""
    tensors = list(batch.tensors.values())
    parts = [(part.shape, part.dtype, part.stride(), part.untyped_storage().nbytes()) for part in tensors]
    return parts, len({part.untyped_storage().data_ptr() for part in tensors})


@pytest.mark.parametrize("other", [None, "joined", "documents", "padded"])
@pytest.mark.parametrize("kind", ["joined", "documents", "padded"])
def test_planner_example_has_the_memory_layout_of_full_rows_unless_it_is_of_another_packing(kind, other):
    """Each compared row is filled by one document."""
    made = rows(split(*(np.arange(SEQ_LEN) for _ in range(8))), SEQ_LEN, kind, "cut", "train")
    found = layout(packing.rows_class({"packing": other or kind}).example(4, SEQ_LEN))
    assert (found == layout(made.micro_batch(np.arange(4)))) == (other in (None, kind))


@pytest.mark.parametrize("kind", ["joined", "documents", "padded"])
def test_tokens_that_are_not_learned_have_no_label(kind):
    learned = [np.arange(len(document)) % 3 == 0 for document in texts()]
    made = rows(split(*texts(), learned=learned), SEQ_LEN, kind, "cut", "train")
    found = pairs(every(made))
    assert found and all(label % 1000 % 3 == 0 for _, label in found)
    if kind != "joined":
        assert sorted(found) == [(a, b) for a, b in following(texts()) if b % 1000 % 3 == 0]


def test_positions_restart_at_each_document_and_in_the_filler_tail():
    batch = every(rows(split(*texts(longest=12)), SEQ_LEN, "documents", "cut", "train"))
    tail = batch.input_ids == packing.FILLER
    assert torch.equal(batch.position_ids[~tail], batch.input_ids[~tail] % 1000)
    for row, positions in zip(tail, batch.position_ids, strict=True):
        assert positions[row].tolist() == list(range(int(row.sum())))


def test_first_tokens_of_a_packed_micro_batch_are_where_positions_restart():
    made = rows(split(*texts(longest=12)), SEQ_LEN, "documents", "cut", "train")
    batch = made.micro_batch(np.arange(len(made)))
    starts = [row * SEQ_LEN + start for row in range(len(made)) for start in made.starts(row)]
    assert batch.first_tokens == [*starts, len(made) * SEQ_LEN]
    moved = batch.counted().to(torch.device("meta"))  # a device whose tensors have no values
    assert moved.inputs["position_ids"].counted_first == batch.first_tokens
    part = batch.each(lambda tensor: tensor[1:])
    assert not hasattr(part.inputs["position_ids"], "counted_first")


def test_best_fit_packing_of_3000_documents_fills_more_than_99_percent_of_the_rows():
    lengths = np.random.default_rng(0).integers(2, 200, 3000)
    order, ends = packed(lengths, 256)
    assert sorted(order) == list(range(3000))
    filled = [lengths[part].sum() for part in np.split(order, ends[:-1])]
    assert max(filled) <= 256 and sum(filled) / (256 * len(ends)) > 0.99
    next_fit = 1 + sum(np.diff(np.cumsum(np.random.default_rng(0).permutation(lengths)) // 256) > 0)
    assert len(ends) <= next_fit
    again = packed(lengths, 256)
    assert np.array_equal(order, again[0]) and np.array_equal(ends, again[1])


def test_too_long_documents_are_cut_dropped_or_refused_and_counted():
    documents = split(np.arange(40), 100 + np.arange(5), 200 + np.arange(1))
    cut, drop = (rows(documents, SEQ_LEN, "documents", how, "train") for how in ("cut", "drop"))
    assert cut.report == {"documents": 2, "cut": 1, "too_long": 0, "nothing_to_learn": 1, "rows": 3, "fill": 45 / 48}
    assert drop.report["too_long"] == 1 and pairs(every(drop)) == following([100 + np.arange(5)])
    with pytest.raises(
        Refused,
        match=r"1 document longer than seq_len=16 \(of 3\), the longest with 40 tokens. Type seq_len=40 if the model",
    ):
        rows(documents, SEQ_LEN, "padded", "refuse", "train")
    assert rows(documents, 40, "padded", "refuse", "train").report["too_long"] == 0


def test_documents_and_pieces_without_learned_tokens_are_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(packing, "AT_ONCE", 8)  # tokens; the first document has more
    learned = [np.arange(40) < 10, np.zeros(5), np.arange(5) == 4, np.arange(5) == 0]
    documents = split(np.arange(40), 100 + np.arange(5), 200 + np.arange(5), 300 + np.arange(5), learned=learned)
    made = rows(documents, SEQ_LEN, "padded", "cut", "train")
    # The first document has learned tokens in its first row only. The only learned token of the last document is its
    # first token, which no token predicts.
    assert made.report == {"documents": 2, "cut": 1, "too_long": 0, "nothing_to_learn": 2, "rows": 2}
    assert pairs(every(made)) == [*((i, i + 1) for i in range(9)), (203, 204)]
    silent = split(np.arange(40), learned=[np.zeros(40)])
    for kind in packing.PACKINGS:
        with pytest.raises(Refused, match="has a token in the loss"):
            rows(silent, SEQ_LEN, kind, "cut", "train")


def stored(folder):
    """Returns a split whose tokens are mapped from a file."""
    (folder / "train.bin").write_bytes(np.concatenate(texts()).astype(np.uint16).tobytes())
    text = split(*texts())
    return type(text)(np.memmap(folder / "train.bin", np.uint16, "r"), text.ends, text.text_bytes, None)


def test_packed_rows_are_cached_for_each_seq_len_and_too_long_setting(tmp_path, monkeypatch):
    text = stored(tmp_path)
    first = every(rows(text, SEQ_LEN, "documents", "cut", "train"))
    calls = []
    monkeypatch.setattr(packing, "packed", lambda *of: calls.append(of) or packed(*of))
    again = every(rows(text, SEQ_LEN, "documents", "cut", "train"))
    assert not calls and all(map(torch.equal, first.tensors.values(), again.tensors.values()))
    rows(text, 2 * SEQ_LEN, "documents", "cut", "train"), rows(text, SEQ_LEN, "documents", "drop", "train")
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_damaged_cache_of_packed_rows_is_rebuilt_and_reported(tmp_path, caplog, damage):
    text = stored(tmp_path)
    first = every(rows(text, SEQ_LEN, "documents", "cut", "train"))
    (file,) = tmp_path.glob("train_rows_*.npz")
    content = bytearray(file.read_bytes())
    content[content.index(b"NUMPY") + 130] ^= 1  # the first number of the array
    file.write_bytes({"cut": content[:-50], "changed": content, "empty": b""}[damage])
    with caplog.at_level("INFO", "lowmem"):
        again = every(rows(text, SEQ_LEN, "documents", "cut", "train"))
    assert all(map(torch.equal, first.tensors.values(), again.tensors.values()))
    assert f"{file} is corrupted; packing the rows again" in caplog.text


# --- order ------------------------------------------------------------------------------------------------------------


def made(kind):
    return rows(split(*texts()), SEQ_LEN, kind, "cut", "train")


def read(windows):
    return [pairs(batch) for window in windows for batch in window.micro_batches]


@pytest.mark.parametrize("kind", ["documents", "padded"])
@pytest.mark.parametrize("size", [1, 3])
def test_loader_of_packed_or_padded_rows_resumed_after_any_window_reads_the_windows_of_the_unbroken_one(kind, size):
    """Resumes after each of the first 38 windows. The first 40 windows cross the end of an epoch."""
    unbroken = list(islice(WindowLoader(made(kind), Share(4), fixed(size), 7), 40))
    assert unbroken[-1].end.epoch > 0
    for done in range(1, 39):
        resumed = islice(WindowLoader(made(kind), Share(4), fixed(size), 7, unbroken[done - 1].end), 2)
        assert read(resumed) == read(unbroken[done : done + 2])


@pytest.mark.parametrize("kind", ["documents", "padded"])
def test_packed_epoch_reads_every_document_once_in_a_new_order(kind):
    epochs = [[], [], []]
    for window in WindowLoader(made(kind), Share(4), fixed(2), 7):
        epoch = window.end.epoch - (window.end.sequence == 0)
        if epoch == 3:
            break
        epochs[epoch] += [pair for batch in read([window]) for pair in batch]
        assert window.learned_tokens == sum(map(len, read([window])))
    assert [sorted(epoch) for epoch in epochs] == [following(texts())] * 3
    assert all(one != other for one, other in combinations(epochs, 2))


def test_order_of_packed_rows_does_not_depend_on_the_batch_size():
    def loader(size):
        return WindowLoader(made("documents"), Share(size), fixed(1), 7)

    one, four = ([pair for batch in read(islice(loader(size), 4 * 4 // size)) for pair in batch] for size in (1, 4))
    assert one == four


def test_padded_batches_group_similar_lengths_so_filler_is_below_2_percent():
    documents = rows(split(*texts(count=3000)), 40, "padded", "cut", "train")

    def padded(arranged):
        loader = WindowLoader(documents, Share(8), fixed(1), 7)
        documents.arranged = arranged
        batches = [window.micro_batches[0] for window in islice(loader, 300)]
        assert all(len(batch.labels) == 8 and batch.position_ids is None for batch in batches)
        return np.mean([float((batch.input_ids == packing.FILLER).float().mean()) for batch in batches])

    assert padded(documents.arranged) < 0.02 < 0.3 < padded(lambda permutation, _: permutation)


def test_order_digest_depends_on_packing_and_text_and_for_padded_rows_on_batch_size():
    def order(rows, batch_size=4):
        return WindowLoader(rows, Share(batch_size), fixed(1), 7).order

    changed = texts()
    changed[0], changed[1] = changed[1], changed[0]
    kinds = {"joined": Joined, "documents": Documents, "padded": Padded}
    orders = [order(made(kind)) for kind in kinds]
    orders += [order(rows(split(*changed), SEQ_LEN, kind, "cut", "train")) for kind in kinds]
    assert len({str(one) for one in orders}) == 6
    assert [order(made(kind)) == order(made(kind), 2) for kind in kinds] == [True, True, False]
    assert set(orders[0]) == {"sequences", "seq_len", "seed", "text"}  # the oldest checkpoints lack "text"


def test_position_ids_are_expected_if_the_data_or_any_mixture_part_is_packed_as_documents():
    assert not with_positions({"packing": "joined"}) and with_positions({"packing": "documents"})
    assert with_positions({"parts": {"a": {"packing": "padded"}, "b": {"packing": "documents"}}})
