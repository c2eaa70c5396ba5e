"""Defines a data set as the token store reads it: a sequence of documents of token ids.

Each `conf/data/<kind>.yaml` names a class or function that makes a source. Opening a source reads only file names,
which is enough for the planner and the checks at the start. Text files are one kind (`text_files.py`), records another
(`records.py`).
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
# data.bos of runs that an earlier version started: texts have no begin token, and completions are encoded separately
OLDER = "older"
REFUSE = "refuse"  # part of cache keys, since earlier versions could also read records with control tokens


class Encoded(NamedTuple):
    """A document, or a part of one that is too long for memory."""

    ids: np.ndarray | list[int]  # including the tokens that begin and end it, see `framing.py`
    learned: np.ndarray | None  # (len(ids),) bool; None: all tokens are learned
    text_bytes: int  # bytes of the encoded text, without the tokens that begin and end it
    ends: bool = True  # False: more of this document follows


class ChatFormat(Protocol):
    """The interface of conversation formats, implemented by `chat.py`."""

    source: str | None  # the typed template; None: the tokenizer's own
    tokens: Sequence[str]  # special tokens for a tokenizer that is trained on the conversations

    def dress(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the tokenizer's chat template, which is saved with the tokenizer."""


class Encoder:
    """Makes documents of records; see `records.py` and `chat.py`."""

    chat: ChatFormat | None = None

    def key(self) -> list:
        """Returns settings that change the tokens: texts and numbers."""
        raise NotImplementedError

    def text(self, fields: dict) -> str:
        """Returns the text to train a tokenizer on.

        Raises:
            BadRecord: the record cannot be used.
        """
        raise NotImplementedError

    def repeats_prompt(self, fields: dict) -> str | None:
        """Returns advice about a record whose answers repeat the prompt, so that the model would read the prompt twice
        and learn to generate it; None if they do not."""
        return None

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]
    ) -> list[Encoded | list[Encoded] | BadRecord]:
        """Returns for each record its document or documents, or the reason why it cannot be used."""
        raise NotImplementedError

    def count(self, fields: dict) -> int:
        """Returns the number of documents of a record; 0 if the record cannot be used or the number is unknown."""
        return 1

    def remarks(self) -> Counter[str]:
        """Returns remarks for the log about records encoded since the last call, with their counts."""
        return Counter()


class Source:
    """A data set. Sources whose tokens are stored on disk derive from a class in `data/opening.py`; other sources open
    themselves."""

    name: str  # prefix of the cache folder's name
    packing = "joined"  # how its documents become rows: joined, documents or padded
    too_long = "cut"  # how documents longer than a row are handled: cut, drop or refuse
    chat: ChatFormat | None = None  # the format of conversations
    bos: bool | str = "auto"  # whether each text begins with a token; auto: as the tokenizer's own call does
    streams = False  # True: the source has no known end and no number of rows

    def key(self) -> list:
        """Returns the cache key: lists, texts and numbers that depend on contents, and on settings that change the
        tokens."""
        raise NotImplementedError

    def size(self, split: SplitName) -> int | None:
        """Returns the approximate number of bytes to read, for the progress bar; None: unknown."""
        raise NotImplementedError

    def texts(self) -> Iterator[str]:
        """Yields the training text, to train a tokenizer on."""
        raise NotImplementedError

    def encoded(self, split: SplitName, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
        """Yields every document in order; each call starts again. The token store (`data/token_store.py`) calls this.

        Raises:
            Refused: a file cannot be read or is not text.
        """
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Returns messages about records that were left out while encoding. The log shows them whenever the cache is
        used."""
        raise NotImplementedError
