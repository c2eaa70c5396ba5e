"""Defines a data set as the token store sees it: documents of token ids, one after the other.

Each `conf/data/<kind>.yaml` names a class or function that makes a source. Opening one reads only names: the planner
and the checks at the start need no more. Text files are one kind (`text_files.py`), records another (`records.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from lowmem.data.sources.bad_record import BadRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SplitName = Literal["train", "val"]
# data.bos of runs that an earlier version began: no token begins a text, and completions are encoded apart
OLDER = "older"
REFUSE = "refuse"  # is part of the keys of caches, as it was when records with control tokens could be read, too


class Encoded(NamedTuple):
    """A document, or a piece of one that is too long for memory."""

    ids: np.ndarray | list[int]  # with the tokens that begin and end it, see `framing.py`
    learnt: np.ndarray | None  # (len(ids),) bool; None: all of them
    text_bytes: int  # of the text that the ids encode; the tokens that begin and end it are no text
    ends: bool = True  # False: more of this document follows


class ChatFormat(Protocol):
    """The format of conversations, as a tokenizer needs it; `chat.py` has the only one."""

    source: str | None  # the typed template; None: the tokenizer's own
    tokens: Sequence[str]  # special tokens for a tokenizer that is trained on the conversations

    def dress(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Gives the tokenizer the template, which is saved with it."""


class Encoder:
    """Makes documents of records; `records.py` and `chat.py` have the kinds."""

    chat: ChatFormat | None = None

    def key(self) -> list:
        """Returns settings that change the tokens: texts and numbers."""
        raise NotImplementedError

    def text(self, fields: dict) -> str:
        """Returns the text to train a tokenizer on. Raises: BadRecord: a record that cannot be used."""
        raise NotImplementedError

    def repeats_prompt(self, fields: dict) -> str | None:
        """Returns what to do about a record whose answers begin with its prompt, so that a row has the prompt twice and
        learns the second one; None: they do not."""
        return None

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]
    ) -> list[Encoded | list[Encoded] | BadRecord]:
        """Returns for each record its document or documents, or the reason why there is none."""
        raise NotImplementedError

    def count(self, fields: dict) -> int:
        """Returns how many documents a record becomes; 0 if it cannot be used, or if that is not known."""
        return 1

    def remarks(self) -> Counter[str]:
        """Returns what the log says of the records encoded since the last call, and how often it was so."""
        return Counter()


class Source:
    """A data set. The base class of those whose tokens are stored on disk is in `data/opening.py`; others open
    themselves."""

    name: str  # the cache's folder begins with it
    packing = "joined"  # how its documents become rows: joined, documents or padded
    too_long = "cut"  # what happens to a document that is longer than a row: cut, drop or refuse
    chat: ChatFormat | None = None  # the format of conversations
    bos: bool | str = "auto"  # whether a token begins each text; auto: as the tokenizer does it
    streams = False  # True: it has no end, and no number of rows

    def key(self) -> list:
        """Returns lists, texts and numbers that name the cache: they depend on contents, and on settings that change
        the tokens."""
        raise NotImplementedError

    def size(self, split: SplitName) -> int | None:
        """Returns about how many bytes will be read, for the progress bar; None: unknown."""
        raise NotImplementedError

    def texts(self) -> Iterator[str]:
        """Yields the training text, to train a tokenizer on."""
        raise NotImplementedError

    def encoded(self, split: SplitName, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
        """Yields every document in order, again at each call; the token store (`data/token_store.py`) reads them.

        Raises:
            Refused: something cannot be read, or is no text.
        """
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Returns sentences about what was left out while encoding; the log shows them at every use of the cache."""
        raise NotImplementedError
