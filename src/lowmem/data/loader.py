"""Makes windows of micro-batches from rows of tokens, in an order that the seed and the epoch determine.

A window contains the micro-batches of one optimizer step. A sequence is a row of a split (`packing.py`), or both rows
of a padded pair (`pairs.py`). An epoch reads every sequence once, in a permutation drawn from (seed, epoch); a stream
is permuted block by block (`stream.py`). The size of micro-batches, the size of windows and the number of devices
decide only where this order is divided; they do not change the order. The exception is packing=padded: sequences are
sorted so that a micro-batch has sequences of similar lengths, and the resulting order also depends on the batch size
and the number of devices.

The process of each device reads the rows of all devices, and keeps the rows of its own device (`Share`).

Each window contains the position at which the next window begins. Training adopts this position only after the
optimizer step of the window, so a resumed run does not skip windows that were prefetched but not trained on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.config.accumulation import WindowSize

IGNORED = -100  # a label that the loss ignores
COUNTS = ("learned_tokens", "weight", "first_tokens")  # values that `MicroBatch.counted` caches


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows that go through the model together. A loss that needs more than tokens and labels uses a subclass, which
    adds tensors whose first dimension has the same size as that of `input_ids`, and overrides `weight`. The sum of a
    window's losses is divided by the sum of the weights of the window's micro-batches; both sums are over all
    devices."""

    UNIT: ClassVar[str] = "tokens"  # unit of `weight`
    # rows per sequence; a sequence is never split across devices, so both rows of a pair stay together
    ROWS: ClassVar[int] = 1

    input_ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, the token that follows each input; IGNORED: not in the loss
    position_ids: Tensor | None = None  # (B, T) int64, from 0 at each document's start; None: from 0 in each row
    real: Tensor | None = None  # (B, T) bool: False for filler after a row's last document; None: no filler

    @cached_property
    def weight(self) -> int:
        """Returns the weight of this micro-batch in the window's mean loss: the number of its learned tokens. A
        subclass may count pairs or answers instead."""
        return self.learned_tokens

    @property
    def titles(self) -> tuple[str, ...]:
        """Returns a name for each row of the first sequence, for display; empty if rows have no names."""
        return ()

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Returns the keyword arguments of the model's forward pass: `input_ids`, and `position_ids` unless it is None.
        If `counted` has cached `first_tokens`, also sets the attribute `counted_first` of the position ids to this
        list, so that `document_attention.py` does not wait for values from the device."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids}
        if (known := vars(self).get("first_tokens")) is not None:
            self.position_ids.counted_first = known
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns a micro-batch in which every tensor is replaced by `change(tensor)`, for example to select rows."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Returns a mapping from field names to tensors, without the fields that are None."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def concatenated(cls, batches: Sequence[Self]) -> Self:
        """Returns one micro-batch with the rows of all batches. An optional tensor must be None in all batches or in
        none."""
        return cls(**{name: torch.cat([batch.tensors[name] for batch in batches]) for name in batches[0].tensors})

    def to(self, device: torch.device, **how: object) -> Self:
        """Returns this micro-batch on a device, with the values that `counted` cached. Lightning calls this
        method for each micro-batch of a window or of a group that is evaluated together. For a GPU, tensors are first
        copied to pinned memory: a copy from pageable memory would make the host wait for all work that is already
        queued on the GPU."""
        pinned = torch.device(device).type == "cuda" and not self.input_ids.is_cuda
        if pinned:
            how = {"non_blocking": True} | how
        moved = self.each(lambda tensor: (tensor.pin_memory() if pinned else tensor).to(device, **how))
        vars(moved).update({name: vars(self)[name] for name in COUNTS if name in vars(self)})
        return moved

    def counted(self) -> Self:
        """Computes and caches `learned_tokens`, `weight` and `first_tokens`, and returns self. Call it while the
        tensors are in host memory, because counting on the GPU would make the host wait for the GPU."""
        vars(self).update({name: getattr(self, name) for name in COUNTS})
        return self

    @property
    def nothing(self) -> Self:
        """Returns a copy of the first sequence, with labels that the loss ignores. A device that has no rows in a
        global micro-batch runs the model on this copy, because all devices must take part in collectives."""
        example = self.each(lambda tensor: tensor[: self.ROWS])
        return replace(example, labels=torch.full_like(example.labels, IGNORED))

    @property
    def input_tokens(self) -> int:
        """Returns the number of input tokens, without filler."""
        return self.input_ids.numel() if self.real is None else int(self.real.sum())

    @cached_property
    def learned_tokens(self) -> int:
        """Returns the number of labels that the loss does not ignore."""
        return int((self.labels != IGNORED).sum())

    @cached_property
    def first_tokens(self) -> list[int] | None:
        """Returns the index of the first token of each document in the concatenated rows, followed by the total number
        of tokens. The filler at the end of a row counts as a document. Returns None if `position_ids` is None."""
        if self.position_ids is None:
            return None
        begins = F.pad(self.position_ids.diff(dim=1) != 1, (1, 0), value=True)  # (B, T)
        return [*begins.flatten().nonzero().flatten().tolist(), begins.numel()]

    @property
    def known_learned_tokens(self) -> int | None:
        """Returns `learned_tokens` if this count is cached, for example by `counted`, else None. Never reads the
        labels, which may be on the device."""
        return vars(self).get("learned_tokens")


