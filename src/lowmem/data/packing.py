"""Packs the documents of a split into rows of at most `seq_len` tokens. `data.packing` selects one of three methods:

- `joined` concatenates all documents and cuts the result into full rows. Rows need no padding, but tokens also attend
  to unrelated documents before their own document in the row.
- `documents` packs documents into rows by best fit decreasing. A document that fits into a row is not divided. The
  position ids start at 0 in each document, so tokens attend only to their own document (`model/packed_attention.py`).
- `padded` gives each document its own row, which is padded at its end to the length of the longest row of the global
  micro-batch (of all devices). In a causal model, padding at the end does not influence the tokens before it, so
  `padded` needs no attention mask. But the model also spends time on the padding.

With `documents` and `padded`, a label is the next token of the same document, so a document's last token has no label.
`data.too_long` decides what these two methods do with documents that are longer than a row. `cut` divides such a
document into several pieces without losing labels: the label of a piece's last token is the first token of the next
piece. Position ids start at 0 in each piece, so the tokens of a piece do not attend to earlier pieces of the document.
`drop` leaves the document out, and `refuse` raises Refused.

Best fit decreasing (Johnson et al. 1974) takes the pieces in order of length, the longest first, and places each in the
row with the smallest sufficient free space. An integer makes it possible to find this row without a loop over the rows:
its bit r is set if a row with exactly r free tokens exists.
"""

import hashlib
import logging
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from lowmem.data.loader import IGNORED, MicroBatch, Rows
from lowmem.data.token_store import Split
from lowmem.system.atomic_files import atomic_cache_write
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

log = logging.getLogger(__name__)

# number of sequences that are sorted by length together; with a larger pool, rows have less padding, but their order is
# less random
POOL = 4096
AT_ONCE = 1 << 22  # number of tokens whose learned bits are unpacked at once
SAMPLES, SAMPLE = 64, 1 << 14  # maximum number of samples in the digest of a split, and tokens per sample
FILLER = 0  # a token id that every vocabulary has


class NothingToLearn(Refused):
    """Raised if a split has nothing to learn: no document (or rated answer) has a label or, for pairs, no pair has
    labels in both answers.

    Args:
        name: name of the split.
        where: end of the message's first sentence, such as " at seq_len=512".
        report: counts of included, cut and dropped documents (or pairs or rated answers).
        unit: the singular name, in the message, of the items that have no label.
    """

    def __init__(
        self, name: str, where: str = "", report: Mapping = MappingProxyType({}), unit: str = "document"
    ) -> None:
        super().__init__(
            f"data: no {unit} of the {name} split has a token in the loss{where}. Give other data, or type a larger "
            "seq_len."
        )
        self.report = report


class TooLong(Refused):
    """Raised with too_long=refuse if a document, pair or rated answer is too long. Args: document: the index, within
    the split, of the first document or rated answer that is too long; for pairs, of the chosen answer in the first pair
    that is too long."""

    def __init__(self, message: str, document: int) -> None:
        super().__init__(message)
        self.document = document


