"""Makes windows of micro-batches from rows of tokens, in an order that depends on the seed alone.

An epoch reads every sequence (a row of a split, `packing.py`) once, in a permutation drawn from (seed, epoch). The
sizes of micro-batches and windows and the number of devices only divide this order, and never change it. The only
exception is packing=padded, which sorts rows so that micro-batches have rows of similar length.

A window carries the position *after* it. Training stores that position when the window is done, so a resume never skips
a window that was prefetched but not trained on.
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
COUNTS = ("learned_tokens", "weight", "first_tokens")  # counts of a micro-batch, which are cached


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows that go through the model together. A loss that needs more than tokens uses a subclass, which adds tensors
    with the number of rows of `input_ids`, and defines `weight`, the divisor of the sum of losses."""

    UNIT: ClassVar[str] = "tokens"  # unit of `weight`
    ROWS: ClassVar[int] = 1  # rows of an example: both rows of a pair stay on one device

    input_ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, the token that follows each input; -100: ignored by the loss
    position_ids: Tensor | None = None  # (B, T) int64, from 0 at each document's start; None: each row is one document
    real: Tensor | None = None  # (B, T) bool: False for filler after a row's last document; None: no filler

    @cached_property
    def weight(self) -> int:
        """Returns the weight in the mean of the window. Here the learned tokens; a subclass may count pairs."""
        return self.learned_tokens

    @property
    def titles(self) -> tuple[str, ...]:
        """Returns names for the rows of the first example, for display; empty if rows need no names."""
        return ()

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Returns the keyword arguments of a model, including `use_cache=False`: with a cache, transformers ignores
        where documents begin. Position ids carry `counted_first`, computed by `counted`, so that
        `document_attention.py` need not read them from the device."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids}
        if (known := vars(self).get("first_tokens")) is not None:
            self.position_ids.counted_first = known
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Returns a copy with `change` applied to every tensor, for example to select rows."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Returns name -> tensor, without tensors that are None."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def concatenated(cls, batches: Sequence[Self]) -> Self:
        """Returns one micro-batch with the rows of all batches, which must have the same fields."""
        return cls(**{name: torch.cat([batch.tensors[name] for batch in batches]) for name in batches[0].tensors})

    def to(self, device: torch.device, **how: object) -> Self:
        """Moves the tensors to a device; Lightning calls this for a window. Cached counts are kept. Tensors are copied
        to a GPU from pinned memory: with pageable memory, the host would wait until all earlier work of the GPU is
        done."""
        pinned = torch.device(device).type == "cuda" and not self.input_ids.is_cuda
        if pinned:
            how = {"non_blocking": True} | how
        moved = self.each(lambda tensor: (tensor.pin_memory() if pinned else tensor).to(device, **how))
        vars(moved).update({name: vars(self)[name] for name in COUNTS if name in vars(self)})
        return moved

    def counted(self) -> Self:
        """Counts labels and documents while they are in host memory, and returns self. Counting on the GPU would make
        the host wait."""
        vars(self).update({name: getattr(self, name) for name in COUNTS})
        return self

    @property
    def nothing(self) -> Self:
        """Returns the first example without labels, for a device that has no rows left but must take part in
        collectives."""
        example = self.each(lambda tensor: tensor[: self.ROWS])
        return replace(example, labels=torch.full_like(example.labels, IGNORED))

    @property
    def input_tokens(self) -> int:
        """Returns the number of tokens that the model computes, without padding."""
        return self.input_ids.numel() if self.real is None else int(self.real.sum())

    @cached_property
    def learned_tokens(self) -> int:
        """Returns the number of tokens with a label, which the loss learns from."""
        return int((self.labels != IGNORED).sum())

    @cached_property
    def first_tokens(self) -> list[int] | None:
        """Returns the start of each document if all rows are concatenated, and the end; None: each row is one
        document."""
        if self.position_ids is None:
            return None
        begins = F.pad(self.position_ids.diff(dim=1) != 1, (1, 0), value=True)  # (B, T)
        return [*begins.flatten().nonzero().flatten().tolist(), begins.numel()]

    @property
    def known_learned_tokens(self) -> int | None:
        """Returns `learned_tokens` if `counted` has counted them, else None. Never reads labels."""
        return vars(self).get("learned_tokens")


class Position(NamedTuple):
    """The position from which training continues: `sequence` of `epoch` is read next, and `window` windows are done.

    In a stream, `sequence` counts within a block, and `state` is the stream's state before this block.
    """

    epoch: int = 0
    sequence: int = 0
    window: int = 0
    state: dict | None = None


START = Position()


