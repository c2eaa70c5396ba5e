"""Tokens on disk: they are the text, they are made once, and nobody sees half of them."""

import numpy as np
import pytest

from lowmem.data import corpus, tokens
from lowmem.errors import Refused


@pytest.fixture
def texts(text_folder):
    return corpus.text(str(text_folder), "**/*.txt", 0.2)


def test_tokens_are_the_text_with_an_end_after_every_file(texts, tmp_path):
    made = tokens.tokenize(texts, tmp_path, 300)
    expected = "".join(f.read_text() + tokens.END_OF_TEXT for f in texts.train)
    assert made.tokenizer.decode(made.train) == expected
    assert (np.asarray(made.val) == made.tokenizer.eos_token_id).sum() == len(texts.val)
    assert made.val_bytes == sum(f.stat().st_size for f in texts.val)
    assert made.train.dtype == np.uint16


def test_the_second_time_nothing_is_made(texts, tmp_path, monkeypatch):
    first = tokens.tokenize(texts, tmp_path, 300)
    monkeypatch.setattr(tokens, "_write", lambda *a: pytest.fail("made again"))
    second = tokens.tokenize(texts, tmp_path, 300)
    assert np.array_equal(first.train, second.train) and isinstance(second.train, np.memmap)


def test_the_cache_is_keyed_by_content_and_vocabulary(text_folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for f in text_folder.iterdir():
        (copy / f.name).write_bytes(f.read_bytes())

    def key(vocab_size=300):
        return tokens._key(corpus.text(str(copy), "**/*.txt", 0.2), vocab_size, None)

    first = key()
    assert key() == first and key(299) != first
    assert tokens._key(corpus.text(str(text_folder), "**/*.txt", 0.2), 300, None) == first  # elsewhere, same content
    changed = sorted(copy.iterdir())[0]
    changed.write_text(changed.read_text() + "!")
    assert key() != first


def test_an_interrupted_start_leaves_no_half_cache(texts, tmp_path, monkeypatch):
    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens, "trigram_bits_per_byte", dies)
    with pytest.raises(KeyboardInterrupt):
        tokens.tokenize(texts, tmp_path, 300)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_no_text_do_not_stop_it(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(b"words \xff\xfe words " * 20)
    made = tokens.tokenize(corpus.text(str(tmp_path), "**/*.txt", 0.2), tmp_path / "cache", 300)
    assert "words" in made.tokenizer.decode(made.train)


def test_no_text_is_refused(tmp_path):
    empty = corpus.Corpus("text", tmp_path, [], [])
    with pytest.raises(Refused, match="no text"):
        tokens.tokenize(empty, tmp_path / "cache", 300)


def test_bits_per_byte_of_a_uniform_guess(texts, tmp_path):
    made = tokens.tokenize(texts, tmp_path, 300)
    # n nats per token over all tokens of the split, spread over its bytes
    assert made.bits_per_byte(np.log(2)) == pytest.approx(len(made.val) / made.val_bytes)
