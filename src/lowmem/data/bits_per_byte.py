"""Converts a validation loss to bits per byte of the predicted text, a unit that is comparable across tokenizers.

The loss in nats per label is divided by ln 2 and multiplied by the number of labels per byte. If the rows are
consecutive parts of a split and no label is ignored, the number of bytes is read from the token store, which stores the
size of each document's text; only an incomplete last document is decoded. For other rows, such as the answers of a chat
or rows with packing=documents, each process reads its device's rows once, and counts their labels and the bytes of the
labels' text. With several devices, the results of the processes then differ slightly.

With a byte-level tokenizer, each token has a fixed number of bytes. With other tokenizers, a token that is decoded
separately may lose a space or contain an incomplete character. So a run of consecutive labels is decoded together with
up to BEFORE tokens before the run, and the bytes that the run adds to the decoded text are counted.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem.data.loader import IGNORED, MicroBatch, ValidationLoader
from lowmem.data.token_store import Tokens, byte_level, bytes_of

BEFORE = 4  # tokens of context; enough to complete a character of at most 4 bytes


def bits_per_byte(tokens: Tokens, val: ValidationLoader) -> Callable[[float], float]:
    """Returns a function that converts nats per label to bits per byte. If the labels have no text, this function
    returns nan. The labels and bytes are counted at the first call of the returned function. An end-of-text token
    counts as a label without bytes."""
    counted = cache(lambda: _counted(tokens, val))

    def bits(nats: float) -> float:
        predicted, text = counted()
        return nats / np.log(2) * predicted / (text or float("nan"))

    return bits


def _counted(tokens: Tokens, val: ValidationLoader) -> tuple[int, int]:
    """Returns the number of labels, and the number of bytes of their text. For rows with `without_gaps`, both numbers
    are totals of all devices; otherwise they cover only the rows of this device."""
    if val.sequences.without_gaps:
        known = replace(tokens, val=val.sequences.split)  # each source of a mixture has its own split
        return val.predicted, known.val_bytes(val.predicted + 1) - known.val_bytes(1)
    return label_bytes(tokens.tokenizer, val)


def label_bytes(tokenizer: PreTrainedTokenizerBase, micro_batches: Iterator[MicroBatch]) -> tuple[int, int]:
    """Returns the number of labels in all micro-batches, and the number of bytes of their text. Returns (0, 0) for
    pairs and rated answers, whose losses are not in nats per label."""
    count = text = 0
    special = [IGNORED, *tokenizer.all_special_ids]

    def added(before: np.ndarray, run: np.ndarray) -> int:
        before, run = (ids[~np.isin(ids, special)] for ids in (before, run))
        return bytes_of(tokenizer, np.concatenate([before, run])) - bytes_of(tokenizer, before)

    for micro_batch in micro_batches:
        if micro_batch.UNIT != "tokens":
            return 0, 0
        count += micro_batch.learned_tokens
        inputs, labels = micro_batch.input_ids.numpy(), micro_batch.labels.numpy()
        if byte_level(tokenizer):
            text += added(labels[0, :0], labels.ravel())
            continue
        for row, start, stop in _runs(labels != IGNORED):
            text += added(inputs[row, max(0, start + 1 - BEFORE) : start + 1], labels[row, start:stop])
    return count, text


def _runs(counts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields (row, start, stop) for each run of consecutive labels. Args: counts: (B, T) bool: True for a label."""
    for row, of_row in enumerate(counts):
        edges = np.flatnonzero(np.diff(of_row, prepend=False, append=False)).tolist()
        yield from ((row, start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))