class Position(NamedTuple):
    """A position in the data from which training continues: the next sequence is at index `sequence` in the order of
    `epoch`. `window` is the number of windows before this position, since the start of training.

    In a stream, `sequence` counts within a block, and `state` is the stream's state before this block (None before the
    first block of an epoch).
    """

    epoch: int = 0
    sequence: int = 0
    window: int = 0
    state: dict | None = None


START = Position()
NAMED = 8  # maximum number of sequences that a message lists


class Window(NamedTuple):
    """The micro-batches of one optimizer step."""

    micro_batches: list[MicroBatch]
    input_tokens: int  # number of input tokens without filler, on all devices
    learned_tokens: int  # number of labels in the loss, on all devices
    weight: int  # the sum of the losses on all devices is divided by this weight
    end: Position  # position of the next window


class Rows:
    """The base class of the rows of a split. Its length and indices count sequences: rows, or pairs with two rows each
    (`PaddedPairs`). A loader reads sequences by index, in any order (except in a stream, see `numbered`).

    Attributes:
        seq_len: maximum number of input tokens in a row.
        report: counts of included, cut and dropped documents (or pairs or rated answers), for the log; empty if the
            class does not count them.
        without_gaps: True: the rows are consecutive parts of the split, and the loss ignores no label. (The first token
            of the split is an input, but not a label.)
    """

    seq_len: int
    report: Mapping = MappingProxyType({})
    # plural name, in messages, of the items that `report` counts, or of the rows if `report` is empty
    counted = "documents"
    without_gaps = False
    positions = False  # True: micro-batches have `position_ids`
    filler = False  # True: micro-batches have `real`
    numbered = True  # True: rows can be read by index; False for a stream

    @property
    def longest(self) -> int:
        """Returns the length of the longest row in tokens, or an upper bound."""
        return self.seq_len

    def __len__(self) -> int:
        raise NotImplementedError

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        raise NotImplementedError

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> MicroBatch:
        """Returns rows of zeros without padding. Their tensors have the shapes, dtypes and memory layout of real rows
        with `seq_len` tokens. The planner traces the model with these rows."""
        tensors = (torch.zeros(batch_size, seq_len, dtype=torch.int64) for _ in range(3 if cls.positions else 2))
        real = torch.ones(batch_size, seq_len, dtype=torch.bool) if cls.filler else None
        return MicroBatch(*tensors, real=real)

    def loader(self, *how: object) -> "WindowLoader":
        """Returns the loader of these rows. Args: how: the arguments of `WindowLoader` after the rows."""
        return WindowLoader(self, *how)

    def starts(self, row: int) -> list[int]:
        """Returns the indices within a row at which documents begin, and the index at which the filler after the last
        document begins, if any. This method reads the indices from the position ids, and
        returns [0] for rows without position ids."""
        positions = self.micro_batch(np.array([row])).position_ids
        return [0] if positions is None else (positions[0] == 0).nonzero().ravel().tolist()

    @property
    def order(self) -> dict:
        """Returns values that identify the content of all rows. A checkpoint stores `WindowLoader.order`, which
        contains these values, so that a resumed run detects changed data."""
        return {}

    def arranged(self, permutation: np.ndarray, rows_per_step: int) -> np.ndarray:
        """Returns the order of sequences in an epoch. Args: permutation: indices of the sequences, shuffled with a
        generator that is seeded with (seed, epoch); rows_per_step: sequences of a global micro-batch (`Share`)."""
        return permutation

    def grouping(self, rows_per_step: int) -> dict:
        """Returns the values, other than the permutation, that change the result of `arranged`. `WindowLoader.order`
        contains them."""
        return {}


