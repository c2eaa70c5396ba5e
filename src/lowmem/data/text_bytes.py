"""Bits per byte: the loss of a validation set by the bytes of the text that was predicted, which no tokenizer changes.

Of text without gaps the store knows the bytes of each document. Of anything else, such as the answers of a chat or
documents that stand apart, the labels that count are looked at, once: the bytes of each run of them are those that it
adds to the tokens before it, since a token alone may lose a space, or be a part of a character.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem.data.loader import IGNORED, MicroBatch, ValidationLoader
from lowmem.data.tokens import Tokens, byte_level, bytes_of

BEFORE = 4  # tokens: a character has no more bytes


def bits_per_byte(tokens: Tokens, val: ValidationLoader) -> Callable[[float], float]:
    """nats per token that counts -> bits per byte of their text. An end token is no text, and costs nats."""
    counted = cache(lambda: _counted(tokens, val))

    def bits(nats: float) -> float:
        predicted, text = counted()
        return nats / np.log(2) * predicted / (text or float("nan"))

    return bits


def _counted(tokens: Tokens, val: ValidationLoader) -> tuple[int, int]:
    """Labels that count, and bytes of their text."""
    if val.sequences.without_gaps:
        known = replace(tokens, val=val.sequences.split)  # of a mixture each part has its own
        return val.predicted, known.val_bytes(val.predicted + 1) - known.val_bytes(1)
    return label_bytes(tokens.tokenizer, val)


def label_bytes(tokenizer: PreTrainedTokenizerBase, micro_batches: Iterator[MicroBatch]) -> tuple[int, int]:
    """The same of any rows."""
    count = text = 0
    special = [IGNORED, *tokenizer.all_special_ids]

    def added(before: np.ndarray, run: np.ndarray) -> int:
        before, run = (ids[~np.isin(ids, special)] for ids in (before, run))
        return bytes_of(tokenizer, np.concatenate([before, run])) - bytes_of(tokenizer, before)

    for micro_batch in micro_batches:
        count += micro_batch.tokens
        inputs, labels = micro_batch.input_ids.numpy(), micro_batch.labels.numpy()
        if byte_level(tokenizer):
            text += added(labels[0, :0], labels.ravel())
            continue
        for row, start, stop in _runs(labels != IGNORED):
            text += added(inputs[row, max(0, start + 1 - BEFORE) : start + 1], labels[row, start:stop])
    return count, text


def _runs(counts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(row, start, stop) of each stretch of labels that count."""
    for row, of_row in enumerate(counts):
        edges = np.flatnonzero(np.diff(of_row, prepend=False, append=False)).tolist()
        yield from ((row, start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))
