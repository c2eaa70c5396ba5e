"""Defines how training opens a data source, that is, turns its documents into rows of tokens.

The documents of a `StoredSource` are tokenized into the token store once. `Mix`, `Stream` and `Random` define `opened`
themselves. `training/build.py` opens one source per run; if this source is a mixture, `mix.py` opens every source of
the mixture. If data.val_path names several validation sets, `build.py` creates a source for each set, opens only the
first source, and gets the validation tokens of the other sources from `token_store.held_out`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hydra.utils import get_object
from transformers import PreTrainedTokenizerBase

from lowmem.data import packing
from lowmem.data.loader import Rows
from lowmem.data.packing import rows
from lowmem.data.sources.source import Source, SplitName
from lowmem.data.token_store import Split, Tokens, tokenize
from lowmem.system.errors import Refused


class RowSettings(NamedTuple):
    """The settings for making rows.

    Args:
        cache_dir: the folder of the token store.
        seq_len: maximum number of input tokens of a row. Only rows with packing=padded may be shorter.
        bpe_size: vocabulary size of the tokenizer that is trained on the source if `tokenizer` is None. Random tokens
            ignore this size.
        tokenizer: the model's tokenizer, whose chat template and begin-of-text token `opened` sets as the source
            requires (`dress`); None: train one. A stream cannot be opened with None.
        special_tokens: special tokens of the trained tokenizer, besides the end-of-text token and the special tokens of
            a chat format.
    """

    cache_dir: Path
    seq_len: int
    bpe_size: int
    tokenizer: PreTrainedTokenizerBase | None
    special_tokens: list[str]


class Opened(NamedTuple):
    """The rows of an opened source.

    Args:
        tokens: the tokenizer and the tokens of both splits. For a mixture, these are the splits of one of its sources.
            The training split of a stream and both splits of random tokens are empty.
        val: name of a validation set -> its rows; a single, unnamed validation set has the name "".
    """

    tokens: Tokens
    train: Rows
    val: dict[str, Rows]


class Openable(Source):
    """The base class of sources that `training/build.py` and a mixture can open."""

    @classmethod
    def rows_class(cls, data: Mapping) -> type[Rows]:
        """Returns a class of rows without opening the source. The `example` of this class has the same type and the
        same kinds of tensors as the source's micro-batches. This class need not be the class of the training rows: a
        mixture, a stream and random tokens have row classes of their own. The planner traces the model with the
        example, and the type of the example decides whether the loss accepts the data. Args: data: the arguments of the
        source."""
        return packing.rows_class(data)

    def opened(self, wanted: RowSettings) -> Opened:
        """Returns the tokenizer and the rows of both splits.

        Raises:
            Refused: for example, a file cannot be read, or nothing is left to train on.
        """
        raise NotImplementedError


def source_class(target: str) -> type[Openable]:
    """Returns the source class that a `_target_` names, or `Openable` if the `_target_` names anything else, such as a
    function that creates a source."""
    target = get_object(target)
    return target if isinstance(target, type) and issubclass(target, Openable) else Openable


def openable(source: object, typed: str) -> Openable:
    """Returns the source unchanged if it derives from `Openable`. Args: typed: the override that the message names,
    such as data._target_=my.Source.

    Raises:
        Refused: the object does not derive from `Openable`.
    """
    if not isinstance(source, Openable):
        raise Refused(
            f"{typed}: {type(source).__name__} is not a data source. Derive it from lowmem.data.opening.StoredSource, "
            "or from Openable if it stores no tokens on disk."
        )
    return source


class StoredSource(Openable):
    """A source whose documents are tokenized once, into the token store."""

    def opened(self, wanted: RowSettings) -> Opened:
        tokens = tokenize(self, wanted.cache_dir, wanted.bpe_size, wanted.tokenizer, wanted.special_tokens)
        train, val = (
            self.rows(split, wanted.seq_len, name) for name, split in (("train", tokens.train), ("val", tokens.val))
        )
        return Opened(tokens, train, {"": val})

    def rows(self, split: Split, seq_len: int, name: SplitName) -> Rows:
        """Returns the rows of a split. Raises: Refused: see `packing.rows`."""
        return rows(split, seq_len, self.packing, self.too_long, name)
