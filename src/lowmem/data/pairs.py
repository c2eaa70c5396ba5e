"""Makes rows of preference pairs: a chosen and a rejected answer to one prompt.

A pair is two consecutive documents in the token store: the prompt with the chosen answer, then the prompt with the
rejected answer. Only tokens of the answers are labels. `PaddedPairs` puts each answer, preceded by its prompt, into a
row of its own; the two rows of a pair are adjacent. `PackedPairs` fills rows with complete pairs. A pair is never split
across micro-batches or devices, because its loss depends on both answers. `rated.py` makes rows of rated answers, whose
loss does not compare the two answers of a pair.

A micro-batch contains the number of labels of each answer, so that pairs can be counted without reading their tokens.
For losses with a reference model, a micro-batch also contains the log-probabilities of the answers under this model
(`training/reference.py`).
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from lowmem.data.loader import MicroBatch
from lowmem.data.packing import Documents, NothingToLearn, Padded, Pieces, TooLong, describe_split, labels_that_count
from lowmem.data.token_store import Split
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AnswerBatch(MicroBatch):
    """A micro-batch of prompts with answers, for losses that depend on the log-probability of each answer."""

    ANSWERS: ClassVar[int] = 1  # answers per unit: 2 for a pair, 1 for a rated answer

    lengths: Tensor | None = None  # (B, K) int64: number of labels of each of the K answers of a row; 0: no answer
    reference: Tensor | None = None  # (B, K) fp64: log-probabilities under the reference model; None: not needed

    @cached_property
    def weight(self) -> int:
        return int((self.lengths > 0).sum()) // self.ANSWERS

    @property
    def compared(self) -> tuple[Self, ...]:
        """Returns the micro-batches for which the reference model computes log-probabilities. Together, these
        log-probabilities fill the two columns of `AnswerRows.reference`: pairs need one micro-batch, and rated answers
        one for each column."""
        return (self,)

    @property
    def nothing(self) -> Self:
        nothing = super().nothing
        return replace(nothing, lengths=torch.zeros_like(nothing.lengths))

    @property
    def answers(self) -> Tensor:
        """Returns a (B, T) tensor: for each token, the index of its answer in the flattened `lengths`. The filler after
        the last answer of a row, which has no labels, gets the row's next index, or the row's last index if all are in
        use."""
        rows, in_a_row = self.lengths.shape
        first = torch.arange(rows, device=self.labels.device)[:, None] * in_a_row
        if self.position_ids is None:
            return first.expand_as(self.labels)
        return first + ((self.position_ids == 0).cumsum(1) - 1).clamp_(max=in_a_row - 1)


@dataclass(frozen=True, eq=False)
class PairBatch(AnswerBatch):
    """A micro-batch of pairs. Read row by row, `lengths` alternates between chosen and rejected answers."""

    UNIT: ClassVar[str] = "pairs"
    ROWS: ClassVar[int] = 2
    ANSWERS: ClassVar[int] = 2

    @property
    def titles(self) -> tuple[str, ...]:
        return "chosen", "rejected"


@dataclass(frozen=True, eq=False)
class PackedPairBatch(PairBatch):
    """A micro-batch of pairs in which each row contains one or several complete pairs."""

    ROWS: ClassVar[int] = 1

    @property
    def titles(self) -> tuple[str, ...]:
        return ()


class AnswerRows:
    """The base class of rows of answers. It counts, cuts and drops units (pairs or rated answers) instead of single
    documents, so both documents of a pair are kept or dropped together. If a unit is cut (too_long=cut), each of its
    documents is truncated to at most `_room` tokens. The first removed token is still used, as the label of the last
    input."""

    fits: str  # description, in messages, of the tokens that must fit into seq_len
    batch: type[AnswerBatch]
    # log-probabilities under the reference model, (units, 2) fp64 (columns: see `CausalLM.predict_step`); NaN: not
    # computed yet; None: the loss has no reference model
    reference: np.ndarray | None = None

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> AnswerBatch:
        rows, in_a_row = batch_size * cls.batch.ROWS, cls.batch.ANSWERS // cls.batch.ROWS
        return cls.batch(
            **super().example(rows, seq_len).tensors,
            lengths=torch.full((rows, in_a_row), seq_len // in_a_row),
            reference=torch.zeros(rows, in_a_row, dtype=torch.float64),
        )

    def _documents(self, lengths: np.ndarray, name: str) -> np.ndarray:
        """Returns the indices of the documents of each unit, (units, ANSWERS).

        Args:
            lengths: (documents,), the number of tokens of each document; 0: the empty document in place of a missing
                answer.
        """
        raise NotImplementedError

    def _chosen(self, name: str) -> tuple[Pieces, dict]:
        """Returns the pieces of the included units (ANSWERS consecutive pieces per unit), and counts of included, cut
        and dropped units. A unit is included if each of its answers has a label. Also sets two attributes, arrays of
        shape (included units, ANSWERS): `labels`, the number of labels of each answer, and `numbers`, the index of each
        answer's document in the split.

        Raises:
            TooLong: with too_long=refuse, a unit is too long.
            NothingToLearn: no unit is included.
            Refused: see `_documents`.
        """
        ends = np.asarray(self.split.ends, np.int64)
        lengths = np.diff(ends, prepend=0)
        documents = self._documents(lengths, name)
        starts, lengths = (ends - lengths)[documents], lengths[documents]
        need, limit, unit = self._need(lengths), self.seq_len, self.batch.UNIT.removesuffix("s")
        above = need > limit
        if self.too_long == "refuse" and above.any():
            raise TooLong(
                f"data.too_long=refuse: the {name} split has {quantity(int(above.sum()), unit)} longer than "
                f"seq_len={limit} (of {len(lengths):,}), the longest with {quantity(int(need.max()), 'token')} "
                f"({self.fits}). Type seq_len={int(need.max())} if the model has that many positions, or "
                "data.too_long=drop or cut.",
                int(documents[above.argmax(), 0]),
            )
        is_cut = above[:, None] if self.too_long == "cut" else False
        kept = np.where(is_cut, np.minimum(lengths, self._room), lengths)
        usable = np.ones(len(lengths), bool) if self.too_long == "cut" else ~above
        both = Pieces(starts[usable].ravel(), kept[usable].ravel(), (kept == lengths)[usable].ravel())
        labels = labels_that_count(self.split, both).reshape(-1, self.batch.ANSWERS)
        learned = (labels > 0).all(1)
        self.labels, self.numbers = labels[learned], documents[usable][learned]  # (units, ANSWERS)
        report = {
            "documents": int(learned.sum()),
            "cut": int(above.sum()) if self.too_long == "cut" else 0,
            "too_long": int(above.sum()) if self.too_long == "drop" else 0,
            "nothing_to_learn": int((~learned).sum()),
        }
        if not learned.any():
            where = " in each of its answers" if self.batch.ANSWERS > 1 else ""
            raise NothingToLearn(name, f"{where} at seq_len={limit}", report | {"rows": 0}, unit)
        return both.chosen(np.repeat(learned, self.batch.ANSWERS)), report

    @property
    def counted(self) -> str:
        return self.batch.UNIT

    @property
    def unit_count(self) -> int:
        """Returns the number of pairs, or of rated answers."""
        return len(self.labels)


class _Pairs(AnswerRows):
    """The base class of `PaddedPairs` and `PackedPairs`."""

    batch: type[PairBatch]

    def _documents(self, lengths: np.ndarray, name: str) -> np.ndarray:
        """Returns the indices of both documents of each pair, (pairs, 2).

        Raises:
            Refused: some records have a single rated answer instead of a pair.
        """
        if rated := int((lengths == 0).sum()):
            raise Refused(
                f"loss=: the {name} split has {quantity(rated, 'record')} with a single rated answer (of "
                f"{len(lengths) // 2:,}), but this loss compares two answers to the same prompt. Type loss=kto, which "
                "accepts both kinds of record."
            )
        return np.arange(len(lengths)).reshape(-1, 2)

    def _batch(self, tokens: MicroBatch, pairs: np.ndarray) -> PairBatch:
        """Returns a micro-batch of pairs: `tokens` with `lengths` and `reference`.

        Args:
            pairs: the indices of the pairs in each row, a (B, K / 2) array; if each pair has two rows, a (B / 2, 1)
                array. -1: no pair.
        """
        real, rows = pairs[..., None] >= 0, len(tokens.input_ids)
        lengths = np.where(real, self.labels[pairs], 0).reshape(rows, -1)
        values = None
        if self.reference is not None:
            values = torch.from_numpy(np.where(real, self.reference[pairs], 0.0).reshape(rows, -1))
        return self.batch(**tokens.tensors, lengths=torch.from_numpy(lengths), reference=values)


class PaddedAnswers(AnswerRows, Padded):
    """The base class of rows with one answer each. Rows are padded to the longest row of the global micro-batch. An
    index selects a unit: the row of a rated answer, or both rows of a pair. The length of a pair is the length of its
    longer row."""

    fits = "prompt and answer"

    def _need(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.max(1)

    @property
    def _room(self) -> int:
        return self.seq_len

    @property
    def lengths(self) -> np.ndarray:
        return self.pieces.lengths.reshape(-1, self.batch.ANSWERS).max(1)

    def units_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns a (units,) array: the units at these indices, in the order in which `micro_batch` puts them."""
        return np.asarray(indices)

    def arranged_by_length(self, indices: np.ndarray) -> np.ndarray:
        """Returns these indices sorted by length, the longest first."""
        return indices[np.argsort(-self.lengths[indices], kind="stable")]


