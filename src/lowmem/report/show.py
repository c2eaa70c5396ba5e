"""The first sequences as training reads them, for people: what is learnt is marked, and where a document ends stands a
rule. One look says whether a template, a field or a split is what was meant, before hours are spent on it.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

LEARNT = ("[", "]")
LEARNT_IN_COLOUR = ("\033[32m", "\033[0m")  # green
RULE = "─" * 24
LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens


class Row(NamedTuple):
    """ids: of its tokens, without padding; learnt: (len(ids),) whether they are predicted and count in the loss;
    starts: where documents begin."""

    ids: Sequence[int]
    learnt: Sequence[bool]
    starts: Sequence[int]
    padding: int = 0


def written(row: Row, tokenizer: PreTrainedTokenizerBase, marks: tuple[str, str] = LEARNT) -> str:
    """A row as text, with `marks` around what is learnt of it."""
    text, marked = "", False
    changes = {i for i in range(1, len(row.ids)) if row.learnt[i] != row.learnt[i - 1]}
    for first, _, piece in pieces(row.ids, tokenizer, changes.union(row.starts)):
        begins, learnt = first in row.starts and first > 0, row.learnt[first]
        if marked and (begins or not learnt):
            text, marked = text + marks[1], False
        if begins:
            text += "\n" * (not text.endswith("\n")) + RULE + "\n"
        if learnt and not marked:
            text, marked = text + marks[0], True
        text += _visible(piece)
    text += marks[1] * marked
    return text + (f"\n({row.padding:,} tokens of padding)" if row.padding else "")


def pieces(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, cuts: Collection[int] = ()
) -> Iterator[tuple[int, int, str]]:
    """(first, stop, text) of as few tokens each as make whole characters; none goes over a cut.

    A token is decoded behind the piece before it, since many tokenizers drop the space of a first word.
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
    """With what a terminal would obey written out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
