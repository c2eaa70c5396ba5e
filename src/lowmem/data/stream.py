"""Streams a data set without storing it on disk (`data.streaming=true`). A resumed run continues with exactly the rows
that the interrupted run would have read next.

Records are read in the order of the stream, in blocks of `data.block` records. The documents of a block are packed into
rows, and the rows of the block are shuffled with a generator that is seeded with (seed, epoch, number of the block). A
second thread runs `Stream.blocks`: it reads, tokenizes and packs the next block while the training thread uses a block.
With several devices, each process reads the complete stream and keeps the rows of its device.

A position contains the state of the stream before a block, and the number of this block's rows that were used. A
resumed run loads the state and reads the block again. With packing=joined, the tokens at the end of a block that do not
fill a row begin the next block. The state consists of these tokens (at most `seq_len`), the number of the block, and
the state of the reader, which is a few numbers. The shuffle buffer of `datasets` is not used, because the state of the
reader does not include the buffer's contents: a resumed run would skip the records that were in the buffer.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise, starmap
from typing import Any, NamedTuple

import numpy as np

from lowmem.data.loader import MicroBatch, Position, Rows, Window, WindowLoader
from lowmem.data.opening import Openable, Opened, RowSettings
from lowmem.data.packing import Documents, Joined, NothingToLearn, describe_split
from lowmem.data.sources.framing import dress
from lowmem.data.sources.reading import ahead
from lowmem.data.sources.records import Records
from lowmem.data.sources.source import Encoded, SplitName
from lowmem.data.token_store import NOTHING, Split, Tokens, template_digest
from lowmem.system.errors import Refused

log = logging.getLogger(__name__)


class Stream(Openable):
    """A streamed source, which `sources/hub.py` creates with data.streaming=true.

    Args:
        records: the same source without streaming. It provides the reader and the encoder.
        block: number of records in a block. The rows of a block are permuted together.
        val_rows: number of validation records. They are the first records of the validation split. Without a validation
            split, they are the first records of the training split, and training skips them.

    Raises:
        Refused: packing=padded.
    """

    name, streams = "hub", True

    def __init__(self, records: Records, block: int, val_rows: int) -> None:
        if records.packing == "padded":
            raise Refused(
                "data.packing=padded: all rows of a stream must have the same length. Type data.packing=documents."
            )
        self.records, self.block, self.val_rows = records, block, val_rows
        self.table, self.packing = records.reader, records.packing
        self.chat, self.bos = records.chat, records.bos

    def opened(self, wanted: RowSettings) -> Opened:
        if wanted.tokenizer is None:
            raise Refused(
                "data.streaming=true: a tokenizer cannot be trained on a stream. Type tokenizer=<a folder or hub id>, "
                "or data.streaming=false."
            )
        dress(wanted.tokenizer, self)
        self.tokenizer, self.seq_len = wanted.tokenizer, wanted.seq_len
        stream = self.table.rows(self.table.splits["val"] or self.table.splits["train"])
        self.records.forget("val")
        with self.table.reached():
            read = list(islice(stream, self.val_rows))
        val = _split(self.documents(read, 0, "val"))
        rows = self.rows(val, "val")
        self._tell("val", rows.report)
        self.records.forget("val")  # `_tell` has logged the notes
        return Opened(
            Tokens(NOTHING, val, self.tokenizer, template_digest(self, self.tokenizer)), Blocks(self), {"": rows}
        )

    def documents(self, rows: list[dict], before: int, name: SplitName) -> list[Encoded]:
        """Tokenizes records, and returns their documents. Args: rows: consecutive records of a split; before: number of
        the split's records before `rows`, for the row numbers in messages."""
        split = self.table.splits[name] or self.table.splits["train"]
        records = (self.table.record(row, split, number) for number, row in enumerate(rows, before + 1))
        return list(self.records.documents(records, name, self.tokenizer))

    def rows(self, split: Split, name: SplitName) -> Rows:
        if self.packing == "joined":
            return Joined(split, self.seq_len, name)
        return Documents(split, self.seq_len, self.records.too_long, name)

    def blocks(self, state: dict | None) -> Iterator["RowBlock"]:
        """Yields the blocks of an epoch, except blocks that give no rows (`rows_if_any`). Args: state: the state of the
        stream from which to continue; None: begin an epoch. If the first records of the training split are held out for
        validation, the epoch begins after these records."""
        stream = self.table.rows(self.table.splits["train"], state and state["stream"])
        held_out = self.val_rows if self.table.val_from_train else 0
        rows_to_read = islice(stream, 0 if state else held_out, None)
        number, tail = (state["block"], state.get("tail", [])) if state else (0, [])
        counts, seen = Counter(), held_out + number * self.block
        title = f"train, rows {seen + 1:,} to"
        self.records.forget("train")
        while read := self._read(rows_to_read):
            split = _split([*starmap(Encoded, tail), *self.documents(read, seen, "train")])
            number, seen = number + 1, seen + len(read)
            rows, report = self.rows_if_any(split)
            counts.update(report)
            if not number & number - 1:  # log after 1, 2, 4, 8, ... blocks
                self._tell(f"{title} {seen:,}", counts)
            if rows:
                yield RowBlock(state, number - 1, rows)
            tail = _tail(split, self.seq_len) if self.packing == "joined" else []
            state = {"block": number, "stream": stream.state_dict(), "tail": tail}
        if number & number - 1:
            self._tell(f"{title} {seen:,}", counts)

    def _read(self, rows: Iterator[dict]) -> list[dict]:
        """Returns the next records, at most `block` of them. Raises: Refused: the stream cannot be read, for example
        because the network failed."""
        with self.table.reached():
            return list(islice(rows, self.block))

    def rows_if_any(self, split: Split) -> tuple[Rows | None, dict]:
        """Returns the rows of a block and counts of its documents. Returns None in place of the rows if the block has
        nothing to learn (`NothingToLearn`) or, with packing=joined, does not fill a row."""
        if len(split.ids) <= (self.seq_len if self.packing == "joined" else 0):
            return None, {}
        try:
            rows = self.rows(split, "train")
        except NothingToLearn as nothing:
            return None, dict(nothing.report)
        return rows, {name: count for name, count in rows.report.items() if name != "fill"}

    def _tell(self, name: str, report: Mapping) -> None:
        if report:
            log.info(describe_split(report, name, self.packing))
        for note in self.records.notes():
            log.info(note)