class Window(NamedTuple):
    """The micro-batches of one optimizer step."""

    micro_batches: list[MicroBatch]
    input_tokens: int  # tokens that the model computes, without padding, on all devices
    learned_tokens: int  # tokens with a label, on all devices
    weight: int  # divides the sum of the losses of all devices
    end: Position  # position of the next window


class Rows:
    """The base class of a split's rows, which a loader reads in any order. `packing.py` has the kinds.

    Args:
        seq_len: maximum tokens of a row.
        report: counts of included, cut and dropped documents, for the log.
        without_gaps: rows are consecutive, and every token except the split's first is a label.
    """

    seq_len: int
    report: Mapping = MappingProxyType({})
    counted = "documents"  # name in messages: the items that training counts
    without_gaps = False
    positions = False  # micro-batches have `position_ids`
    filler = False  # micro-batches have `real`
    numbered = True  # rows have numbers by which they can be read; False for a stream

    @property
    def longest(self) -> int:
        """Returns the maximum length of a micro-batch in tokens."""
        return self.seq_len

    def __len__(self) -> int:
        raise NotImplementedError

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        raise NotImplementedError

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> MicroBatch:
        """Returns full rows of zeros with the tensors and the memory of real rows, for a trace by shape."""
        tensors = (torch.zeros(batch_size, seq_len, dtype=torch.int64) for _ in range(3 if cls.positions else 2))
        real = torch.ones(batch_size, seq_len, dtype=torch.bool) if cls.filler else None
        return MicroBatch(*tensors, real=real)

    def loader(self, *how: object) -> "WindowLoader":
        """Returns the loader of these rows. Args: how: further arguments of `WindowLoader`."""
        return WindowLoader(self, *how)

    def starts(self, row: int) -> list[int]:
        """Returns the indices in a row at which documents begin, and at which the filler after the last document
        begins."""
        positions = self.micro_batch(np.array([row])).position_ids
        return [0] if positions is None else (positions[0] == 0).nonzero().ravel().tolist()

    @property
    def order(self) -> dict:
        """Returns, for checkpoints, everything that determines the numbering of rows besides their count and length."""
        return {}

    def arranged(self, permutation: np.ndarray, rows_per_step: int) -> np.ndarray:
        """Returns the order of rows in an epoch. Args: permutation: row numbers, permuted by the seed; rows_per_step:
        rows of a micro-batch of all devices."""
        return permutation

    def grouping(self, rows_per_step: int) -> dict:
        """Returns the values that `arranged` depends on besides the permutation."""
        return {}


class Share(NamedTuple):
    """A device's share of a global micro-batch: the rank-th group of `batch_size` rows."""

    batch_size: int  # sequences per micro-batch and device
    rank: int = 0
    world_size: int = 1  # number of devices that read different rows

    @property
    def rows_per_step(self) -> int:  # rows of one micro-batch of all devices
        return self.batch_size * self.world_size

    def places(self, rows: int = 1) -> slice:
        """Returns the slice of this device's examples. Args: rows: rows per example."""
        size = self.batch_size * rows
        return slice(self.rank * size, (self.rank + 1) * size)

    def rows_of(self, read: MicroBatch) -> MicroBatch:
        """Returns this device's rows, `counted`. All devices have equally many micro-batches; a device without rows
        gets an example without labels."""
        mine = read.each(lambda tensor: tensor[self.places(read.ROWS)])
        return (mine if len(mine.input_ids) else read.nothing).counted()


class WindowLoader:
    """Yields windows without end, from `position` on.

    Args:
        window_size: the number of micro-batches of a window. The last window of an epoch may have fewer.
    """

    def __init__(
        self, sequences: Rows, share: Share, window_size: WindowSize, seed: int, position: Position = START
    ) -> None:
        self.sequences, self.share, self.window_size = sequences, share, window_size
        self.seed, self.position = seed, position

    @property
    def order(self) -> dict[str, int | str]:
        """Returns everything that the order of sequences depends on. A position is valid only for the order it was
        saved with."""
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
        """Returns the indices of the sequences between two positions."""
        until = end.sequence if end.epoch == start.epoch else len(self.sequences)
        return self._permutation(start.epoch)[start.sequence : until].tolist()

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
    """Yields the first `limit` sequences of a validation set, in order, in micro-batches of the training size.

    Args:
        name: name of the validation set; empty if there is only one set.
    """

    def __init__(self, sequences: Rows, share: Share, limit: int, name: str = "") -> None:
        self.sequences, self.share, self.name = sequences, share, name
        self.count = min(len(sequences), limit)

    @property
    def predicted(self) -> int:
        """Returns the number of predicted tokens in rows without gaps: all tokens but the first."""
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