class PaddedPairs(_Pairs, PaddedAnswers):
    """Pairs with one row for each answer."""

    batch = PairBatch

    def micro_batch(self, indices: np.ndarray) -> PairBatch:
        both = (2 * np.asarray(indices)[:, None] + [0, 1]).ravel()
        return self._batch(super().micro_batch(both), np.asarray(indices)[:, None])


class PackedPairs(_Pairs, Documents):
    """Rows that are filled with complete pairs. An index selects a row. The length of a pair is the sum of the lengths
    of its two pieces."""

    fits, batch, stored_as = "both answers, each with its prompt", PackedPairBatch, "pairs"

    def _need(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.sum(1)

    @property
    def _room(self) -> int:
        return self.seq_len // 2

    @property
    def lengths(self) -> np.ndarray:
        return self.pieces.lengths.reshape(-1, 2).sum(1)

    def documents(self, row: int) -> np.ndarray:
        return (2 * self.units(row)[:, None] + [0, 1]).ravel()

    def units_of(self, indices: np.ndarray) -> np.ndarray:
        return np.concatenate([self.units(int(index)) for index in indices])

    def arranged_by_length(self, indices: np.ndarray) -> np.ndarray:
        return indices  # all rows have equal length

    def micro_batch(self, indices: np.ndarray) -> PackedPairBatch:
        units = [self.units(int(index)) for index in indices]
        pairs = np.full((len(units), max(map(len, units))), -1)
        for row, own in enumerate(units):
            pairs[row, : len(own)] = own
        return self._batch(super().micro_batch(indices), pairs)


PACKINGS = {"padded": PaddedPairs, "documents": PackedPairs}
PairRows = PaddedPairs | PackedPairs


def rows(split: Split, seq_len: int, packing: str, too_long: str, name: str) -> PairRows:
    """Returns rows of pairs.

    Args:
        name: name of the split, train or val.

    Raises:
        Refused: see `AnswerRows._chosen` and `_Pairs._documents`; or pairs do not support this packing, or the packed
            order cannot be written to cache_dir.
    """
    made = rows_class(packing)(split, seq_len, too_long, name)
    log.info(describe_split(made.report, name, packing, "pair"))
    return made


def rows_class(packing: str) -> type[PairRows]:
    if packing not in PACKINGS:
        raise Refused(
            f"data.packing={packing}: pairs support {' and '.join(PACKINGS)} only. Type data.packing="
            f"{' or data.packing='.join(PACKINGS)}."
        )
    return PACKINGS[packing]
