"""Makes rows of rated answers for `loss=kto`. Each answer is rated desirable or undesirable, and a prompt may have only
one answer.

A record is two documents in the token store (`pairs.py`): first the prompt with the desirable answer, then the prompt
with the undesirable answer. A pair has both answers. If a record has a single rated answer, the document of the missing
answer is empty. So each document with tokens is a rated answer: desirable if the document's index is even, undesirable
if it is odd.

KTO compares the reward of an answer with the rewards of mismatched answers. So a micro-batch has two rows for each
answer: a row with the answer after its own prompt, and a mismatched row, in which the same prompt is followed by the
next answer in the split that belongs to a different prompt. The mismatched row of an answer is the same in every epoch,
so the reference model computes its log-probability only once. Mismatched rows are computed without gradients.
"""

import logging
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lowmem.data.loader import IGNORED
from lowmem.data.packing import FILLER, describe_split
from lowmem.data.pairs import AnswerBatch, PaddedAnswers
from lowmem.data.token_store import Split
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

log = logging.getLogger(__name__)

ONE_KIND = {  # split -> end of the warning that all its answers have the same rating
    "train": "so the loss has nothing to contrast them with. Check data.label=, add answers of the other kind, or "
    "train on desirable answers with data=jsonl or data=chat.",
    "val": "so metrics of the other kind stay empty and early_stop.watch=accuracy never stops the run. Type "
    "data.val_path=<a file with both kinds>, or a larger data.val_fraction= if validation comes from data.path.",
}


@dataclass(frozen=True, eq=False)
class RatedBatch(AnswerBatch):
    """A micro-batch of rated answers, with one row and one mismatched row for each answer."""

    UNIT: ClassVar[str] = "answers"

    desirable: Tensor | None = None  # (B, 1) bool
    mismatched_ids: Tensor | None = None  # (B, S) int64: each prompt, followed by its mismatched answer
    mismatched_labels: Tensor | None = None  # (B, S) int64
    mismatched_reference: Tensor | None = None  # (B, 1) fp64, like `reference`

    @property
    def titles(self) -> tuple[str, ...]:
        return ("desirable" if self.desirable[0] else "undesirable",)

    @property
    def compared(self) -> tuple[Self, ...]:
        return self, self.mismatched

    @property
    def mismatched(self) -> Self:
        """Returns a micro-batch that consists of the mismatched rows."""
        return RatedBatch(
            self.mismatched_ids,
            self.mismatched_labels,
            lengths=(self.mismatched_labels != IGNORED).sum(1, keepdim=True),
            desirable=self.desirable,
            reference=self.mismatched_reference,
        )

    @property
    def nothing(self) -> Self:
        nothing = super().nothing
        return replace(nothing, mismatched_labels=torch.full_like(nothing.mismatched_labels, IGNORED))


class Answer(NamedTuple):
    """The tokens after a prompt."""

    ids: np.ndarray  # (tokens,)
    learned: np.ndarray  # (tokens,) bool: True if the token is in the loss