class Joined(Rows):
    """Rows that are cut from the concatenated text. With T = seq_len, the inputs of row i are the T tokens from i*T on,
    and its labels are the T tokens from i*T + 1 on. An incomplete last row is left out.

    Raises:
        Refused: the split has fewer than seq_len + 1 tokens, or no learned token.
    """

    counted = "sequences"

    def __init__(self, split: Split, seq_len: int, name: str) -> None:
        self.split, self.seq_len = split, seq_len
        self.count, tokens = (len(split.ids) - 1) // seq_len, len(split.ids)
        self.without_gaps = split.learned_bits is None
        if self.count < 1:
            raise Refused(
                f"seq_len={seq_len}: the {name} split has only {quantity(tokens, 'token')}, and one sequence needs "
                f"seq_len + 1 = {seq_len + 1}. Type a seq_len below {tokens}, or give more text."
            )
        if split.learned_bits is not None and not split.learned_bits.any():
            raise NothingToLearn(name)

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> MicroBatch:
        rows = torch.zeros(batch_size, seq_len + 1, dtype=torch.int64)
        return MicroBatch(rows[:, :-1], rows[:, 1:])

    def __len__(self) -> int:
        return self.count

    @cached_property
    def order(self) -> dict:
        """Returns a digest of the split, because the number of rows alone does not identify the data."""
        return {"text": _digest(self.split)}

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        spans = [(i * self.seq_len, (i + 1) * self.seq_len + 1) for i in indices]
        rows = torch.from_numpy(np.stack([self.split.ids[start:stop] for start, stop in spans]).astype(np.int64))
        inputs, labels = rows[:, :-1], rows[:, 1:]  # (B, T), views of one tensor (B, T + 1)
        if self.split.learned_bits is not None:
            learned = np.stack([self.split.learned(start + 1, stop) for start, stop in spans])
            labels = labels.where(torch.from_numpy(learned), IGNORED)
        return MicroBatch(inputs, labels)

    def starts(self, row: int) -> list[int]:
        begin = row * self.seq_len
        within = slice(*np.searchsorted(self.split.ends, [begin, begin + self.seq_len], side="right"))
        return [0, *(self.split.ends[within] - begin).tolist()]


class Pieces(NamedTuple):
    """The pieces of a split. A piece is a document or a part of a document, and fits into a row."""

    starts: np.ndarray  # (pieces,) int64: index of the first token in the split's ids
    lengths: np.ndarray  # (pieces,) int64: number of tokens
    last: np.ndarray  # (pieces,) bool: True if the piece ends its document

    def chosen(self, which: np.ndarray) -> "Pieces":
        return Pieces(*(array[which] for array in self))


class _Apart(Rows):
    """The base class of `Documents` and `Padded`. `pieces` contains the pieces to learn from, that is, all pieces
    except pieces of dropped documents and pieces without a label. `report` counts included, cut and dropped documents
    (in the subclasses of `pairs.py` and `rated.py`: pairs or rated answers)."""

    filler = True

    def __init__(self, split: Split, seq_len: int, too_long: str, name: str) -> None:
        self.split, self.seq_len, self.too_long = split, seq_len, too_long
        self.pieces, self.report = self._chosen(name)

    def _chosen(self, name: str) -> tuple[Pieces, dict]:
        """Returns the pieces to learn from, and counts of included, cut and dropped documents."""
        return pieces(self.split, self.seq_len, self.too_long, name)

    @property
    def lengths(self) -> np.ndarray:
        """Returns a (units,) array: the length of each unit in tokens. Units are packed or sorted by this length. Here
        a unit is a piece; in `pairs.py` it is a pair, and in `rated.py` a rated answer."""
        return self.pieces.lengths

    @property
    def order(self) -> dict:
        return {
            "packing": type(self).__name__.lower(),
            "too_long": self.too_long,
            "documents": hashlib.sha256(np.ascontiguousarray(self.split.ends)).hexdigest()[:16],
        }

    def _fill(self, piece: int, ids: np.ndarray, labels: np.ndarray) -> None:
        """Writes a piece into a row. Args: ids, labels: the row's slices for this piece, (tokens,) each. The caller has
        filled `labels` with IGNORED."""
        start, length = int(self.pieces.starts[piece]), len(ids)
        ids[:] = self.split.ids[start : start + length]
        known = length - int(self.pieces.last[piece])  # a document's last token has no label
        following = slice(start + 1, start + 1 + known)
        labels[:known] = self.split.ids[following]
        if self.split.learned_bits is not None:
            labels[:known][~self.split.learned(following.start, following.stop)] = IGNORED


