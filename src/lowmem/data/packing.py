"""Rows of a split: which tokens stand side by side in what a model sees at once.

`joined` cuts the text into rows wherever they are full: nothing is wasted, and a row may hold the ends of documents
that have nothing to do with each other. `documents` packs whole ones into a row, best fit first, each with positions of
its own: to a model they are alone (`attention.py`). `padded` gives each a row of its own and fills it up to the longest
of its micro-batch, behind it, where a causal model does not look: no mask, more tokens.

Where documents are kept apart, a label is the token that follows in the same document: a document's last token has
none. What `too_long` says becomes of those that are longer than a row: `cut` lets them go on in further rows (each of
their tokens but the first is learnt once, all the same), `drop` leaves them out, `refuse` ends the run.

Best fit decreasing: Johnson et al. 1974; a row is found in O(1), with the rooms that are left as bits of one integer.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from lowmem.data.loader import IGNORED, MicroBatch, Rows
from lowmem.data.tokens import Split
from lowmem.errors import Refused

log = logging.getLogger(__name__)

POOL = 4096  # documents whose lengths are sorted together: what is left of the padding, against how mixed a batch is
AT_ONCE = 1 << 22  # tokens whose bits are looked at together
SAMPLES, SAMPLE = 64, 1 << 14  # of a text's tokens so many times so many tell it from another
FILLER = 0  # an id that every vocabulary has


class NothingToLearn(Refused):
    """Args: report: what became of the documents."""

    def __init__(self, name: str, where: str = "", report: Mapping = MappingProxyType({})) -> None:
        super().__init__(
            f"data: no document of the {name} split has a token to learn{where}. Give others, or type a larger seq_len."
        )
        self.report = report


class Joined(Rows):
    """Row i is the tokens i*T .. i*T + T (T inputs and the T that follow them); a tail that fills none is left out.

    Raises:
        Refused: when there is not one whole row, or nothing to learn.
    """

    def __init__(self, split: Split, seq_len: int, name: str) -> None:
        self.split, self.seq_len = split, seq_len
        self.count, tokens = (len(split.ids) - 1) // seq_len, len(split.ids)
        self.without_gaps = split.learnt_bits is None
        if self.count < 1:
            raise Refused(
                f"seq_len={seq_len}: the {name} split has {tokens} tokens, less than one sequence needs "
                f"({seq_len + 1}). Type a seq_len below {tokens}, or give more text."
            )
        if split.learnt_bits is not None and not split.learnt_bits.any():
            raise NothingToLearn(name)

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> MicroBatch:
        rows = torch.zeros(batch_size, seq_len + 1, dtype=torch.int64)
        return MicroBatch(rows[:, :-1], rows[:, 1:])

    def __len__(self) -> int:
        return self.count

    @cached_property
    def order(self) -> dict:
        """Any text of as many rows has rows of these numbers: its digest says that it is the same."""
        return {"text": _digest(self.split)}

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        spans = [(i * self.seq_len, (i + 1) * self.seq_len + 1) for i in indices]
        rows = torch.from_numpy(np.stack([self.split.ids[start:stop] for start, stop in spans]).astype(np.int64))
        inputs, labels = rows[:, :-1], rows[:, 1:]  # (B, T), views of one (B, T + 1)
        if self.split.learnt_bits is not None:
            learnt = np.stack([self.split.learnt(start + 1, stop) for start, stop in spans])
            labels = labels.where(torch.from_numpy(learnt), IGNORED)
        return MicroBatch(inputs, labels)

    def starts(self, row: int) -> list[int]:
        first = row * self.seq_len
        within = slice(*np.searchsorted(self.split.ends, [first, first + self.seq_len], side="right"))
        return [0, *(self.split.ends[within] - first).tolist()]


class Pieces(NamedTuple):
    """Documents, or what of them fits into a row."""

    starts: np.ndarray  # (pieces,) int64, in the split's ids
    lengths: np.ndarray  # (pieces,) int64
    last: np.ndarray  # (pieces,) bool: whether a document ends with it

    def chosen(self, which: np.ndarray) -> "Pieces":
        return Pieces(*(part[which] for part in self))


class _Apart(Rows):
    """What `documents` and `padded` share: pieces, and what became of those that have none."""

    def __init__(self, split: Split, seq_len: int, too_long: str, name: str) -> None:
        self.split, self.seq_len, self.too_long = split, seq_len, too_long
        self.pieces, self.report = pieces(split, seq_len, too_long, name)

    @property
    def order(self) -> dict:
        return {
            "packing": type(self).__name__.lower(),
            "too_long": self.too_long,
            "documents": hashlib.sha256(np.ascontiguousarray(self.split.ends)).hexdigest()[:16],
        }

    def _fill(self, piece: int, ids: np.ndarray, labels: np.ndarray) -> None:
        """Args: ids, labels: (T,) of the piece, in its row."""
        start, length = int(self.pieces.starts[piece]), len(ids)
        ids[:] = self.split.ids[start : start + length]
        known = length - int(self.pieces.last[piece])  # labels that there are
        following = slice(start + 1, start + 1 + known)
        labels[:known] = self.split.ids[following]
        if self.split.learnt_bits is not None:
            labels[:known][~self.split.learnt(following.start, following.stop)] = IGNORED


class Documents(_Apart):
    """Rows of whole documents. What a row has left is a document of its own, with nothing to learn."""

    positions = True

    def __init__(self, split: Split, seq_len: int, too_long: str, name: str) -> None:
        super().__init__(split, seq_len, too_long, name)
        self.packed, self.ends = self._kept(split, name)  # pieces by row; how many there are up to the end of each
        tokens = int(self.pieces.lengths.sum())
        self.report |= {"rows": len(self), "fill": tokens / (len(self) * seq_len)}

    def _kept(self, split: Split, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Packed once, beside the tokens on disk: 5 million documents take seconds."""
        where = getattr(split.ids, "filename", None)
        if where is None:  # in memory alone
            return packed(self.pieces.lengths, self.seq_len)
        file = Path(where).with_name(f"{name}_rows_{self.seq_len}_{self.too_long}.npz")
        if not file.exists():
            order, ends = packed(self.pieces.lengths, self.seq_len)
            _save(file, order=order, ends=ends)
        with np.load(file) as kept:
            return kept["order"], kept["ends"]

    def __len__(self) -> int:
        return len(self.ends)

    def documents(self, row: int) -> np.ndarray:
        """The pieces that stand in a row, in their order."""
        return self.packed[self.ends[row - 1] if row else 0 : self.ends[row]]

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        shape = len(indices), self.seq_len
        ids, labels, positions = np.full(shape, FILLER), np.full(shape, IGNORED), np.empty(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for piece in self.documents(int(index)):
                here = slice(at, at + int(self.pieces.lengths[piece]))
                self._fill(piece, ids[row, here], labels[row, here])
                positions[row, here] = np.arange(here.stop - at)
                at = here.stop
            positions[row, at:] = np.arange(self.seq_len - at)
        return MicroBatch(*map(torch.from_numpy, (ids, labels, positions)))


class Padded(_Apart):
    """One document a row."""

    def __init__(self, split: Split, seq_len: int, too_long: str, name: str) -> None:
        super().__init__(split, seq_len, too_long, name)
        self.report |= {"rows": len(self)}

    def __len__(self) -> int:
        return len(self.pieces.starts)

    def arranged(self, permutation: np.ndarray, rows_per_step: int) -> np.ndarray:
        """Documents of like length side by side. The pools and the order in each depend on the seed alone; which of
        them make a micro-batch depends on its size, so a run goes on with the one that it began with."""
        lengths = self.pieces.lengths
        pools = [permutation[at : at + POOL] for at in range(0, len(permutation), POOL)]
        # up and down by turns: a micro-batch of two pools has no long ones beside short ones
        ordered = np.concatenate(
            [pool[np.argsort(lengths[pool] * (-1) ** number, kind="stable")] for number, pool in enumerate(pools)]
        )
        whole = len(ordered) // rows_per_step * rows_per_step
        turns = np.random.default_rng(permutation[:4]).permutation(whole // rows_per_step)  # drawn by the epoch as well
        return np.concatenate([ordered[:whole].reshape(-1, rows_per_step)[turns].ravel(), ordered[whole:]])

    def grouping(self, rows_per_step: int) -> dict:
        return {"together": rows_per_step}

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        lengths = self.pieces.lengths[indices]
        shape = len(indices), int(lengths.max())
        ids, labels = np.full(shape, FILLER), np.full(shape, IGNORED)
        for row, (piece, length) in enumerate(zip(indices, lengths.tolist(), strict=True)):
            self._fill(piece, ids[row, :length], labels[row, :length])
        return MicroBatch(torch.from_numpy(ids), torch.from_numpy(labels))


PACKINGS = {"joined": Joined, "documents": Documents, "padded": Padded}


def rows(split: Split, seq_len: int, packing: str, too_long: str, name: str) -> Rows:
    """Rows of at most `seq_len` tokens. Args: name: of the split, train or val.

    Raises:
        Refused: when there is no row, nothing to learn in any, or a document that is too long and was not to be.
    """
    if packing == "joined":
        return Joined(split, seq_len, {"val": "validation"}.get(name, name))
    made = PACKINGS[packing](split, seq_len, too_long, name)
    log.info(told(made.report, name, packing))
    return made


def told(report: Mapping, name: str, packing: str) -> str:
    """What became of the documents of a split, in a sentence."""
    left_out = {
        "longer than a row were cut": report["cut"],
        "longer than a row were dropped": report["too_long"],
        "with nothing to learn were dropped": report["nothing_to_learn"],
    }
    said = "".join(f"; {count:,} {what}" for what, count in left_out.items() if count)
    filled = f", {report['fill']:.1%} filled" if "fill" in report else ""
    return (
        f"data.packing={packing}, {name}: {report['documents']:,} documents in {report['rows']:,} rows{filled}{said}."
    )


def example(data: Mapping, batch_size: int, seq_len: int) -> MicroBatch:
    """A micro-batch as these data make them. Args: data: cfg.data; a mixture copies the rows of its parts."""
    if "parts" in data:
        return (Documents if with_positions(data) else Padded).example(batch_size, seq_len)
    return PACKINGS[data.get("packing", "joined")].example(batch_size, seq_len)


def with_positions(data: Mapping) -> bool:
    """Whether a model is told where documents begin. Args: data: cfg.data, which may be a mixture of parts."""
    return any(PACKINGS[part["packing"]].positions for part in _parts(data))


def _parts(data: Mapping) -> Iterator[Mapping]:
    if "packing" in data:
        yield data
    for part in data.get("parts", {}).values():
        yield from _parts(part)


def pieces(split: Split, seq_len: int, too_long: str, name: str) -> tuple[Pieces, dict]:
    """(what there is to learn from, in the split's order; counts: documents, cut, too_long, nothing_to_learn)."""
    ends = np.asarray(split.ends, np.int64)
    lengths = np.diff(ends, prepend=0)
    above = lengths > seq_len
    if too_long == "refuse" and above.any():
        longest = int(lengths.max())
        raise Refused(
            f"data.too_long=refuse: {int(above.sum()):,} of {len(ends):,} documents of the {name} split are longer "
            f"than seq_len={seq_len}; the longest has {longest:,} tokens. Type seq_len={longest}, if the model "
            "has as many positions, or data.too_long=cut or drop."
        )
    kept = ~above if too_long == "drop" else np.ones(len(ends), bool)
    of = _cut(ends[kept] - lengths[kept], lengths[kept], seq_len)
    learnt = _counted(split, of)
    found = of.chosen(learnt > 0)
    told_apart = np.searchsorted(ends, found.starts, side="right")  # documents that something is learnt from
    report = {
        "documents": len(np.unique(told_apart)),
        "cut": int(above.sum()) if too_long == "cut" else 0,
        "too_long": int(above.sum()) if too_long == "drop" else 0,
    }
    report["nothing_to_learn"] = int(kept.sum()) - report["documents"]
    if not len(found.starts):
        raise NothingToLearn(name, f" in at most seq_len={seq_len} tokens", report | {"rows": 0})
    return found, report


def _cut(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Pieces:
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # within its document
    left = lengths[document] - number * seq_len
    return Pieces(starts[document] + number * seq_len, np.minimum(left, seq_len), left <= seq_len)


def _counted(split: Split, of: Pieces) -> np.ndarray:
    """(pieces,): labels that count in each."""
    known = of.lengths - of.last
    if split.learnt_bits is None:
        return known
    before = _learnt_before(split, np.stack([of.starts + 1, of.starts + 1 + known], 1).ravel())
    return np.diff(before.reshape(-1, 2), axis=1).ravel()


def _learnt_before(split: Split, points: np.ndarray) -> np.ndarray:
    """How many tokens before each of these are learnt. A few million are looked at together, never all. Args: points:
    ascending."""
    found, total = np.empty(len(points), np.int64), 0
    for start in range(0, len(split.ids) + 1, AT_ONCE):
        stop = min(start + AT_ONCE, len(split.ids))
        sums = np.concatenate([[0], np.cumsum(split.learnt(start, stop))])
        here = slice(*np.searchsorted(points, [start, start + AT_ONCE]))
        found[here] = total + sums[points[here] - start]
        total += int(sums[-1])
    return found


def packed(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Best fit decreasing: (the pieces, row after row; how many there are up to the end of each row).

    Pieces of one length are shuffled first, by no seed of the run's: side by side in the text, they would often be side
    by side in a row. Args: lengths: (pieces,), at most `room`.
    """
    shuffled = np.random.default_rng(0).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # rows by the room that is left
    rooms, count = 0, 0  # bit r: there is a row with room r
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := rooms >> length:
            left = length + (fitting & -fitting).bit_length() - 1  # the least that is enough
            row = with_room[left].pop()
            if not with_room[left]:
                rooms ^= 1 << left
        else:
            row, left, count = count, room, count + 1
        row_of[piece] = row
        left -= length
        with_room[left].append(row)
        rooms |= 1 << left
    row_of = np.random.default_rng(0).permutation(count)[row_of]  # or the first rows would hold the longest
    by_row = order[np.argsort(row_of[order], kind="stable")]
    return by_row, np.cumsum(np.bincount(row_of, minlength=count))


def _digest(split: Split) -> str:
    """Of how long its documents are, as tokens and as text, and of tokens from everywhere in it: to read all of them
    would take seconds, and their pages memory."""
    digest = hashlib.sha256()
    for lengths in (split.ends, split.text_bytes):
        digest.update(np.ascontiguousarray(lengths))
    for start in np.unique(np.linspace(0, max(0, len(split.ids) - SAMPLE), SAMPLES).astype(int)).tolist():
        digest.update(split.ids[start : start + SAMPLE].astype(np.uint32))
    return digest.hexdigest()[:16]


def _save(file: Path, **arrays: np.ndarray) -> None:
    """Beside its final name, then renamed: another job never sees half of it."""
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".writing-", delete=False) as draft:
            np.savez(draft, **arrays)
        os.replace(draft.name, file)
    except OSError as error:
        raise Refused(f"cache_dir: rows cannot be written to {file.parent} ({error.strerror}). Make room.") from error
