"""Implements a byte-trigram model, a baseline that a language model trained on the same corpus must beat.

It estimates P(c | ab) from counts. P(c | ab) is smoothed towards P(c | b), P(c | b) towards P(c), and P(c) towards
1/256, each with the weight of `PRIOR` observations. The 256^3 counts take 64 MiB, and counting takes about a second per
10 MB of text.
"""

from collections.abc import Iterable

import numpy as np

PRIOR = 2.0  # weight of the shorter context, in observations; on source code, 1 to 4 differ by < 0.02 bits per byte


def trigram_bits_per_byte(train: Iterable[bytes], val: Iterable[bytes]) -> float:
    """Returns the mean of -log2 P(byte | the two bytes before it) over the bytes of the validation texts that have two
    bytes before them."""
    counts = np.zeros(256**3, dtype=np.int32)
    for text in _joined(train):
        np.add.at(counts, _trigrams(text), 1)
    n_abc = counts.reshape(256, 256, 256)
    n_bc = n_abc.sum(0)  # (256, 256)
    n_c = n_bc.sum(0)  # (256,)
    p_c = (n_c + PRIOR / 256) / (n_c.sum() + PRIOR)
    p_bc = (n_bc + PRIOR * p_c) / (n_bc.sum(1, keepdims=True) + PRIOR)
    n_ab = n_abc.sum(2)  # (256, 256)
    bits, total = 0.0, 0
    for text in _joined(val):
        index = _trigrams(text)
        seen, context, last_two = (
            counts[index],
            n_ab.reshape(-1)[index >> 8],
            p_bc.reshape(-1)[index & 0xFFFF],
        )
        bits -= np.log2((seen + PRIOR * last_two) / (context + PRIOR)).sum()
        total += len(index)
    return float(bits / max(1, total))


def _trigrams(text: bytes) -> np.ndarray:
    """Returns the indices a * 65536 + b * 256 + c of all trigrams, with shape (len(text) - 2,)."""
    b = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    return (b[:-2] << 16) | (b[1:-1] << 8) | b[2:]


def _joined(texts: Iterable[bytes], size: int = 4 << 20) -> Iterable[bytes]:
    """Joins texts by line breaks, and yields pieces of at least `size` bytes (the last piece may be shorter), because
    NumPy is slow on thousands of small arrays."""
    short: list[bytes] = []
    for text in texts:
        short.append(text)
        if sum(map(len, short)) >= size:
            yield b"\n".join(short)
            short = []
    if short:
        yield b"\n".join(short)