class Documents(_Apart):
    """Rows that are filled with complete documents, and with pieces of documents that are longer than a row. The unused
    end of a row becomes a separate document without labels."""

    positions = True
    stored_as = "rows"  # part of the name of the file that stores the packed order

    def __init__(self, split: Split, seq_len: int, too_long: str, name: str) -> None:
        super().__init__(split, seq_len, too_long, name)
        # the indices of all units, row by row, and the number of units up to the end of each row
        self.packed, self.ends = self._packed_once(split, name)
        tokens = int(self.lengths.sum())
        self.report |= {"rows": len(self), "fill": tokens / (len(self) * seq_len)}

    def _packed_once(self, split: Split, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the result of `packed`. If the tokens are on disk, the result is stored in the folder of the tokens,
        and later runs read the stored result, because packing 5 million documents takes seconds."""
        where = getattr(split.ids, "filename", None)
        if where is None:  # the tokens are only in memory
            return packed(self.lengths, self.seq_len)
        file = Path(where).with_name(f"{name}_{self.stored_as}_{self.seq_len}_{self.too_long}.npz")
        try:
            with np.load(file) as stored:  # a zip file, which contains a CRC-32 of each array
                return stored["order"], stored["ends"]
        except FileNotFoundError:
            pass
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
            log.info(f"cache_dir: {file} is corrupted; packing the rows again.")
        order, ends = packed(self.lengths, self.seq_len)
        _save(file, order=order, ends=ends)
        return order, ends

    def __len__(self) -> int:
        return len(self.ends)

    def documents(self, row: int) -> np.ndarray:
        """Returns the indices of the pieces in a row, in order."""
        return self.units(row)

    def units(self, row: int) -> np.ndarray:
        """Returns the indices of the units in a row, in order."""
        return self.packed[self.ends[row - 1] if row else 0 : self.ends[row]]

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        shape = len(indices), self.seq_len
        ids, labels, positions = np.full(shape, FILLER), np.full(shape, IGNORED), np.empty(shape, np.int64)
        real = np.ones(shape, bool)
        for row, index in enumerate(indices):
            at = 0
            for piece in self.documents(int(index)):
                here = slice(at, at + int(self.pieces.lengths[piece]))
                self._fill(piece, ids[row, here], labels[row, here])
                positions[row, here] = np.arange(here.stop - at)
                at = here.stop
            positions[row, at:], real[row, at:] = np.arange(self.seq_len - at), False
        return MicroBatch(*map(torch.from_numpy, (ids, labels, positions, real)))


class Padded(_Apart):
    """Rows with one piece each: a complete document, or a piece of a document that is longer than a row."""

    def __init__(self, split: Split, seq_len: int, too_long: str, name: str) -> None:
        super().__init__(split, seq_len, too_long, name)
        self.report |= {"rows": len(self)}

    @property
    def longest(self) -> int:
        return int(self.pieces.lengths.max())

    def __len__(self) -> int:
        return len(self.lengths)

    def arranged(self, permutation: np.ndarray, rows_per_step: int) -> np.ndarray:
        """Sorts sequences by length within pools of POOL sequences, and shuffles the resulting global micro-batches. An
        incomplete global micro-batch stays at the end. The pools depend only on the permutation, but `rows_per_step`
        decides which sequences are batched together. So a resumed run must keep the product of batch size and number of
        devices (`grouping`)."""
        lengths = self.lengths
        pools = [permutation[at : at + POOL] for at in range(0, len(permutation), POOL)]
        # pools are sorted in alternating directions, so that a micro-batch with sequences of two pools does not mix
        # long and short sequences
        ordered = np.concatenate(
            [pool[np.argsort(lengths[pool] * (-1) ** number, kind="stable")] for number, pool in enumerate(pools)]
        )
        full = len(ordered) // rows_per_step * rows_per_step  # sequences in full global micro-batches
        # the seed consists of the first numbers of the permutation, so the order differs between epochs
        turns = np.random.default_rng(permutation[:4]).permutation(full // rows_per_step)
        return np.concatenate([ordered[:full].reshape(-1, rows_per_step)[turns].ravel(), ordered[full:]])

    def grouping(self, rows_per_step: int) -> dict:
        return {"together": rows_per_step}

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        lengths = self.pieces.lengths[indices]
        shape = len(indices), int(lengths.max())
        ids, labels = np.full(shape, FILLER), np.full(shape, IGNORED)
        for row, (piece, length) in enumerate(zip(indices, lengths.tolist(), strict=True)):
            self._fill(piece, ids[row, :length], labels[row, :length])
        real = np.arange(shape[1]) < lengths[:, None]
        return MicroBatch(*map(torch.from_numpy, (ids, labels)), real=torch.from_numpy(real))


PACKINGS = {"joined": Joined, "documents": Documents, "padded": Padded}


def rows(split: Split, seq_len: int, packing: str, too_long: str, name: str) -> Rows:
    """Returns rows of at most `seq_len` tokens. Except with packing=joined, logs the numbers of documents and rows.

    Args:
        name: name of the split, train or val.

    Raises:
        Refused: the split has no row or no label; with too_long=refuse, a document is too long; or the packed
            order cannot be written to cache_dir.
    """
    if packing == "joined":
        return Joined(split, seq_len, {"val": "validation"}.get(name, name))
    packed_rows = PACKINGS[packing](split, seq_len, too_long, name)
    log.info(describe_split(packed_rows.report, name, packing))
    return packed_rows


def describe_split(report: Mapping, name: str, packing: str, unit: str = "document") -> str:
    """Returns a sentence for the log with the numbers of documents and rows of a split, the share of the rows' tokens
    that is filled (if known), and the numbers of documents that were cut or dropped.

    Args:
        unit: the singular name of a counted item, such as document or pair.
    """
    left_out = {
        "cut (longer than a row)": report["cut"],
        "dropped (longer than a row)": report["too_long"],
        "dropped (no token in the loss)": report["nothing_to_learn"],
    }
    notes = "".join(f"; {count:,} {fate}" for fate, count in left_out.items() if count)
    filled = f", {report['fill']:.1%} filled" if "fill" in report else ""
    units, in_rows = quantity(report["documents"], unit), quantity(report["rows"], "row")
    return f"data.packing={packing}, {name}: {units} in {in_rows}{filled}{notes}."


def rows_class(data: Mapping) -> type[Rows]:
    """Returns a class of rows whose `example` has the same type and the same kinds of tensors as a source's
    micro-batches (see `Openable.rows_class`). Args: data: arguments of the source."""
    if "parts" in data:
        return Documents if with_positions(data) else Rows
    return PACKINGS[data.get("packing", "joined")]


def with_positions(data: Mapping) -> bool:
    """Returns whether micro-batches of a source have position ids, which show the model where documents begin. Args:
    data: arguments of a source."""
    return any(PACKINGS[source["packing"]].positions for source in _sources(data))


def _sources(data: Mapping) -> Iterator[Mapping]:
    """Yields the arguments of a single source, or of each source of a mixture. Sources without an argument `packing`
    are left out."""
    if "packing" in data:
        yield data
    for source in data.get("parts", {}).values():
        yield from _sources(source)


def pieces(split: Split, seq_len: int, too_long: str, name: str) -> tuple[Pieces, dict]:
    """Returns the pieces to learn from, in the split's order, and a dict with numbers of documents: included
    (`documents`), cut (`cut`), dropped because of their length (`too_long`), and dropped because they have no label
    (`nothing_to_learn`).

    Raises:
        TooLong: with too_long=refuse, a document is too long.
        NothingToLearn: no piece has a label.
    """
    ends = np.asarray(split.ends, np.int64)
    lengths = np.diff(ends, prepend=0)
    above = lengths > seq_len
    if too_long == "refuse" and above.any():
        longest = int(lengths.max())
        raise TooLong(
            f"data.too_long=refuse: the {name} split has {quantity(int(above.sum()), 'document')} longer than "
            f"seq_len={seq_len} (of {len(ends):,}), the longest with {quantity(longest, 'token')}. Type "
            f"seq_len={longest} if the model has that many positions, or data.too_long=cut or drop.",
            int(above.argmax()),
        )
    usable = ~above if too_long == "drop" else np.ones(len(ends), bool)
    cut = _cut(ends[usable] - lengths[usable], lengths[usable], seq_len)
    learned = cut.chosen(labels_that_count(split, cut) > 0)
    documents = np.searchsorted(ends, learned.starts, side="right")  # (pieces,): the index of each piece's document
    report = {
        "documents": len(np.unique(documents)),
        "cut": int(above.sum()) if too_long == "cut" else 0,
        "too_long": int(above.sum()) if too_long == "drop" else 0,
    }
    report["nothing_to_learn"] = int(usable.sum()) - report["documents"]
    if not len(learned.starts):
        raise NothingToLearn(name, f" at seq_len={seq_len}", report | {"rows": 0})
    return learned, report


def _cut(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Pieces:
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(starts)), counts)
    # index of each piece within its document
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    left = lengths[document] - number * seq_len
    return Pieces(starts[document] + number * seq_len, np.minimum(left, seq_len), left <= seq_len)


def labels_that_count(split: Split, cut: Pieces) -> np.ndarray:
    """Returns a (pieces,) array: for each piece, the number of labels that count in the loss."""
    known = cut.lengths - cut.last
    if split.learned_bits is None:
        return known
    before = _learned_before(split, np.stack([cut.starts + 1, cut.starts + 1 + known], 1).ravel())
    return np.diff(before.reshape(-1, 2), axis=1).ravel()


def _learned_before(split: Split, points: np.ndarray) -> np.ndarray:
    """Returns the number of learned tokens before each of `points`, which are ascending indices of tokens."""
    counts, total = np.empty(len(points), np.int64), 0
    for start in range(0, len(split.ids) + 1, AT_ONCE):
        stop = min(start + AT_ONCE, len(split.ids))
        sums = np.concatenate([[0], np.cumsum(split.learned(start, stop))])
        here = slice(*np.searchsorted(points, [start, start + AT_ONCE]))
        counts[here] = total + sums[points[here] - start]
        total += int(sums[-1])
    return counts


def packed(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs units (pieces or pairs) into rows by best fit decreasing.

    Units of equal length are placed in random order, with a fixed seed. Otherwise units that are adjacent in the data
    would often share a row.

    Args:
        lengths: (units,): the length of each unit, at most `room`.
        room: number of tokens in a row.

    Returns:
        The indices of the units, row by row, (units,), and the number of units up to the end of each row, (rows,).
    """
    shuffled = np.random.default_rng(0).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(len(lengths), np.int64)
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # free space -> rows with exactly this space left
    rooms, count = 0, 0  # bit r of rooms is set if a row has r tokens of space left
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := rooms >> length:
            left = length + (fitting & -fitting).bit_length() - 1  # the smallest sufficient space
            row = with_room[left].pop()
            if not with_room[left]:
                rooms ^= 1 << left
        else:
            row, left, count = count, room, count + 1
        row_of[piece] = row
        left -= length
        with_room[left].append(row)
        rooms |= 1 << left
    # without this permutation the longest units would be in the first rows
    row_of = np.random.default_rng(0).permutation(count)[row_of]
    by_row = order[np.argsort(row_of[order], kind="stable")]
    return by_row, np.cumsum(np.bincount(row_of, minlength=count))


def _digest(split: Split) -> str:
    """Returns a digest of the ends of documents, in tokens and in bytes of text, and of samples of tokens across the
    split. (A digest of all tokens would take seconds, and would read all their pages into memory.)"""
    digest = hashlib.sha256()
    for lengths in (split.ends, split.text_bytes):
        digest.update(np.ascontiguousarray(lengths))
    for start in np.unique(np.linspace(0, max(0, len(split.ids) - SAMPLE), SAMPLES).astype(int)).tolist():
        digest.update(split.ids[start : start + SAMPLE].astype(np.uint32))
    return digest.hexdigest()[:16]


def _save(file: Path, **arrays: np.ndarray) -> None:
    try:
        with atomic_cache_write(file) as draft:
            np.savez(draft, **arrays)
    except OSError as error:
        raise Refused(
            f"cache_dir: cannot write the packed rows to {file.parent} ({error.strerror}). Free some space, or type "
            "cache_dir=<another folder>."
        ) from error