class Share(NamedTuple):
    """A device's share of a global micro-batch: the group of `batch_size` sequences at index `rank`. A global
    micro-batch consists of one micro-batch for each device."""

    batch_size: int  # sequences per micro-batch and device; a pair counts as one sequence
    rank: int = 0
    world_size: int = 1  # number of devices that read different rows

    @property
    def rows_per_step(self) -> int:  # sequences of a global micro-batch
        return self.batch_size * self.world_size

    def places(self, rows: int = 1) -> slice:
        """Returns the slice of this device's rows in a global micro-batch. Args: rows: rows per sequence
        (`MicroBatch.ROWS`)."""
        size = self.batch_size * rows
        return slice(self.rank * size, (self.rank + 1) * size)

    def rows_of(self, read: MicroBatch) -> MicroBatch:
        """Returns this device's rows of a global micro-batch, with cached counts (`counted`). All devices must run the
        same number of micro-batches, so a device without rows gets a sequence without labels (`nothing`)."""
        mine = read.each(lambda tensor: tensor[self.places(read.ROWS)])
        return (mine if len(mine.input_ids) else read.nothing).counted()


class WindowLoader:
    """Yields windows endlessly, beginning at `position`. A window has only the micro-batches of this device, but counts
    of all devices.

    Args:
        share: this device's share of each global micro-batch.
        window_size: called with the index of the epoch and the number of earlier windows; returns the number of
            micro-batches per device in the next window. The last window of an epoch may have fewer.
    """

    def __init__(
        self, sequences: Rows, share: Share, window_size: WindowSize, seed: int, position: Position = START
    ) -> None:
        self.sequences, self.share, self.window_size = sequences, share, window_size
        self.seed, self.position = seed, position

    @property
    def order(self) -> dict[str, int | str]:
        """Returns the values on which the order of sequences depends. A checkpoint stores these values together
        with a position, and the position is valid only while the values are unchanged."""
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
        """Returns the indices of the sequences from `start` to `end` in the order of the epoch. If `end` is in a later
        epoch, the indices end with the epoch of `start`."""
        until = end.sequence if end.epoch == start.epoch else len(self.sequences)
        return self._permutation(start.epoch)[start.sequence : until].tolist()

    def described(self, start: Position, end: Position) -> str:
        """Returns a description of the sequences from `start` to `end`, for messages."""
        read = self.between(start, end)
        listed = ", ".join(map(str, read[:NAMED])) + (" ..." if len(read) > NAMED else "")
        return f"sequences {listed} of the training split ({len(read)} in all, epoch {start.epoch})"

    def _window(self, order: np.ndarray, start: Position) -> Window:
        per_step, end = self.share.rows_per_step, self.after(start)
        stop = end.sequence or len(order)
        micro_batches, every = [], []
        for begin in range(start.sequence, stop, per_step):
            rows = order[begin : min(begin + per_step, stop)]  # rows of all devices
            batch = self.sequences.micro_batch(rows)
            every.append((batch.input_tokens, batch.learned_tokens, batch.weight))
            micro_batches.append(self.share.rows_of(batch))
        return Window(micro_batches, *map(sum, zip(*every, strict=True)), end)

    def after(self, start: Position) -> Position:
        """Returns the end position of the window that begins at `start`."""
        stop = start.sequence + self.share.rows_per_step * self.window_size(start.epoch, start.window)
        if stop < len(self.sequences):
            return Position(start.epoch, stop, start.window + 1)
        return Position(start.epoch + 1, 0, start.window + 1)

    def windows_in(self, epochs: int) -> int:
        """Returns the number of windows in `epochs` epochs, without reading data."""
        position = START
        while position.epoch < epochs:
            position = self.after(position)
        return position.window


class ValidationLoader:
    """Yields this device's micro-batches of the first `limit` sequences of a validation set, in order.

    Args:
        share: this device's share of each global micro-batch, as in training.
        name: name of the validation set; empty if there is only one set.
    """

    def __init__(self, sequences: Rows, share: Share, limit: int, name: str = "") -> None:
        self.sequences, self.share, self.name = sequences, share, name
        self.count = min(len(sequences), limit)

    @property
    def predicted(self) -> int:
        """Returns the number of labels that all devices together evaluate. This number is valid only for rows with
        `without_gaps`, which have `seq_len` labels each."""
        return self.count * self.sequences.seq_len

    def __len__(self) -> int:
        return -(-self.count // self.share.rows_per_step)

    def __iter__(self) -> Iterator[MicroBatch]:
        step = self.share.rows_per_step
        for begin in range(0, self.count, step):
            yield self.share.rows_of(self.sequences.micro_batch(np.arange(begin, min(begin + step, self.count))))


class Groups:
    """Yields the micro-batches of a validation set in groups that are evaluated together. Args: size: micro-batches per
    group."""

    def __init__(self, micro_batches: ValidationLoader, size: int = 1) -> None:
        self.micro_batches, self.size = micro_batches, size

    def __len__(self) -> int:
        return -(-len(self.micro_batches) // self.size)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        following = iter(self.micro_batches)
        while group := list(islice(following, self.size)):
            yield group
