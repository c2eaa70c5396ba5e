"""Tests the byte-trigram model on sources of known entropy."""

import numpy as np
import pytest
from benchmarks.trigram import PRIOR, trigram_bits_per_byte

pytestmark = pytest.mark.docs


def test_trigram_model_needs_almost_no_bits_for_a_repeating_sequence():
    assert trigram_bits_per_byte([b"abcd" * 5000], [b"abcd" * 500]) < 0.01


@pytest.mark.parametrize("symbols", [2, 16])
def test_trigram_model_needs_the_entropy_of_independent_symbols(symbols):
    draw = np.random.default_rng(0)
    train, val = (draw.integers(0, symbols, n, dtype=np.uint8).tobytes() for n in (400_000, 50_000))
    assert trigram_bits_per_byte([train], [val]) == pytest.approx(np.log2(symbols), abs=0.02)


def test_trigram_model_needs_the_entropy_of_a_second_order_source():
    """Each symbol is the xor of the two symbols before it or, in a tenth of the cases, the opposite of that xor. The
    symbol just before it, taken alone, says nothing about it."""
    draw = np.random.default_rng(0)

    def source(n):
        bits = draw.integers(0, 2, n).tolist()
        for i in range(2, n):
            if draw.random() > 0.2:
                bits[i] = bits[i - 1] ^ bits[i - 2]
        return bytes(bits)

    entropy = -(0.9 * np.log2(0.9) + 0.1 * np.log2(0.1))
    assert trigram_bits_per_byte([source(100_000)], [source(20_000)]) == pytest.approx(entropy, abs=0.02)


def test_trigram_model_needs_the_bits_of_its_prior_for_unseen_bytes():
    """Bytes 128 to 255 do not occur in the training text, so only the prior gives them a probability: 1/256 of PRIOR
    observations."""
    expected = -np.log2((PRIOR / 256) / (1000 - 2 + PRIOR))
    assert trigram_bits_per_byte([b"a" * 1000], [bytes(range(128, 256))]) == pytest.approx(expected)
