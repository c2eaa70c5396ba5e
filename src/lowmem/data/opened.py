"""From a source to its rows: by the store, or as a source itself says whose rows are not documents on disk."""

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lowmem.data.loader import Rows
from lowmem.data.packing import rows
from lowmem.data.source import Source
from lowmem.data.tokens import Tokens, tokenize


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


def opened(source: Source, wanted: Wanted) -> Opened:
    if hasattr(source, "opened"):
        return source.opened(wanted)
    how = wanted.seq_len, source.packing, source.too_long
    tokens = tokenize(source, wanted.cache_dir, wanted.bpe_size, wanted.tokenizer, wanted.special_tokens)
    return Opened(tokens, rows(tokens.train, *how, "train"), {"": rows(tokens.val, *how, "val")})
