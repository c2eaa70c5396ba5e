"""Mixes the rows of several sources (`data=mix`). `data.shares` sets each source's share of the labels, which are the
tokens in the loss.

Shares count labels and not rows, because a row of chat has fewer labels than a row of text. An epoch contains every row
of every source at least once. The rows of a source that is too small for its share are repeated. `WindowLoader`
shuffles the rows of an epoch with a generator that is seeded with (seed, epoch), so resuming needs only the epoch and
the number of rows that were read. A checkpoint also stores `Mixed.order`. A resumed run compares this value with its
own, to detect changed sources, numbers of rows or shares. Validation sets are not mixed: each source is validated
separately.
"""

import logging
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from lowmem.config.values import checked_shares
from lowmem.data.loader import MicroBatch, Rows
from lowmem.data.opening import Openable, Opened, RowSettings, openable
from lowmem.data.sources.framing import dress
from lowmem.data.sources.source import ChatFormat, SplitName
from lowmem.data.token_store import train_tokenizer
from lowmem.system.errors import Refused

log = logging.getLogger(__name__)

LOOKED_AT = 256  # maximum number of rows of each source that are sampled to estimate the source's labels per row
MOST = 1 << 30  # maximum number of rows in an epoch; a permutation of this many row numbers takes 8 GiB


class Mix(Openable):
    """A mixture of sources.

    Args:
        parts: name of a source -> the source.
        shares: name of a source -> its share of the labels, relative to the sum of all shares; None: an epoch reads
            every row of every source once.

    Raises:
        Refused: there is no source; a source does not derive from `Openable`, is a stream, has padded rows, or has rows
            with more than tokens and labels (preference data); sources have different chat templates or values of
            `bos` (other than auto); or `shares` does not name exactly the sources.
    """

    name = "mix"

    def __init__(self, parts: Mapping[str, Openable], shares: Mapping[str, float] | None = None) -> None:
        checked_shares(parts, shares)
        for name, source in parts.items():
            openable(source, f"data.parts.{name}._target_=<yours>")
            if source.streams:
                raise Refused(
                    f"data.parts.{name}: a stream has an unknown number of rows, and a mixture needs this number. "
                    f"Type data.parts.{name}.streaming=false."
                )
            if type(source).rows_class.__func__ is not Openable.rows_class.__func__:
                raise Refused(
                    f"data.parts.{name}: a mixture can only combine rows of tokens and labels, which excludes sources "
                    "such as data=preference. Remove this part."
                )
            if source.packing == "padded":
                raise Refused(
                    f"data.parts.{name}.packing=padded: all rows of a mixture must have the same length. "
                    f"Type data.parts.{name}.packing=documents."
                )
        self.parts, self.shares = dict(parts), shares
        self.chats = {name: chat for name, source in parts.items() if (chat := source.chat)}
        if len({chat.source for chat in self.chats.values()}) > 1:
            raise Refused(
                f"data.parts: {' and '.join(self.chats)} use different chat templates, but a model has only one. "
                "Type the same data.parts.<name>.template for each."
            )
        if len(typed := {source.bos for source in parts.values()} - {"auto"}) > 1:
            raise Refused(
                f"data.parts: {' and '.join(name for name, source in parts.items() if source.bos in typed)} have "
                "different values of data.bos, but a model has only one tokenizer. Type the same data.parts.<name>.bos "
                "for each."
            )
        self.bos = next(iter(typed), "auto")

    @property
    def chat(self) -> ChatFormat | None:
        """Returns the chat format that all sources with conversations share; None if no source has conversations."""
        return next(iter(self.chats.values()), None)

    def key(self) -> list:
        return [source.key() for source in self.parts.values()]

    def size(self, split: SplitName) -> int | None:
        sizes = [source.size(split) for source in self.parts.values()]
        return None if None in sizes else sum(sizes)

    def texts(self) -> Iterator[str]:
        for source in self.parts.values():
            yield from source.texts()

    def opened(self, wanted: RowSettings) -> Opened:
        others = [name for name, source in self.parts.items() if source.bos == "auto" and not source.chat]
        if isinstance(self.bos, bool) and others:
            log.info(
                f"data.parts: bos={str(self.bos).lower()} also applies to {', '.join(others)}, because a model has "
                "only one tokenizer."
            )
        tokenizer = wanted.tokenizer or train_tokenizer(self, wanted.cache_dir, wanted.bpe_size, wanted.special_tokens)
        # before any source is tokenized, so that documents of all sources begin and end with the same tokens
        dress(tokenizer, self)
        wanted = wanted._replace(tokenizer=tokenizer)
        opened = {name: _opened(name, source, wanted) for name, source in self.parts.items()}
        train = Mixed({name: source.train for name, source in opened.items()}, self.shares)
        log.info(f"data=mix: {'; '.join(train.describe())}.")
        tokens = [source.tokens for source in opened.values()]
        return Opened(next((chat for chat in tokens if chat.template), tokens[0]), train, _validation_sets(opened))