def _split(documents: list[Encoded]) -> Split:
    if not documents:
        return NOTHING
    ids = [np.asarray(document.ids, np.uint32) for document in documents]
    learned = [np.ones(len(d.ids), bool) if d.learned is None else np.array(d.learned) for d in documents]
    return Split(
        np.concatenate(ids),
        np.cumsum([*map(len, ids)]),
        np.cumsum([document.text_bytes for document in documents]),
        None if all(map(np.all, learned)) else np.packbits(np.concatenate(learned)),
    )


def _tail(split: Split, seq_len: int) -> list[tuple[list[int], list[bool], int]]:
    """Returns the tokens at the end of a block that do not fill a row, as plain numbers for a checkpoint. Each document
    or part of a document is a tuple (ids, learned, text_bytes), the arguments of `Encoded`. `text_bytes` is 0, because
    training does not use it."""
    start = max(0, len(split.ids) - 1) // seq_len * seq_len
    edges = [start, *split.ends[split.ends > start].tolist()]
    return [(split.ids[a:b].tolist(), split.learned(a, b).tolist(), 0) for a, b in pairwise(edges)]


class RowBlock(NamedTuple):
    """The rows of a block. Args: state: the state of the stream before this block; None for the first block of an
    epoch; number: index of the block among all blocks of its epoch, including blocks without rows."""

    state: dict | None
    number: int
    rows: Rows


class Blocks(Rows):
    """The training rows of a stream. Their number is unknown. `StreamLoader` reads them block by block, in the order of
    the stream."""

    numbered = False

    def __init__(self, stream: Stream) -> None:
        self.stream, self.seq_len = stream, stream.seq_len

    def loader(self, *how: Any) -> "StreamLoader":
        return StreamLoader(self, *how)


class StreamLoader(WindowLoader):
    """Yields windows of a stream. A window may begin in one block and end in a later block."""

    @property
    def order(self) -> dict:
        source = self.sequences.stream
        how = {"packing": source.packing, "too_long": source.records.too_long}
        how |= {"block": source.block, "val_rows": source.val_rows}
        return {"stream": source.table.key(), "seq_len": source.seq_len, "seed": self.seed, **how}

    def windows_in(self, epochs: int) -> int:
        raise Refused(
            f"epochs={epochs}: the length of a stream is unknown. Type max_steps=<optimizer steps>, or "
            "data.streaming=false."
        )

    def described(self, start: Position, end: Position) -> str:
        """Returns a description of the window from `start` to `end`, without the indices of its rows, because rows of a
        stream have none."""
        return f"window {start.window + 1} of the stream (epoch {start.epoch})"

    def __iter__(self) -> Iterator[Window]:
        position = self.position
        while True:
            before = position
            for window in self._windows(position):
                yield window
                position = window.end
            if position == before:
                raise Refused(
                    "data.streaming=true: the stream has nothing left to train on after the validation rows. Type a "
                    "smaller data.val_rows or a larger seq_len, or give more text."
                )

    def _windows(self, start: Position) -> Iterator[Window]:
        """Yields the windows from `start` to the end of its epoch."""
        blocks, at = ahead(self.sequences.stream.blocks(start.state)), start.sequence
        block, number, rows_per_step = next(blocks, None), start.window, self.share.rows_per_step
        while block:
            wanted, pieces = rows_per_step * self.window_size(start.epoch, number), []
            while block and (missing := wanted - sum(len(indices) for _, indices in pieces)):
                order = np.random.default_rng([self.seed, start.epoch, block.number]).permutation(len(block.rows))
                pieces.append((block.rows, order[at : at + missing]))
                at += missing
                if at >= len(order):
                    block, at = next(blocks, None), 0
            number += 1
            end = Position(start.epoch, at, number, block.state) if block else Position(start.epoch + 1, 0, number)
            read = [rows.micro_batch(indices) for rows, indices in pieces]
            yield self._window(type(read[0]).concatenated(read), rows_per_step, end)

    def _window(self, batch: MicroBatch, rows_per_step: int, end: Position) -> Window:
        """Cuts the rows of a window into global micro-batches, and keeps this device's share of each."""
        rows = rows_per_step * batch.ROWS
        cut = (batch.each(lambda tensor, at=at: tensor[at : at + rows]) for at in range(0, len(batch.input_ids), rows))
        micro_batches = [self.share.rows_of(micro_batch) for micro_batch in cut]
        return Window(micro_batches, batch.input_tokens, batch.learned_tokens, batch.weight, end)
