"""What a data set is to those who store it: documents of token ids, one after the other.

Each `conf/data/<kind>.yaml` names a class or function that gives a source. Opening one reads names alone: the planner
and the checks at the start ask it for no more. Files of text are one (`corpus.py`), records another (`records.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SplitName = Literal["train", "val"]


class Encoded(NamedTuple):
    """A document, or a piece of one that is too long to be held at once."""

    ids: np.ndarray | list[int]  # its end token included, where the tokenizer has one
    learnt: np.ndarray | None  # (len(ids),) bool; None: all of them
    text_bytes: int  # of the text that the ids stand for; an end token is no text
    ends: bool = True  # False: more of this document follows


class Source(Protocol):
    name: str  # begins the name of the cache's folder
    packing: str  # how rows are made of its documents: joined, documents or padded
    too_long: str  # what becomes of a document that is longer than a row: cut, drop or refuse

    # A source of conversations also has `chat`: what they ask of a tokenizer, `tokens` and `dress(tokenizer)`.

    def key(self) -> list:
        """Of contents, and of settings that change the tokens: lists, texts and numbers."""

    def size(self, split: SplitName) -> int | None:
        """Bytes that will be read, about, for the progress bar; None: nobody knows."""

    def texts(self) -> Iterator[str]:
        """The training text, for a tokenizer to be trained on."""

    def encoded(self, split: SplitName, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
        """Every document in order; read again at each call.

        Raises:
            Refused: what cannot be read, or is no text.
        """

    def notes(self) -> list[str]:
        """What was left out of what has been encoded, a sentence each: the log has it at every use of the cache."""