def _validation_sets(opened: Mapping[str, Opened]) -> dict[str, Rows]:
    """Returns the validation sets of all sources. An unnamed set gets the name of its source, and a named set of a
    nested mixture gets the name <source>_<set>. Raises Refused if two sets would get the same name."""
    sets: dict[str, Rows] = {}
    for part, source in opened.items():
        for below, rows in source.val.items():
            name = f"{part}_{below}" if below else part
            if name in sets:
                raise Refused(f"data.parts: two validation sets would both be named {name}. Rename the part {part}.")
            sets[name] = rows
    return sets


def _opened(name: str, source: Openable, wanted: RowSettings) -> Opened:
    """Opens a source of the mixture. The message of a `Refused` begins with the key of the source."""
    try:
        return source.opened(wanted)
    except Refused as error:
        raise Refused(f"data.parts.{name}: {error}") from None


class Mixed(Rows):
    """The rows of one epoch, numbered source by source. If an epoch reads a row n times, the row has n numbers."""

    def __init__(self, parts: Mapping[str, Rows], shares: Mapping[str, float] | None) -> None:
        self.names, self.parts = list(parts), list(parts.values())
        self.seq_len = self.parts[0].seq_len
        self.positions = any(rows.positions for rows in self.parts)
        self.filler = any(rows.filler for rows in self.parts)
        self.per_row = [_per_row(rows) for rows in self.parts]
        self.shares = shares and [shares[name] for name in self.names]
        self.counts = [len(rows) for rows in self.parts] if shares is None else self._counts()
        self.ends = np.cumsum(self.counts)  # (sources,): exclusive end of each source's row numbers
        # an incomplete last pass over a source reads a random selection of its rows, which is the same in every epoch
        self.last_pass = [np.random.default_rng(0).permutation(len(rows)) for rows in self.parts]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _counts(self) -> list[int]:
        """Returns the number of rows that an epoch reads from each source, including repetitions."""
        if 0 in self.per_row:
            name = self.names[self.per_row.index(0)]
            raise Refused(
                f"data.shares: no sampled row of {name} has a token in the loss, so its share of the tokens cannot be "
                f"set. Leave {name} out, or type data.shares=null."
            )
        shares = np.array(self.shares, float) / self.per_row
        sizes = np.array([len(rows) for rows in self.parts])
        counts = np.maximum(sizes, np.rint(shares * (sizes / shares).max()))
        if counts.sum() > MOST:
            much = self.names[int((counts / sizes).argmax())]
            raise Refused(
                f"data.shares: an epoch would repeat {much} {int((counts / sizes).max()):,} times. Give {much} a "
                "smaller share, or more text."
            )
        return counts.astype(int).tolist()

    @property
    def order(self) -> dict:
        orders = [rows.order for rows in self.parts]
        return {"mix": [list(row) for row in zip(self.names, map(len, self.parts), self.counts, orders, strict=True)]}

    def describe(self) -> Iterator[str]:
        """Yields a description of each source: its share of the labels, and how many times an epoch passes over the
        source."""
        tokens = np.array(self.counts) * self.per_row
        shares = [None] * len(tokens) if self.shares is None else np.array(self.shares) / sum(self.shares)
        for name, share, typed, count, rows in zip(
            self.names, tokens / tokens.sum(), shares, self.counts, self.parts, strict=True
        ):
            requested = "" if typed is None else f" ({typed:.1%} requested)"
            yield f"{name}: {share:.1%} of the tokens in the loss{requested}, {count / len(rows):.2f} passes per epoch"

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        shape = len(indices), self.seq_len
        ids, labels = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
        positions = torch.arange(self.seq_len).repeat(len(indices), 1) if self.positions else None
        real = torch.ones(shape, dtype=torch.bool) if self.filler else None
        numbers = np.searchsorted(self.ends, indices, side="right")  # (B,): the index of each row's source
        for number in np.unique(numbers):
            here = np.flatnonzero(numbers == number)
            batch = self.parts[number].micro_batch(self._rows(number, np.asarray(indices)[here]))
            ids[here], labels[here] = batch.input_ids, batch.labels
            if batch.position_ids is not None:
                positions[here] = batch.position_ids
            if batch.real is not None:
                real[here] = batch.real
        return MicroBatch(ids, labels, positions, real)

    def starts(self, row: int) -> list[int]:
        number = int(np.searchsorted(self.ends, row, side="right"))
        return self.parts[number].starts(int(self._rows(number, np.array([row]))[0]))

    def _rows(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Maps row numbers of the mixture to row numbers of a source: complete passes in order, then a random selection
        for an incomplete last pass. Args: number: index of the source; indices: row numbers of the mixture that belong
        to this source."""
        size = len(self.parts[number])
        at = indices - (self.ends[number] - self.counts[number])
        full_passes = self.counts[number] // size * size
        return np.where(at < full_passes, at % size, self.last_pass[number][at % size])


def _per_row(rows: Rows) -> float:
    """Returns the average number of labels in a row, estimated from at most LOOKED_AT evenly spaced rows."""
    sample = np.unique(np.linspace(0, len(rows) - 1, LOOKED_AT).astype(int))
    return sum(rows.micro_batch(sample[i : i + 1]).learned_tokens for i in range(len(sample))) / len(sample)
