"""What a data set is to those who store it: documents of token ids, one after the other.

Each `conf/data/<kind>.yaml` names a class or function that gives a source. Opening one reads names alone: the planner
and the checks at the start ask it for no more. Files of text are one (`text_files.py`), records another (`records.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from lowmem.data.sources.bad_record import BadRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SplitName = Literal["train", "val"]


class Encoded(NamedTuple):
    """A document, or a piece of one that is too long to be held at once."""

    ids: np.ndarray | list[int]  # its end token included, where the tokenizer has one
    learnt: np.ndarray | None  # (len(ids),) bool; None: all of them
    text_bytes: int  # of the text that the ids stand for; an end token is no text
    ends: bool = True  # False: more of this document follows


class ChatFormat(Protocol):
    """What conversations ask of a tokenizer; `chat.py` has the only one."""

    source: str | None  # the template that was typed; None: the tokenizer's own
    tokens: Sequence[str]  # special tokens of a tokenizer that is trained on the conversations

    def dress(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give it the template, which is saved with it."""


class Encoder:
    """Makes documents of records; `records.py` and `chat.py` have the kinds."""

    chat: ChatFormat | None = None

    def key(self) -> list:
        """Settings that change the tokens: texts and numbers."""
        raise NotImplementedError

    def text(self, fields: dict) -> str:
        """Returns what a tokenizer is trained on. Raises: Bad: a record that cannot be used."""
        raise NotImplementedError

    def encode(self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]) -> list[Encoded | BadRecord]:
        """Returns a document of each record, or why there is none."""
        raise NotImplementedError


class Source:
    """A data set. `data/opening.py` has the base of those whose tokens are stored on disk; others open themselves."""

    name: str  # begins the name of the cache's folder
    packing = "joined"  # how rows are made of its documents: joined, documents or padded
    too_long = "cut"  # what becomes of a document that is longer than a row: cut, drop or refuse
    chat: ChatFormat | None = None  # of conversations
    streams = False  # it has no end, and no rows that could be counted

    def key(self) -> list:
        """The cache is named by this: contents, and settings that change the tokens, as lists, texts and numbers."""
        raise NotImplementedError

    def size(self, split: SplitName) -> int | None:
        """Bytes that will be read, about, for the progress bar; None: nobody knows."""
        raise NotImplementedError

    def texts(self) -> Iterator[str]:
        """The training text, for a tokenizer to be trained on."""
        raise NotImplementedError

    def encoded(self, split: SplitName, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
        """The token store (`data/token_store.py`) reads every document in order; read again at each call.

        Raises:
            Refused: what cannot be read, or is no text.
        """
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What was left out of what has been encoded, a sentence each: the log has it at every use of the cache."""
        raise NotImplementedError
