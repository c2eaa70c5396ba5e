"""The order of the sequences depends on the seed alone. Each window stores the position from which a run resumes after
the window."""

import sys
from collections import Counter
from itertools import islice, takewhile

import numpy as np
import pytest

from documents import split
from lowmem.config.accumulation import by_epoch, by_step, fixed
from lowmem.data.loader import Position, Share, ValidationLoader, WindowLoader
from lowmem.data.packing import Joined, rows
from lowmem.data.token_store import Split
from lowmem.system.errors import Refused

SEQ_LEN = 4


@pytest.fixture
def sequences():
    return Joined(split(np.arange(23 * SEQ_LEN + 3)), SEQ_LEN, "train")


def first_tokens(windows):
    return [int(row[0]) for window in windows for batch in window.micro_batches for row in batch.input_ids]


def stream(sequences, batch_size, batches, count, seed=7, **where):
    loader = WindowLoader(sequences, Share(batch_size), fixed(batches), seed, **where)
    ids = []
    for window in loader:
        ids += first_tokens([window])
        if len(ids) >= count:
            return ids[:count]


def test_labels_are_the_input_tokens_shifted_by_one(sequences):
    batch = sequences.micro_batch(np.array([2]))
    assert batch.input_ids.tolist() == [[8, 9, 10, 11]]
    assert batch.labels.tolist() == [[9, 10, 11, 12]]


def test_every_epoch_reads_every_sequence_once_in_a_new_order(sequences):
    ids = stream(sequences, 3, 2, 46)
    assert sorted(ids[:23]) == sorted(ids[23:]) == [i * SEQ_LEN for i in range(23)]
    assert ids[:23] != ids[23:]


@pytest.mark.parametrize(("batch_size", "batches"), [(1, 1), (2, 1), (5, 3), (1, 8), (64, 1)])
def test_sequence_order_does_not_depend_on_batch_size_or_accumulation(sequences, batch_size, batches):
    assert stream(sequences, batch_size, batches, 60) == stream(sequences, 1, 1, 60)


def test_another_seed_gives_another_sequence_order(sequences):
    assert stream(sequences, 1, 1, 23) != stream(sequences, 1, 1, 23, seed=8)


def test_two_devices_together_read_the_windows_of_one_device(sequences):
    alone = list(islice(WindowLoader(sequences, Share(6), fixed(2), 7), 4))
    shares = [list(islice(WindowLoader(sequences, Share(3, rank=r, world_size=2), fixed(2), 7), 4)) for r in range(2)]
    for whole, *parts in zip(alone, *shares, strict=True):
        assert all(part[1:4] == whole[1:4] and part.end == whole.end for part in parts)
        assert sorted(first_tokens(parts)) == sorted(first_tokens([whole]))


def test_last_window_of_an_epoch_is_short_and_counts_only_its_own_tokens(sequences):
    windows = list(islice(WindowLoader(sequences, Share(4), fixed(3), 7), 3))
    assert [w.learned_tokens // SEQ_LEN for w in windows] == [12, 11, 12]
    assert [len(b.input_ids) for b in windows[1].micro_batches] == [4, 4, 3]
    assert [w.end for w in windows] == [Position(0, 12, 1), Position(1, 0, 2), Position(1, 12, 3)]


def test_window_has_as_many_micro_batches_as_the_size_function_returns(sequences):
    windows = list(islice(WindowLoader(sequences, Share(1), lambda epoch, window: window + 1, 7), 4))
    assert [len(w.micro_batches) for w in windows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "size",
    [fixed(1), fixed(5), by_epoch({0: 1, 1: 3}), by_step({0: 2, 4: 7})],
    ids=["fixed 1", "fixed 5", "by_epoch", "by_step"],
)
@pytest.mark.parametrize("epochs", [1, 2, 4])
def test_loader_counts_the_windows_of_epochs_without_reading_data(sequences, size, epochs, monkeypatch):
    read = takewhile(lambda window: window.end[:2] <= (epochs, 0), WindowLoader(sequences, Share(3), size, 7))
    expected = len(list(read))
    monkeypatch.setattr(sequences, "micro_batch", None)
    assert WindowLoader(sequences, Share(3), size, 7, Position(1, 2, 5)).windows_in(epochs) == expected


@pytest.mark.parametrize("done", [1, 2, 3, 5])
def test_loader_resumed_after_any_window_reads_the_remaining_sequences_in_order(sequences, done):
    unbroken = list(islice(WindowLoader(sequences, Share(4), fixed(3), 7), 7))
    resumed = islice(WindowLoader(sequences, Share(4), fixed(3), 7, unbroken[done - 1].end), 7 - done)
    assert first_tokens(resumed) == first_tokens(unbroken[done:])


def test_validation_with_limit_10_reads_the_first_10_sequences_in_order(sequences):
    batches = list(ValidationLoader(sequences, Share(4), limit=10))
    assert [int(row[0]) // SEQ_LEN for b in batches for row in b.input_ids] == list(range(10))
    assert len(ValidationLoader(sequences, Share(4), limit=10)) == len(batches) == 3


def test_joined_text_of_exactly_seq_len_tokens_is_refused():
    with pytest.raises(Refused, match="seq_len=8"):
        Joined(split(np.arange(8)), 8, "train")


@pytest.mark.parametrize("packing", ["joined", "documents"])
def test_loading_a_window_calls_equally_many_functions_for_rows_of_any_length(packing):
    """The training step waits while a window is loaded, so no Python function may be called per token."""

    def calls(seq_len):
        length = seq_len // 2
        ends = np.arange(length, 2000 * length + 1, length)
        of = Split(np.zeros(ends[-1], np.uint16), ends, ends, None)
        windows = iter(WindowLoader(rows(of, seq_len, packing, "cut", "train"), Share(8), fixed(4), seed=0))
        next(windows)
        events = Counter()
        before = sys.getprofile()
        sys.setprofile(lambda _, event, __: events.update([event]))
        try:
            next(windows)
        finally:
            sys.setprofile(before)
        return events["call"] + events["c_call"]

    assert calls(2048) == calls(64) > 0
