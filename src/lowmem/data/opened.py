"""From a source to its rows: by the store, or as a source says that opens itself."""

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lowmem.data.loader import Rows
from lowmem.data.packing import rows
from lowmem.data.source import Source
from lowmem.data.tokens import Tokens, tokenize
from lowmem.errors import Refused


class Wanted(NamedTuple):
    """What rows are made with.

    Args:
        bpe_size: of the tokenizer that is trained on the source where there is none.
        special_tokens: that it has beside the end of text.
    """

    cache_dir: Path
    seq_len: int
    bpe_size: int
    tokenizer: PreTrainedTokenizerBase | None
    special_tokens: list[str]


class Opened(NamedTuple):
    """val: by the names of the validation sets, "" where there is one alone."""

    tokens: Tokens
    train: Rows
    val: dict[str, Rows]


class Openable(Source):
    """A source as `build.py` takes it, and a mixture its parts."""

    def opened(self, wanted: Wanted) -> Opened:
        """Read what is there. Raises: Refused: nothing to train or to validate on; what cannot be read."""
        raise NotImplementedError


def openable(source: object, said: str) -> Openable:
    """Returns the source. Args: said: what was typed for it, such as data._target_=my.Source.

    Raises:
        Refused: something else than a source, or one that does not derive from `Openable`.
    """
    if not isinstance(source, Openable):
        raise Refused(
            f"{said}: this makes a {type(source).__name__}, which cannot be opened. Derive it from StoredSource of "
            "lowmem.data.opened, or from Openable where it keeps no tokens on disk."
        )
    return source


class StoredSource(Openable):
    """Its documents are encoded once, into the token store."""

    def opened(self, wanted: Wanted) -> Opened:
        how = wanted.seq_len, self.packing, self.too_long
        tokens = tokenize(self, wanted.cache_dir, wanted.bpe_size, wanted.tokenizer, wanted.special_tokens)
        return Opened(tokens, rows(tokens.train, *how, "train"), {"": rows(tokens.val, *how, "val")})