class RatedAnswers(PaddedAnswers):
    """Rows of rated answers. Each answer has a row, and a mismatched row that `micro_batch` makes on demand.

    Raises:
        Refused: see `AnswerRows._chosen`; or all prompts are equal, so that no answer is mismatched.
    """

    batch = RatedBatch

    def __init__(self, split: Split, seq_len: int, too_long: str, name: str) -> None:
        super().__init__(split, seq_len, too_long, name)
        self.desirable = self.numbers % 2 == 0  # (answers, 1)
        self._others = np.full(len(self), -1)  # (answers,): index of the next answer with another prompt; -1: unknown
        if self._next_prompt(0) is None:
            place = "Type a larger data.val_fraction=, or data.val_path=<a file with several prompts>"
            more = place if name == "val" else "Add records with other prompts"
            raise Refused(
                f"loss=: the {name} split has {quantity(len(self), 'answer')} but only one prompt, and this loss also "
                f"scores each prompt with the answer to a different prompt. {more}."
            )

    @property
    def longest(self) -> int:
        return self.seq_len  # an upper bound: mismatched rows are made on demand, so their lengths are unknown

    def _documents(self, lengths: np.ndarray, name: str) -> np.ndarray:
        return np.flatnonzero(lengths)[:, None]

    def micro_batch(self, indices: np.ndarray) -> RatedBatch:
        indices = np.asarray(indices)
        ids, labels = self._mismatched(indices)
        references = {}
        if self.reference is not None:
            own, mismatched = torch.from_numpy(self.reference[indices]).split(1, dim=1)
            references = {"reference": own, "mismatched_reference": mismatched}
        return RatedBatch(
            **super().micro_batch(indices).tensors,
            lengths=torch.from_numpy(self.labels[indices]),
            desirable=torch.from_numpy(self.desirable[indices]),
            mismatched_ids=ids,
            mismatched_labels=labels,
            **references,
        )

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> RatedBatch:
        own, mismatched = super().example(batch_size, seq_len), super().example(batch_size, seq_len)
        return replace(
            own,
            desirable=torch.ones(batch_size, 1, dtype=torch.bool),
            mismatched_ids=mismatched.input_ids,
            mismatched_labels=mismatched.labels,
            mismatched_reference=mismatched.reference,
        )

    def _mismatched(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns two (B, S) tensors: the inputs and the labels of these answers' mismatched rows. Rows longer than
        `seq_len` tokens are cut, regardless of data.too_long."""
        rows = []
        for unit in indices.tolist():
            (prompt, _), (_, answer) = self._read(unit), self._read(self._next_prompt(unit))
            learned = np.concatenate([np.zeros(len(prompt), bool), answer.learned])
            rows.append((np.concatenate([prompt, answer.ids]), learned))
        shape = len(rows), min(self.seq_len, max(len(row_ids) for row_ids, _ in rows) - 1)
        ids, labels = np.full(shape, FILLER), np.full(shape, IGNORED)
        for row, (tokens, learned) in enumerate(rows):
            width = min(shape[1], len(tokens) - 1)
            ids[row, :width] = tokens[:width]
            following = slice(1, width + 1)
            labels[row, :width] = np.where(learned[following], tokens[following].astype(np.int64), IGNORED)
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def _read(self, unit: int) -> tuple[np.ndarray, Answer]:
        """Returns the tokens of a unit's prompt, which are all tokens before the first learned token, and the answer
        that follows."""
        start, length, last = (array[unit] for array in self.pieces)
        stop = start + length + (not last)  # for a cut answer, one more token, which is the last label
        ids, learned = self.split.ids[start:stop], self.split.learned(start, stop)
        begin = 1 + int(learned[1:].argmax())  # the first token is never a label
        return ids[:begin], Answer(ids[begin:], learned[begin:])

    def _next_prompt(self, unit: int) -> int | None:
        """Returns the index of the next answer, in stored order with wrap-around, whose prompt differs from the prompt
        of `unit`; None if all prompts are equal. Caches the result in `_others`."""
        prompt, passed = self._read(unit)[0], []
        while self._others[unit] < 0:
            passed.append(unit)
            unit = (unit + 1) % len(self)
            if len(passed) == len(self):
                return None
            if not np.array_equal(self._read(unit)[0], prompt):
                self._others[passed] = unit
                return unit
        self._others[passed] = self._others[unit]
        return int(self._others[unit])


def rows(split: Split, seq_len: int, packing: str, too_long: str, name: str) -> RatedAnswers:
    """Returns rows of rated answers, and logs how many answers and rows there are.

    Args:
        name: name of the split, train or val.

    Raises:
        Refused: see `RatedAnswers`; or `packing` is not padded.
    """
    made = rows_class(packing)(split, seq_len, too_long, name)
    log.info(describe_split(made.report, name, packing, "answer"))
    desirable = int(made.desirable.sum())
    log.info(f"{name}: desirable answers: {desirable:,}, undesirable: {len(made) - desirable:,}.")
    if desirable in (0, len(made)):
        kinds = ("undesirable", "desirable") if desirable == 0 else ("desirable", "undesirable")
        log.warning(f"{name}: all answers are {kinds[0]} and none are {kinds[1]}, {ONE_KIND[name]}")
    return made


def rows_class(packing: str) -> type[RatedAnswers]:
    if packing != "padded":
        raise Refused(
            f"data.packing={packing}: rated answers must be padded, because loss=kto also scores each prompt with a "
            "mismatched answer. Type data.packing=padded, or loss=dpo if the data has pairs."
        )
    return RatedAnswers
