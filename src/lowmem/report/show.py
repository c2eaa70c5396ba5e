"""Formats the first sequences of training for `show=`: text that is learned is marked, and a line separates documents.
Users can check a chat template, a field or a split of their data before they train for hours."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem.data.loader import IGNORED, START, Position, Rows, WindowLoader
from lowmem.data.mix import Mixed
from lowmem.data.random_tokens import Drawn
from lowmem.data.token_store import Split
from lowmem.system.units import quantity

LEARNED = ("[", "]")
LEARNED_IN_COLOUR = ("\033[32m", "\033[0m")  # green
RULE = "─" * 24
HEAD = "═" * 4
AT_ONCE = 1 << 22  # number of tokens for which labels are read at once
LONGEST_CHARACTER = 4  # maximum bytes of a character in UTF-8, and so its maximum number of tokens


class Row(NamedTuple):
    """A row of tokens.

    Args:
        ids: token ids, without padding.
        learned: for each token, True if the token has a label.
        starts: indices at which documents begin. `row_of` also includes the index at which removed padding began.
        padding: number of removed tokens after `ids`: padding, and for an answer also tokens without a label.
    """

    ids: Sequence[int]
    learned: Sequence[bool]
    starts: Sequence[int]
    padding: int = 0


def page(train: WindowLoader, tokenizer: PreTrainedTokenizerBase, count: int, colour: bool = False) -> str:
    """Returns the first `count` sequences of training as text, followed by counts of the full training split. With
    `colour`, learned text is marked by color instead of brackets."""
    rows = train.sequences
    marks = LEARNED_IN_COLOUR if colour else LEARNED
    blocks = []
    for number, index in enumerate(train.between(START, Position(0, count)), 1):
        for name, row in rows_of(rows, index).items():
            learned = f"{sum(row.learned):,} of {len(row.ids):,} tokens learned"
            title = f"{HEAD} sequence {number} of {len(rows):,}{name}: {learned} {HEAD}"
            blocks.append(f"{title}\n{written(row, tokenizer, marks)}\n")
    return "\n".join([*blocks, *counts(rows), f"Learned text (with a label) is {'green' if colour else 'in [ ]'}."])


def rows_of(rows: Rows, index: int) -> dict[str, Row]:
    """Returns the rows of a sequence as a dict that maps the suffix of each row's title to the row. A padded sequence
    of preference data has a row for each answer. Any other sequence, such as packed pairs, has a single row."""
    batch = rows.micro_batch(np.array([index]))
    if not batch.titles:
        return {"": row_of(rows, index)}
    answers = zip(batch.titles, batch.input_ids, batch.labels, strict=True)
    return {f", {name}": _answer(*answer) for name, *answer in answers}


def _answer(ids: Tensor, labels: Tensor) -> Row:
    """Returns an answer as a row that ends with the last learned token."""
    learned = [False, *(labels != IGNORED).tolist()]
    stop = len(learned) - learned[::-1].index(True)
    return Row([*ids.tolist(), int(labels[-1])][:stop], learned[:stop], [0], max(0, len(ids) - stop))


def row_of(rows: Rows, index: int) -> Row:
    """Returns a row without its padding. If the last label is learned, the token of this label is appended."""
    batch, starts = rows.micro_batch(np.array([index])), rows.starts(index)
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    learned = [False, *(label != IGNORED for label in labels)]
    if learned[-1]:
        return Row([*ids, labels[-1]], learned, starts)
    starts = [start for start in starts if start < len(ids)]  # a document may begin right after the row
    last = starts[-1]  # padding looks like a document without learned tokens: its positions begin at 0
    restarts = last > 0 and batch.position_ids is not None and batch.position_ids[0, last] == 0
    is_padding = restarts and not any(learned[last:])
    stop = last if is_padding else len(ids)
    return Row(ids[:stop], learned[:stop], starts, len(ids) - stop)


def counts(rows: Rows, name: str = "Training") -> Iterator[str]:
    """Yields a line with counts of documents, tokens and sequences, which begins with `name`. For a mixture, first
    yields such a line for each source."""
    if isinstance(rows, Mixed):
        for source_name, source in zip(rows.names, rows.parts, strict=True):
            yield from counts(source, source_name)
        yield f"{name}: {'; '.join(rows.describe())}."
    elif isinstance(rows, Drawn):
        yield f"{name}: {quantity(len(rows), 'sequence')} of {rows.seq_len:,} random tokens."
    else:
        yield f"{name}: {'; '.join(_phrases(rows, rows.split))}."


def _phrases(rows: Rows, split: Split) -> list[str]:
    tokens = len(split.ids)
    learned = sum(int(split.learned(at, min(at + AT_ONCE, tokens)).sum()) for at in range(0, tokens, AT_ONCE))
    documents = np.count_nonzero(np.diff(split.ends, prepend=0))  # an empty document stands for a missing answer
    phrases = [quantity(documents, "document"), f"{quantity(tokens, 'token')} ({learned / tokens:.0%} learned)"]
    phrases.append(f"{quantity(len(rows), 'sequence')} of {rows.seq_len:,} tokens")
    if "fill" in rows.report:
        phrases.append(f"{rows.report['fill']:.1%} filled")
    left_out = {
        "cut": "too long and cut",
        "too_long": "too long and dropped",
        "nothing_to_learn": "without a learned token",
    }
    phrases += [f"{rows.report[key]:,} {words}" for key, words in left_out.items() if rows.report.get(key)]
    return phrases


def written(row: Row, tokenizer: PreTrainedTokenizerBase, marks: tuple[str, str] = LEARNED) -> str:
    """Returns a row as text. `marks` are the strings before and after learned text."""
    text, marked = "", False
    changes = {i for i in range(1, len(row.ids)) if row.learned[i] != row.learned[i - 1]}
    for first, _, piece in pieces(row.ids, tokenizer, changes.union(row.starts)):
        begins, learned = first in row.starts and first > 0, row.learned[first]
        if marked and (begins or not learned):
            text, marked = text + marks[1], False
        if begins:
            text += "\n" * (not text.endswith("\n")) + RULE + "\n"
        if learned and not marked:
            text, marked = text + marks[0], True
        text += _visible(piece)
    text += marks[1] * marked
    return text + (f"\n({row.padding:,} padding tokens)" if row.padding else "")


def pieces(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, cuts: Collection[int] = ()
) -> Iterator[tuple[int, int, str]]:
    """Splits tokens into the shortest pieces that decode to complete characters. A piece also ends before a cut, after
    LONGEST_CHARACTER tokens and after the last token, even if its last character is incomplete. Yields (start, stop,
    text) for each piece. `cuts` are indices of `ids` at which a new piece must begin.

    Each piece is decoded together with the piece before it, because many tokenizers drop the space before the first
    word.
    """
    before, first = 0, 0
    for stop in range(1, len(ids) + 1):
        known, text = _decoded(ids[before:first], tokenizer), _decoded(ids[before:stop], tokenizer)
        is_whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
        if is_whole or stop - first == LONGEST_CHARACTER or stop in cuts or stop == len(ids):
            yield first, stop, text[len(known) :]
            before, first = first, stop


def _decoded(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def _visible(text: str) -> str:
    """Escapes unprintable characters, except for line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
