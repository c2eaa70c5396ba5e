"""Data sets of the hub, for which local folders stand in: they are read completely or streamed, and a stream resumes
bit-exactly from any window."""

import json
from itertools import islice

import datasets
import pyarrow as pa
import pytest
import torch
from httpx import Request, Response
from huggingface_hub.errors import GatedRepoError
from omegaconf import OmegaConf
from pyarrow import parquet

import tokenizers_of_all_kinds
from lowmem.config.accumulation import fixed
from lowmem.data.loader import Position, Share
from lowmem.data.opening import RowSettings
from lowmem.data.sources.chat_template import CHATML_TOKENS
from lowmem.data.sources.hub import Table, hub
from lowmem.data.token_store import load_bpe, train_bpe
from lowmem.fit import fit
from lowmem.system.errors import Refused
from lowmem.training import build

FILES, ROWS = 3, 14  # parquet files, and rows of each file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("set")
    for i in range(FILES):
        texts = [f"shard {i} row {j}: " + "x = self ( ) " * (j % 5 + 1) for j in range(ROWS)]
        parquet.write_table(pa.table({"text": texts}), place / f"train-{i:05d}.parquet", row_group_size=5)
    return place


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Returns the folder of a saved tokenizer with one token per byte."""
    place = tmp_path_factory.mktemp("bpe")
    train_bpe([], 257, place / "tokenizer.json")
    load_bpe(place / "tokenizer.json").save_pretrained(place)
    return place


def loader(folder, tokenizer, position=None, seed=7, **how):
    source = hub(str(folder), streaming=True, **{"block": 5, "val_rows": 3, "too_long": "cut"} | how)
    of = source.opened(RowSettings(folder, 32, 0, load_bpe(tokenizer / "tokenizer.json"), []))
    return of.train.loader(Share(2), fixed(2), seed, *([position] if position else []))


def numbers(window):
    return [part.tolist() for batch in window.micro_batches for part in (batch.input_ids, batch.labels)], window.end[:3]


def texts_of(windows, tokenizer):
    read = load_bpe(tokenizer / "tokenizer.json")
    return " ".join(read.decode(row) for window in windows for batch in window.micro_batches for row in batch.input_ids)


def test_streamed_conversations_have_the_template_digest_of_conversations_that_are_read_at_once(tmp_path):
    said = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(40)]
    lines = (json.dumps({"messages": messages}) + "\n" for messages in said)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(lines))
    train_bpe([], 300, tmp_path / "tokenizer.json", CHATML_TOKENS)

    def digest(streaming):
        source = hub(str(tmp_path / "set"), messages="messages", template="chatml", streaming=streaming, val_rows=2)
        wanted = RowSettings(tmp_path / "cache", 32, 0, load_bpe(tmp_path / "tokenizer.json"), [])
        return source.opened(wanted).tokens.template

    assert digest(True) == digest(False) is not None


@pytest.mark.rows("joined")
@pytest.mark.parametrize("packing", ["joined", "documents"])
def test_stream_resumed_and_then_resumed_again_reads_the_windows_of_the_unbroken_stream(folder, tokenizer, packing):
    """The windows cross the boundaries of blocks and of shards, and the end of an epoch."""
    unbroken = list(islice(loader(folder, tokenizer, packing=packing), 60))
    epochs = {window.end.epoch for window in unbroken}
    assert len(epochs) > 1, "an epoch has to end"
    for done in (1, 7, 20, 33, 45, 52):
        once = list(islice(loader(folder, tokenizer, Position(*unbroken[done - 1].end), packing=packing), 4))
        again = list(islice(loader(folder, tokenizer, Position(*once[-1].end), packing=packing), 4))
        assert [numbers(w) for w in (once + again)] == [numbers(w) for w in unbroken[done : done + 8]]


@pytest.mark.parametrize("bos", ["auto", True, False])
def test_streamed_hub_text_has_the_tokens_of_the_tokenizer_call_for_each_data_bos(folder, bos):
    made, begins = tokenizers_of_all_kinds.tokenizer("bpe", "byte level", "eos"), bos is True
    source = hub(str(folder), streaming=True, block=5, val_rows=3, bos=bos)
    source.opened(RowSettings(folder, 32, 0, made, []))
    (document,) = source.documents([{"text": "shard 7: x = self"}], 0, "val")
    assert document.ids.tolist() == made("shard 7: x = self")["input_ids"]
    assert (document.ids[0] == made.bos_token_id) == begins
    assert document.learned is None or document.learned.tolist() == [False] + [True] * (len(document.ids) - 1)


def test_stream_resumed_without_its_saved_state_reads_other_rows(folder, tokenizer):
    """The deliberately wrong variant drops the state of the stream from the saved position."""
    unbroken = list(islice(loader(folder, tokenizer), 11))
    resumed = islice(loader(folder, tokenizer, Position(*unbroken[6].end[:3])), 4)
    assert [numbers(w) for w in resumed] != [numbers(w) for w in unbroken[7:]]


@pytest.mark.matrix  # `datasets` takes 20 s
def test_stream_with_a_shuffle_buffer_resumes_with_other_rows_than_the_unbroken_stream(folder, tokenizer, monkeypatch):
    """The deliberately wrong variant shuffles in a buffer, whose contents are not in the saved state of the stream."""
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: load(*a, **k).shuffle(seed=0, buffer_size=9))
    unbroken = list(islice(loader(folder, tokenizer), 11))
    assert unbroken[6].end.state, "behind the first block"
    resumed = islice(loader(folder, tokenizer, Position(*unbroken[6].end)), 4)
    assert [numbers(w) for w in resumed] != [numbers(w) for w in unbroken[7:]]


def test_stream_epoch_reads_every_row_outside_validation_once(folder, tokenizer):
    made = loader(folder, tokenizer)
    windows = []
    for window in made:
        windows.append(window)
        if window.end.epoch:
            break
    text = texts_of(windows, tokenizer)
    for i in range(FILES):
        for j in range(ROWS):
            held_out = i == 0 and j < 3
            assert text.count(f"shard {i} row {j}:") == (0 if held_out else 1)


def test_row_order_of_a_stream_depends_on_the_seed_and_the_epoch(folder, tokenizer):
    first, same, other = (list(islice(loader(folder, tokenizer, seed=s), 60)) for s in (7, 7, 8))
    assert [numbers(w) for w in first] == [numbers(w) for w in same] != [numbers(w) for w in other]
    starts = [i + 1 for i, window in enumerate(first) if window.end.epoch > (first[i - 1].end.epoch if i else 0)]
    assert numbers(first[0])[0] != numbers(first[starts[0]])[0]


def written(place, texts):
    place.mkdir()
    parquet.write_table(pa.table({"text": texts}), place / "train.parquet")
    return place


def epoch_of(made):
    """Returns the windows of the first epoch."""
    windows = []
    for window in made:
        windows.append(window)
        if window.end.epoch:
            return windows


def test_stream_blocks_with_only_too_long_documents_are_skipped_and_reported(tmp_path, tokenizer, caplog):
    """A resumed stream skips such blocks, too. A stream that has only such blocks is refused."""
    caplog.set_level("INFO")
    texts = [f"row {i}." + "too long " * 9 * (13 <= i < 25) for i in range(45)]
    place = written(tmp_path / "set", texts)
    windows = epoch_of(loader(place, tokenizer, too_long="drop", block=4))
    read = texts_of(windows, tokenizer)
    assert [i for i in range(45) if f"row {i}." in read] == [*range(3, 13), *range(25, 45)]
    assert "12 dropped (longer than a row)" in caplog.messages[-1] and "rows 4 to 45" in caplog.messages[-1]
    resumed = list(islice(loader(place, tokenizer, windows[1].end, too_long="drop", block=4), 3))
    assert [numbers(w) for w in resumed[: len(windows) - 2]] == [numbers(w) for w in windows[2:5]]
    nothing = written(tmp_path / "nothing", [*texts[:3], *texts[13:25]])
    with pytest.raises(Refused, match="nothing left to train on after the validation rows"):
        next(iter(loader(nothing, tokenizer, too_long="drop", block=4)))


def test_skipped_bad_rows_of_a_stream_are_counted_across_blocks(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO")
    texts = ["" if i in (1, 5, 6, 40) else f"row {i}." for i in range(45)]
    epoch_of(loader(written(tmp_path / "set", texts), tokenizer, skip_bad=True, block=4))
    said = [line for line in caplog.messages if "skip_bad" in line]
    assert "1 of 3 val records" in said[0] and "3 of 42 train records" in said[-1] and len(said) < 7


@pytest.mark.parametrize("block", [2, 8])
def test_tokens_left_over_from_a_stream_block_begin_the_rows_of_the_next_block(tmp_path, tokenizer, block):
    """A block of two documents has fewer tokens than a row."""
    texts = [f"<{i:03d}>" for i in range(106)]
    windows = epoch_of(loader(written(tmp_path / "set", texts), tokenizer, packing="joined", block=block, val_rows=6))
    learned = sum(window.learned_tokens for window in windows)
    assert (
        learned == (100 * 6 - 1) // 32 * 32
    )  # a document has five bytes and an end token; the incomplete last row is dropped
    read = texts_of(windows, tokenizer)
    assert sum(f"<{i:03d}>" in read for i in range(6, 106)) > 80  # other documents continue in a second row


@pytest.fixture
def typed(small, folder, tokenizer):
    base = tuple(line for line in small if not line.startswith("data"))
    return (*base, "data=hub", f"data.path={folder}", f"tokenizer={tokenizer}")


def test_run_on_a_streamed_hub_data_set_is_reproducible_and_resumes_bit_exactly(config, typed, tmp_path):
    lines = ("data.streaming=true", "data.block=2", "data.val_rows=4", "save_every=1", "checkpoint.keep=9")
    whole = fit(config(*lines, base=typed), tmp_path / "whole")
    assert fit(config(*lines, base=typed), tmp_path / "again")["val_loss"] == whole["val_loss"]
    at = tmp_path / "whole" / "checkpoints" / "step-00000002.ckpt"
    resumed = fit(config(*lines, f"resume={at}", base=typed), tmp_path / "resumed")
    assert resumed["val_loss"] == whole["val_loss"]
    saved = [torch.load(tmp_path / run / "checkpoints" / "step-00000004.ckpt") for run in ("whole", "resumed")]
    assert saved[0]["lowmem"]["position"]["state"]["block"] > 0
    weights = [one["state_dict"] for one in saved]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("after", [1, 20], ids=["in the validation rows", "in the training rows"])
def test_stream_that_fails_while_it_is_read_is_refused_with_the_reason(folder, tokenizer, monkeypatch, after):
    rows = Table.rows

    class Failing:
        def __init__(self, rows):
            self.rows, self.state_dict = rows, rows.state_dict

        def __iter__(self):
            yield from islice(self.rows, after)
            raise OSError("connection lost")

    monkeypatch.setattr(Table, "rows", lambda *args: Failing(rows(*args)))
    with pytest.raises(Refused, match=r"cannot read this data set \(connection lost\)"):
        list(islice(loader(folder, tokenizer), 20))


def test_ddp_run_with_one_device_trains_on_a_stream(config, typed, tmp_path):
    """Ranks compare the order of their data. A stream has no list of rows, so digests of its files are compared."""
    lines = ("data.streaming=true", "data.block=2", "data.val_rows=4", "strategy=ddp", "devices=1")
    assert fit(config(*lines, base=typed), tmp_path / "run")["steps"] == 4


def test_hub_data_without_streaming_reads_every_row(config, typed, folder):
    data = build.data(config(base=typed))
    count = len(data.tokens.train.ends) + len(data.tokens.val.ends)
    assert count == FILES * ROWS and len(data.tokens.val.ends)


def test_five_hub_rows_hold_out_exactly_one_for_validation(tmp_path):
    reader = hub(str(written(tmp_path / "set", [f"row {i}" for i in range(5)])), val_fraction=0.001).reader
    assert [len(list(reader.records(split))) for split in ("train", "val")] == [4, 1]


def test_gated_hub_data_set_is_refused_with_login_advice(monkeypatch):
    answer = Response(403, request=Request("GET", "https://huggingface.co/api/datasets/some/gated"))
    gated = GatedRepoError("403 Client Error. Cannot access gated repo.", response=answer)

    def refused(*args, **how):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/gated' is a gated dataset on the Hub.") from gated

    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(
        Refused,
        match=r"data\.path=some/gated: this repository is gated, .*datasets/some/gated, log in with `hf auth login`",
    ):
        [*hub("some/gated").reader.records("train")]


REFUSED = {
    "epochs=2 data.streaming=true": "epochs=2: the length of a stream is unknown. Type max_steps=",
    "data.streaming=true tokenizer=null": "Type tokenizer=<a folder or hub id>",
    "data.streaming=true show=2": "show=2: rows of a stream are packed while it is read",
    "data.streaming=true data.packing=padded": "Type data.packing=documents",
    "data.split=test": "cannot read this data set",
    "data.streaming=true data.val_split=train": "data.val_split=train: data.split is train, too",
    "data.path=some/where": "hf download --repo-type dataset",
    "data.field=nothing": 'row 1: field "nothing" is missing (fields: "text")',
}


@pytest.mark.parametrize("line", REFUSED)
def test_run_on_an_invalid_hub_source_or_stream_is_refused(config, typed, tmp_path, line):
    given = line.split()
    kept = tuple(one for one in typed if one.split("=")[0] not in {g.split("=")[0] for g in given})
    with pytest.raises(Refused) as refusal:
        fit(OmegaConf.create(config(*given, base=kept).as_dict()), tmp_path / "run")
    assert REFUSED[line] in str(refusal.value) and "\n" not in str(refusal.value)
