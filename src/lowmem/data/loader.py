"""From rows of tokens to windows of micro-batches, in an order that depends on the seed alone.

An epoch visits every sequence, which is a row of a split (`packing.py`), once, in a permutation drawn from (seed,
epoch). How many sequences make a micro-batch, how many micro-batches a window and how many devices share them changes
where the cuts fall, never the order; only where rows are padded, those of like length have to stand together.

A window carries the position that stands *after* it. Whoever completes the window keeps that position, so a
prefetched window that was never trained on cannot be skipped by a resume.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowmem.accumulation import WindowSize

IGNORED = -100  # a label that is not to be learnt


class MicroBatch(NamedTuple):
    """Sequences that go through the model together."""

    input_ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, the token that follows each input; -100: not to be learnt
    position_ids: Tensor | None = None  # (B, T) int64, from 0 at each document's start; None: a row is one

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What a model is called with, beside `use_cache=False`: a cache hides from it where documents begin."""
        positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
        return {"input_ids": self.input_ids, **positions}

    def each(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """The same of every tensor: a part of the rows, or all of them on another device."""
        return MicroBatch(*(None if part is None else change(part) for part in self))

    @property
    def nothing(self) -> "MicroBatch":
        """Its first row, of which no token counts: for who has no row of his own, and takes part."""
        one = self.each(lambda part: part[:1])
        return one._replace(labels=torch.full_like(one.labels, IGNORED))

    @property
    def tokens(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORED).sum())


class Position(NamedTuple):
    """Where training goes on: `sequence` of `epoch` is the next to be read, `window` counts from the start. Of a stream
    it is a sequence of the block before which the stream had this `state`."""

    epoch: int = 0
    sequence: int = 0
    window: int = 0
    state: dict | None = None


START = Position()


class Window(NamedTuple):
    """The micro-batches of one optimizer step."""

    micro_batches: list[MicroBatch]
    tokens: int  # of the whole window
    end: Position  # of the next window


class Rows:
    """What a split is to a loader: rows that are read in any order. `packing.py` has the kinds.

    Args:
        seq_len: tokens of a row, at most.
        report: counts of what became of the documents, for the log.
        without_gaps: whether row after row each token but the split's first is predicted, and counts.
    """

    seq_len: int
    report: Mapping = MappingProxyType({})
    without_gaps = False
    positions = False  # micro-batches have `position_ids`
    numbered = True  # rows can be counted, and read by their numbers; those of a stream cannot

    def __len__(self) -> int:
        raise NotImplementedError

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        raise NotImplementedError

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> MicroBatch:
        """The planner traces this by shape: full rows of zeros, in as many tensors and as much memory as real ones."""
        parts = (torch.zeros(batch_size, seq_len, dtype=torch.int64) for _ in range(3 if cls.positions else 2))
        return MicroBatch(*parts)

    def loader(self, *how: object) -> "WindowLoader":
        """Args: how: what `WindowLoader` takes behind the rows."""
        return WindowLoader(self, *how)

    def starts(self, row: int) -> list[int]:
        """Where documents begin in a row, and what follows the last of them."""
        positions = self.micro_batch(np.array([row])).position_ids
        return [0] if positions is None else (positions[0] == 0).nonzero().ravel().tolist()

    @property
    def order(self) -> dict:
        """What the numbers of the rows depend on, besides how many there are and how long they may be."""
        return {}

    def arranged(self, permutation: np.ndarray, rows_per_step: int) -> np.ndarray:
        """Returns the order of an epoch. Args: permutation: drawn from the seed; rows_per_step: of all devices."""
        return permutation

    def grouping(self, rows_per_step: int) -> dict:
        """What of it `arranged` has used."""
        return {}


class Share(NamedTuple):
    """A device's rows among those that all devices read at once: the rank-th `batch_size`."""

    batch_size: int  # sequences per micro-batch and device
    rank: int = 0
    world_size: int = 1  # devices that read rows of their own

    @property
    def rows_per_step(self) -> int:  # of one micro-batch of all devices
        return self.batch_size * self.world_size

    def of(self, read: MicroBatch) -> MicroBatch:
        """Returns this device's rows. All devices have as many micro-batches, and the last ones may be without a token
        that counts."""
        start = self.rank * self.batch_size
        mine = read.each(lambda rows: rows[start : start + self.batch_size])
        return mine if len(mine.input_ids) else read.nothing


class WindowLoader:
    """Windows without end, from `position` on.

    Args:
        window_size: how many micro-batches a window has; the last of an epoch has what is left.
    """

    def __init__(
        self, sequences: Rows, share: Share, window_size: WindowSize, seed: int, position: Position = START
    ) -> None:
        self.sequences, self.share, self.window_size = sequences, share, window_size
        self.seed, self.position = seed, position

    @property
    def order(self) -> dict[str, int | str]:
        """What the order of the sequences depends on: a position means nothing in another one."""
        ours = {"sequences": len(self.sequences), "seq_len": self.sequences.seq_len, "seed": self.seed}
        return ours | self.sequences.order | self.sequences.grouping(self.share.rows_per_step)

    def __iter__(self) -> Iterator[Window]:
        position = self.position
        while True:
            order, epoch = self._permutation(position.epoch), position.epoch
            while position.epoch == epoch:
                window = self._window(order, position)
                yield window
                position = window.end

    def _permutation(self, epoch: int) -> np.ndarray:
        drawn = np.random.default_rng([self.seed, epoch]).permutation(len(self.sequences))
        return self.sequences.arranged(drawn, self.share.rows_per_step)

    def between(self, start: Position, end: Position) -> list[int]:
        """The sequences of the window that stands between two positions."""
        until = end.sequence if end.epoch == start.epoch else len(self.sequences)
        return self._permutation(start.epoch)[start.sequence : until].tolist()

    def _window(self, order: np.ndarray, start: Position) -> Window:
        per_step, end = self.share.rows_per_step, self._after(start)
        stop = end.sequence or len(order)
        micro_batches, tokens = [], 0
        for first in range(start.sequence, stop, per_step):
            rows = order[first : min(first + per_step, stop)]  # of all devices
            batch = self.sequences.micro_batch(rows)
            tokens += batch.tokens
            micro_batches.append(self.share.of(batch))
        return Window(micro_batches, tokens, end)

    def _after(self, start: Position) -> Position:
        """Where the window that begins at `start` ends."""
        stop = start.sequence + self.share.rows_per_step * self.window_size(start.epoch, start.window)
        if stop < len(self.sequences):
            return Position(start.epoch, stop, start.window + 1)
        return Position(start.epoch + 1, 0, start.window + 1)

    def windows_in(self, epochs: int) -> int:
        """Of so many epochs from the start on; nothing is read."""
        position = START
        while position.epoch < epochs:
            position = self._after(position)
        return position.window


class ValidationLoader:
    """The first `limit` sequences of a validation set, in order, in micro-batches of the training size.

    Args:
        name: empty where there is no other set.
    """

    def __init__(self, sequences: Rows, share: Share, limit: int, name: str = "") -> None:
        self.sequences, self.share, self.name = sequences, share, name
        self.count = min(len(sequences), limit)

    @property
    def predicted(self) -> int:
        """How many tokens of the split are labels: from its second on."""
        return self.count * self.sequences.seq_len

    def __len__(self) -> int:
        return -(-self.count // self.share.rows_per_step)

    def __iter__(self) -> Iterator[MicroBatch]:
        step = self.share.rows_per_step
        for first in range(0, self.count, step):
            yield self.share.of(self.sequences.micro_batch(np.arange(first, min(first + step, self.count))))
