"""Tokenizes text on all cores, and long texts in pieces, so that the tokenizer uses little memory.

A cut may change tokens: " " and "b", encoded separately, never give the token " b". So a text is cut only between a
line that ends in a visible character and a line that begins with an ASCII letter, where common pre-tokenizers begin a
word. Each cut is also tested: the text around the cut must have identical ids with and without the cut. (Texts on which
a tokenizer is trained are cut without a test.) If the first PROOFS tests of a `Cuts` object all fail, the
object allows no cuts from then on. This happens with SentencePiece tokenizers, which put a marker before every text.
For slow tokenizers, texts are not cut.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PIECE = 1 << 15  # minimum number of characters of a piece, except the last; small, so that a batch has many pieces
BATCH = 1 << 20  # bytes of text encoded at once; each token, even of one byte, takes over 100 bytes of memory
EACH = 32  # bytes that are added to the size of each text, for the object that contains its tokens
AROUND = 128  # characters on each side of a cut that are encoded to test the cut
PROOFS = 8  # if each of the first PROOFS tested cuts changes tokens, no more cuts are tried
CUT = re.compile(r"(?<=\S)\n(?=[A-Za-z])")
T = TypeVar("T")


class Cuts:
    """Decides where texts may be cut without changing their ids. Attributes: never: True: cuts are not allowed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.tried, self.proofs = 0, 0
        self.never = not tokenizer.is_fast

    def proved(self, text: str, at: int) -> bool:
        """Returns whether a cut at position `at` leaves the ids of the text around it unchanged. Sets `never` once the
        first PROOFS tests have failed."""
        before, behind = text[max(0, at - AROUND) : at], text[at : at + AROUND]
        uncut, *cut = ids_of(self.tokenizer, [before + behind, before, behind])
        same = np.array_equal(uncut, np.concatenate(cut))
        self.tried, self.proofs = self.tried + 1, self.proofs + same
        if self.tried == PROOFS and not self.proofs:
            self.never = True
            log.info("data: this tokenizer encodes a text differently in pieces, so each text is encoded whole.")
        return same


def pieces(blocks: Iterable[str], cuts: Cuts | None = None) -> Iterator[tuple[str, bool]]:
    """Yields each piece of a text, with True if the piece ends the text. Yields nothing for an empty text.

    Args:
        blocks: the blocks of one text.
        cuts: None: every cut is allowed, because the pieces are only used to train a tokenizer.
    """
    piece: list[str] = []  # parts of the current piece
    for block in blocks:
        start = 0
        for at in _places(block, cuts):
            yield "".join([*piece, block[start:at]]), False
            piece, start = [], at
        piece.append(block[start:])
    if any(piece):
        yield "".join(piece), True


def _places(block: str, cuts: Cuts | None) -> Iterator[int]:
    """Yields the positions at which a block may be cut."""
    at = PIECE
    while not (cuts and cuts.never) and (match := CUT.search(block, at, max(at, len(block) - AROUND))):
        at = match.end()
        if cuts is None or cuts.proved(block, at):
            yield at
            at += PIECE


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns a (tokens,) uint32 array for each text: its ids, without special tokens."""
    cuts, ids_by_text = Cuts(tokenizer), [[] for _ in texts]
    numbered = ((number, piece) for number, text in enumerate(texts) for piece, _ in pieces([text], cuts))
    for batch in batches(numbered, lambda item: text_bytes(item[1])):
        ids_by_piece = ids_of(tokenizer, [piece for _, piece in batch])
        for (number, _), ids in zip(batch, ids_by_piece, strict=True):
            ids_by_text[number].append(ids)
    return [ids[0] if len(ids) == 1 else np.concatenate([np.empty(0, np.uint32), *ids]) for ids in ids_by_text]


def ids_of(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    """Returns a (tokens,) uint32 array for each text: its ids. The tokenizer's own result is 50 times as large, and is
    freed on return."""
    if tokenizer.is_fast:  # `encode_batch_fast` uses all cores, and does not compute offsets
        backend = tokenizer.backend_tokenizer
        if backend.truncation or backend.padding:  # settings of tokenizer.json, which the tokenizer's own call resets
            backend.no_truncation()
            backend.no_padding()
        encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encoded]
    return [np.array(ids, np.uint32) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def controls(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns a mapping from the text of each special token to its id. If a document contains the text of a special
    token, the tokenizer encodes this text as the special token itself, for example as end of text."""
    return {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields groups of items. A group has about `BATCH` bytes, which suffices to use all cores and takes little memory.
    Args: size: returns the bytes of an item."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item) + EACH
        if total >= BATCH:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
