"""Tokens on disk: they are the text, they are made once, and nobody sees half of them."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
    assert made.val_bytes(len(made.val)) == sum(f.stat().st_size for f in texts.val)
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

    monkeypatch.setattr(tokens.json, "dumps", dies)
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


# --- bits per byte ----------------------------------------------------------------------------------------------------

WORDS = b"return self " * 40  # frequent: a token has several bytes
SIGNS = "éß".encode() * 100  # not in the training text: every byte is a token


@pytest.fixture
def uneven(tmp_path):
    """Several bytes per token in the first validation document, one in the second: their tokens and ends."""
    for name, content in (("train", WORDS * 9), ("val/0", WORDS), ("val/1", SIGNS)):
        (tmp_path / f"{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_bytes(content)
    read = corpus.text(str(tmp_path / "train.txt"), "*.txt", 0.2, str(tmp_path / "val"))
    made = tokens.tokenize(read, tmp_path / "cache", 300)
    first = int(np.flatnonzero(made.val == made.tokenizer.eos_token_id)[0]) + 1
    assert first < len(WORDS) / 3 and len(made.val) == first + len(SIGNS) + 1
    return made, first


def test_the_bytes_of_any_number_of_tokens(uneven):
    made, first = uneven
    for count in range(first):
        assert made.val_bytes(count) == len(made.tokenizer.decode(made.val[:count]))  # ASCII
    assert made.val_bytes(first - 1) == made.val_bytes(first) == len(WORDS)  # an end-of-text token is no text
    for count in range(len(SIGNS) + 1):  # also inside a sign of two bytes
        assert made.val_bytes(first + count) == len(WORDS) + count
    assert made.val_bytes(len(made.val)) == len(WORDS) + len(SIGNS)


def test_bits_per_byte_are_those_of_what_was_predicted(uneven):
    made, first = uneven
    token_0 = len(made.tokenizer.decode(made.val[:1]))
    for predicted, text in ((first - 1, len(WORDS)), (first + 10, len(WORDS) + 11), (len(made.val) - 1, 880)):
        assert made.bits_per_byte(predicted)(np.log(2)) == pytest.approx(predicted / (text - token_0), rel=1e-12)
    assert made.bits_per_byte(first - 1)(1.0) < 0.5 * made.bits_per_byte(len(made.val) - 1)(1.0)


def test_of_a_large_split_only_the_document_that_is_cut_is_looked_at(uneven, monkeypatch):
    made, first = uneven
    text_bytes, looked_at = tokens._text_bytes, []
    monkeypatch.setattr(tokens, "_text_bytes", lambda t, ids: looked_at.append(len(ids)) or text_bytes(t, ids))
    assert made.val_bytes(len(made.val)) == 880 and made.val_bytes(first) == len(WORDS) and not looked_at
    monkeypatch.setattr(tokens, "COUNTED_AT_ONCE", 3)
    assert made.val_bytes(first + 10) == len(WORDS) + 10 and looked_at == [3, 3, 3, 1]


def test_bytes_of_tokens_that_are_no_bytes(uneven, tmp_path):
    """As SentencePiece makes them: a space before every word, and bytes only for what is not in the vocabulary."""
    words = ["wörd", "other", "läst"]
    ids = {token: i for i, token in enumerate(["<unk>", "<end>", *(f"▁{w}" for w in words), "<0xC3>", "<0x9F>"])}
    model = Tokenizer(models.Unigram([(token, -1.0) for token in ids], unk_id=0, byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    pieces = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    for i, content in enumerate(("wörd other läst wördß", "läst läst")):
        (tmp_path / "val" / f"{i}.txt").write_text(content)
    read = corpus.text(str(tmp_path / "train.txt"), "*.txt", 0.2, str(tmp_path / "val"))
    made = tokens.tokenize(read, tmp_path / "cache", 0, pieces)
    assert made.val.tolist() == [ids[t] for t in ("▁wörd", "▁other", "▁läst", "▁wörd", "<0xC3>", "<0x9F>", "<end>")] + [
        *(ids["▁läst"], ids["▁läst"], ids["<end>"]),
    ]
    text = [0, 5, 11, 17, 23, 23, 25, 25, 30, 36, 36]  # the first byte of ß alone is no character
    assert [made.val_bytes(count) for count in range(11)] == text


def test_a_run_says_the_bits_per_byte_of_its_first_validation_sequences(fit, uneven, tmp_path):
    made, _ = uneven
    files = (f"data.path={tmp_path}/train.txt", f"data.val_path={tmp_path}/val")
    summary, _ = fit("data=text", *files, "val_sequences=1", "max_steps=1")
    text = len(made.tokenizer.decode(made.val[1:17]))  # of tokens 1 to 16
    assert summary["bits_per_byte"] == pytest.approx(summary["val_loss"] / np.log(2) * 16 / text, rel=1e-12)
