"""Defines the interface of data sets. To the token store, a data set is a `Source`: a sequence of documents of token
ids.

Each `conf/data/<kind>.yaml` names a class or function that creates a source. Creating a source lists files, but does
not read the records or texts in these files. `text_files.py` has the sources of text files, and `records.py` the
sources of records.
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
# value of data.bos for runs that an earlier version of lowmem started: texts have no begin-of-text token, and
# completions are encoded separately from their prompts
OLDER = "older"
# A constant part of cache keys. In earlier versions, this part was a setting that could accept records with control
# tokens.
REFUSE = "refuse"


class Encoded(NamedTuple):
    """A document, or a part of a document that is too long to be encoded at once."""

    ids: np.ndarray | list[int]  # (tokens,), including the tokens that begin and end the document
    learned: np.ndarray | None  # (len(ids),) bool; None: all tokens are learned
    text_bytes: int  # bytes of the encoded text, without the tokens that begin and end the document
    ends: bool = True  # False: more of this document follows


class ChatFormat(Protocol):
    """The interface of conversation formats, implemented by `chat.py`."""

    source: str | None  # the template that was typed; None: the tokenizer's own template
    tokens: Sequence[str]  # special tokens for a tokenizer that is trained on the conversations

    def dress(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the tokenizer's chat template, which is saved with the tokenizer, and the end-of-text token that the
        template needs."""


class Encoder:
    """The base class of encoders. An encoder makes documents from the fields of records: texts in `records.py`,
    conversations in `chat.py`, pairs and rated answers in `preference.py`."""

    chat: ChatFormat | None = None

    def key(self) -> list:
        """Returns this encoder's part of the cache key: the settings that change the tokens, as values that JSON can
        represent."""
        raise NotImplementedError

    def text(self, fields: dict) -> str:
        """Returns the text to train a tokenizer on.

        Raises:
            BadRecord: the record cannot be used.
        """
        raise NotImplementedError

    def repeats_prompt(self, fields: dict) -> str | None:
        """Returns advice for the user if the answers of a record repeat its prompt, else None. The model would read a
        repeated prompt twice, and learn to generate it."""
        return None

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, batch: list[dict]
    ) -> list[Encoded | list[Encoded] | BadRecord]:
        """Returns for each record its document or documents, or a BadRecord with the reason why the record cannot be
        used.

        Raises:
            Refused: the tokenizer or its chat template cannot be used.
        """
        raise NotImplementedError

    def count(self, fields: dict) -> int:
        """Returns the number of documents that `encode` makes of a record; 0 if `encode` makes none, or if the number
        is unknown."""
        return 1

    def remarks(self) -> Counter[str]:
        """Returns remarks for the log about the records that were encoded since the last call, with their counts."""
        return Counter()


class Source:
    """A data set. Sources derive from a subclass in `data/opening.py`: from `StoredSource` if their tokens are stored
    on disk, else from `Openable`."""

    name: str  # prefix of the cache folder's name
    packing = "joined"  # how documents become rows: joined, documents or padded
    too_long = "cut"  # what to do with documents longer than a row: cut, drop or refuse
    chat: ChatFormat | None = None  # the format of conversations; None: no conversations
    # True or False: texts begin with or without the begin-of-text token; auto: as in `tokenizer(text)`; older: see
    # OLDER
    bos: bool | str = "auto"
    streams = False  # True: the number of rows is unknown (`Stream`)

    def key(self) -> list:
        """Returns this source's part of the cache key: values that JSON can represent, and that depend on the contents
        of the data and on the settings that change the tokens."""
        raise NotImplementedError

    def size(self, split: SplitName) -> int | None:
        """Returns the approximate number of bytes of a split, for the progress bar and the choice of texts that train a
        BPE; None: unknown."""
        raise NotImplementedError

    def texts(self) -> Iterator[str]:
        """Yields the texts of the training split, on which a tokenizer is trained."""
        raise NotImplementedError

    def encoded(self, split: SplitName, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
        """Yields the documents of a split in order. A long document may be yielded in several parts. Each call starts
        again. The token store (`data/token_store.py`) calls this method.

        Raises:
            Refused: the data or the tokenizer cannot be used: for example, a file cannot be read or is not text, a
                record cannot be used, or the split is empty.
        """
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Returns messages about the encoded data, for example about records that were left out. The log shows these
        messages whenever the cache is used."""
        raise NotImplementedError
