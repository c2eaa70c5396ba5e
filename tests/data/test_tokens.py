"""Tokens on disk: they decode to the text, a second run reads them from the cache, and no run sees an incomplete
cache."""

import hashlib
import random
import resource
import shlex

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowmem.data import token_store
from lowmem.data.sources import reading, text_files
from lowmem.system.errors import Refused


@pytest.fixture
def texts(text_folder):
    return text_files.text(str(text_folder), "**/*.txt", 0.2)


def test_tokens_decode_to_the_text_with_an_end_after_every_file(texts, tmp_path):
    made = token_store.tokenize(texts, tmp_path, 300)
    expected = "".join(f.read_text() + token_store.END_OF_TEXT for f in texts.train)
    assert made.tokenizer.decode(made.train.ids) == expected
    assert (np.asarray(made.val.ids) == made.tokenizer.eos_token_id).sum() == len(texts.val)
    assert made.val_bytes(len(made.val.ids)) == sum(f.stat().st_size for f in texts.val)
    assert made.train.ids.dtype == np.uint16


WORDS_OF_ALL_KINDS = (
    "def",
    "return",
    "Größe",
    "数据",
    "in",
    "🙂",
    "don't",
    "class",
    "  ",
    "x",
    "=",
    "(",
    "):",
    "10",
    "1",
)
# SHA-256 of the ids in cache format 3, in which files were tokenized whole. Losses at a fixed seed depend on the ids.
FORMAT_3 = {
    ".": (
        "457f8c26f01468a35cd2601d2c7f49c9412813df7be22d3a3138c359c90df872",
        "ca8f358c9a1f5fbc16f7214aa047d73d9809cd0782d28da9ce39003e3194e70f",
    ),
    "3.txt": (
        "e1283d77df1f283398f81e47be24ff38d0d9671bf1f5715e1ee6611505edfe67",
        "882b61b2e7129293e0884c326f08e1424529bbfd86bd75653e91d8886adc1df0",
    ),
}


@pytest.mark.parametrize("given", FORMAT_3)
def test_token_ids_of_a_fixed_text_equal_the_recorded_digests_of_cache_format_3(tmp_path, given):
    draw = random.Random(0)
    for i in range(6):
        lines = (" ".join(draw.choices(WORDS_OF_ALL_KINDS, k=draw.randrange(9))) for _ in range(80))
        (tmp_path / f"{i}.txt").write_bytes("\n".join(lines).encode())
    made = token_store.tokenize(text_files.text(str(tmp_path / given), "*.txt", 0.3), tmp_path / "cache", 400)
    digests = tuple(hashlib.sha256(split.ids.tobytes()).hexdigest() for split in (made.train, made.val))
    assert digests == FORMAT_3[given] and made.train.learned_bits is None


def test_second_tokenization_of_a_text_reads_the_cache(texts, tmp_path, monkeypatch):
    first = token_store.tokenize(texts, tmp_path, 300)
    monkeypatch.setattr(token_store, "_write", lambda *a: pytest.fail("made again"))
    second = token_store.tokenize(texts, tmp_path, 300)
    assert np.array_equal(first.train.ids, second.train.ids) and isinstance(second.train.ids, np.memmap)


def test_token_cache_key_depends_on_content_and_vocabulary_size_but_not_on_the_folder(text_folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for f in text_folder.iterdir():
        (copy / f.name).write_bytes(f.read_bytes())

    def key(vocab_size=300):
        return token_store._key(text_files.text(str(copy), "**/*.txt", 0.2), vocab_size, None)

    first = key()
    assert key() == first and key(299) != first
    assert (
        token_store._key(text_files.text(str(text_folder), "**/*.txt", 0.2), 300, None) == first
    )  # another folder with the same content
    changed = sorted(copy.iterdir())[0]
    changed.write_text(changed.read_text() + "!")
    assert key() != first


def test_interrupted_tokenization_leaves_no_cache_folder(texts, tmp_path, monkeypatch):
    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(token_store.json, "dumps", dies)
    with pytest.raises(KeyboardInterrupt):
        token_store.tokenize(texts, tmp_path, 300)
    assert list(tmp_path.iterdir()) == []


def test_iconv_advice_quotes_the_file_name_for_the_shell(tmp_path):
    file = tmp_path / "Müller's old notes.txt"
    file.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(Refused) as refusal:
        list(reading.blocks(file))
    words = shlex.split(str(refusal.value).partition("type ")[2].partition(" > NEW")[0])
    assert words == ["iconv", "-f", "latin1", "-t", "utf-8", str(file)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"words \xff\xfe words " * 20, r"not UTF-8 text \(line 1\). If it is text .* type iconv"),
        ("a line\nGröße".encode("latin-1"), r"not UTF-8 text \(line 2\).*iconv -f latin1 -t utf-8 .*1.txt > NEW"),
        ("Größe".encode("utf-16"), r"not UTF-8 text \(line 1\)"),
        (b"\x7fELF\n\x00\x00 some binary", r"not UTF-8 text \(line 2\).* data.on_error=skip"),
    ],
    ids=["invalid bytes", "latin-1", "utf-16", "binary file"],
)
def test_invalid_utf_8_is_refused_with_the_file_name_unless_on_error_is_set(tmp_path, content, said, caplog):
    for name, written in (("0.txt", b"words " * 40), ("1.txt", content), ("2.txt", b"words " * 30)):
        (tmp_path / name).write_bytes(written)

    def made(on_error):
        read = text_files.text(str(tmp_path), "**/[01].txt", 0.5, str(tmp_path / "2.txt"), on_error=on_error)
        made = token_store.tokenize(read, tmp_path / "cache", 300)
        return made.tokenizer.decode(made.train.ids)

    with pytest.raises(Refused, match=rf"data: {tmp_path}/1.txt is {said}"):
        made("refuse")
    assert not list((tmp_path / "cache").iterdir())
    assert "\N{REPLACEMENT CHARACTER}" in made("replace") and "\0" not in made("replace")
    with caplog.at_level("INFO"):
        assert made("skip") == "words " * 40 + token_store.END_OF_TEXT
    assert "data.on_error=skip: skipped 1 of 2 train files" in caplog.text


def test_last_tenth_of_a_single_text_file_is_its_validation_split(tmp_path):
    text = "\n\n".join(f"Paragraph {i} says Größe.\nAnd more of {i}." for i in range(40))
    (tmp_path / "one.txt").write_text(text)
    made = token_store.tokenize(text_files.text(str(tmp_path / "one.txt"), "*", 0.1), tmp_path / "cache", 300)
    train, val = (
        made.tokenizer.decode(ids).removesuffix(token_store.END_OF_TEXT) for ids in (made.train.ids, made.val.ids)
    )
    assert train + val == text and val.startswith("Paragraph ") and 0.1 <= len(val) / len(text) < 0.15
    assert (made.val.ends.tolist(), made.val.text_bytes.tolist()) == ([len(made.val.ids)], [len(val.encode())])
    assert made.val_bytes(1) == len(made.tokenizer.decode(made.val.ids[:1]).encode())
    assert made.val_bytes(len(made.val.ids)) == len(val.encode())


def test_other_val_fraction_of_a_single_text_file_is_tokenized_into_another_cache_folder(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"line {i} of text\n" for i in range(100)))
    sizes = [
        len(
            token_store.tokenize(
                text_files.text(str(tmp_path / "one.txt"), "*", share), tmp_path / "cache", 300
            ).val.ids
        )
        for share in (0.1, 0.5, 0.1)
    ]
    assert sizes[0] == sizes[2] < sizes[1] and len(list((tmp_path / "cache").iterdir())) == 2


def test_text_file_of_one_character_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(Refused, match="contain no text"):
        token_store.tokenize(text_files.text(str(tmp_path / "one.txt"), "*", 0.1), tmp_path / "cache", 300)
    assert not list((tmp_path / "cache").iterdir())


# --- overlong words, and a full disk ---------------------------------------------------------------------------------


def test_overlong_word_is_split_only_for_tokenizer_training(tmp_path, monkeypatch):
    """LONGEST_WORD exceeds the length of every word in ordinary text, so splitting does not change the tokenizer of
    such a text."""
    word = "ab" * 3 * token_store.LONGEST_WORD
    for name, text in (("0", f"a word {word}"), ("1", word)):
        (tmp_path / f"{name}.txt").write_text(text)
    read = text_files.text(str(tmp_path / "0.txt"), "*", 0.5, str(tmp_path / "1.txt"))

    def longest(folder):
        made = token_store.tokenize(read, tmp_path / folder, 400)
        assert made.tokenizer.decode(made.val.ids) == word + token_store.END_OF_TEXT
        return max(map(len, made.tokenizer.get_vocab()))

    assert longest("in pieces") == token_store.LONGEST_WORD
    monkeypatch.setattr(token_store, "LONGEST_WORD", 10**6)
    assert longest("whole") > 256


def test_splitting_overlong_words_does_not_change_a_tokenizer_of_ordinary_text(texts, tmp_path, monkeypatch):
    ours = token_store.tokenize(texts, tmp_path / "a", 300).tokenizer
    monkeypatch.setattr(token_store, "LONGEST_WORD", 10**6)
    assert token_store.tokenize(texts, tmp_path / "b", 300).tokenizer.backend_tokenizer.to_str() == (
        ours.backend_tokenizer.to_str()
    )


@pytest.fixture
def small_files():
    """Yields a function that limits every file that this process writes to the given number of bytes. It stands in for
    a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def at_most(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield at_most
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# file -> size limit (bytes) that this file is the first to exceed
WRITERS = {"tokenizer": 100, "train": 7_000, "val": 40_000, "val_ends": 600}


@pytest.mark.parametrize("writer", WRITERS)
def test_full_disk_during_tokenization_is_refused_and_leaves_no_draft(texts, tmp_path, small_files, writer):
    if writer == "val_ends":  # with one token per document, the ends take more bytes than the tokens
        tokenizer = token_store.tokenize(texts, tmp_path / "made before", 300).tokenizer
        _write_all(tmp_path / "train", ["some words"])
        _write_all(tmp_path / "val", ["x"] * 100)
    else:
        tokenizer = None
        _write_all(tmp_path / "train", ["a line of text " * 4000])
        _write_all(tmp_path / "val", ["x y z" * 9000])
    read = text_files.text(str(tmp_path / "train"), "*", 0.5, str(tmp_path / "val"))
    small_files(WRITERS[writer])
    with pytest.raises(
        Refused, match=r"cache_dir=.*/cache: cannot write or read the tokens there \(.*\). Free some space, or"
    ):
        token_store.tokenize(read, tmp_path / "cache", 300, tokenizer)
    small_files(10**9)
    assert not list((tmp_path / "cache").iterdir())
    made = token_store.tokenize(read, tmp_path / "cache", 300, tokenizer)  # succeeds once there is space
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "cache").glob("*/*")}
    assert next(name for name in WRITERS if sizes.get(name, 0) > WRITERS[writer]) == writer and len(made.val.ids)


def _write_all(folder, texts):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)


def test_empty_corpus_is_refused(tmp_path):
    empty = text_files.Corpus("text", [], [])
    with pytest.raises(Refused, match="contain no text"):
        token_store.tokenize(empty, tmp_path / "cache", 300)


# --- bits per byte ----------------------------------------------------------------------------------------------------

WORDS = b"return self " * 40  # frequent in the training text, so a token has several bytes
SIGNS = "éß".encode() * 100  # not in the training text, so every byte is a token


@pytest.fixture
def uneven(tmp_path):
    """Returns (tokens, number of tokens in the first validation document with its end token). Tokens of the first
    validation document have several bytes, and tokens of the second have one byte."""
    for name, content in (("train", WORDS * 9), ("val/0", WORDS), ("val/1", SIGNS)):
        (tmp_path / f"{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_bytes(content)
    read = text_files.text(str(tmp_path / "train.txt"), "*.txt", 0.2, str(tmp_path / "val"))
    made = token_store.tokenize(read, tmp_path / "cache", 300)
    first = int(np.flatnonzero(made.val.ids == made.tokenizer.eos_token_id)[0]) + 1
    assert first < len(WORDS) / 3 and len(made.val.ids) == first + len(SIGNS) + 1
    return made, first


def test_val_bytes_equal_the_decoded_bytes_of_any_number_of_tokens(uneven):
    made, first = uneven
    for count in range(first):
        assert made.val_bytes(count) == len(made.tokenizer.decode(made.val.ids[:count]))  # ASCII
    assert made.val_bytes(first - 1) == made.val_bytes(first) == len(WORDS)  # an end-of-text token has no bytes
    for count in range(len(SIGNS) + 1):  # some values of `count` end inside a character of two bytes
        assert made.val_bytes(first + count) == len(WORDS) + count
    assert made.val_bytes(len(made.val.ids)) == len(WORDS) + len(SIGNS)


def test_val_bytes_decode_only_the_tokens_of_a_document_that_is_cut(uneven, monkeypatch):
    made, first = uneven
    counted, looked_at = token_store.bytes_of, []
    monkeypatch.setattr(token_store, "bytes_of", lambda t, ids: looked_at.append(len(ids)) or counted(t, ids))
    assert made.val_bytes(len(made.val.ids)) == 880 and made.val_bytes(first) == len(WORDS) and not looked_at
    monkeypatch.setattr(token_store, "COUNTED_AT_ONCE", 3)
    assert made.val_bytes(first + 10) == len(WORDS) + 10 and looked_at == [3, 3, 3, 1]


def test_val_bytes_of_sentencepiece_tokens_equal_the_decoded_bytes(uneven, tmp_path):
    """The tokenizer is like SentencePiece's: it inserts a space before the first word, and a character outside the
    vocabulary has one token per byte."""
    words = ["wörd", "other", "läst"]
    ids = {token: i for i, token in enumerate(["<unk>", "<end>", *(f"▁{w}" for w in words), "<0xC3>", "<0x9F>"])}
    model = Tokenizer(models.Unigram([(token, -1.0) for token in ids], unk_id=0, byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    pieces = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    for i, content in enumerate(("wörd other läst wördß", "läst läst")):
        (tmp_path / "val" / f"{i}.txt").write_text(content)
    read = text_files.text(str(tmp_path / "train.txt"), "*.txt", 0.2, str(tmp_path / "val"))
    made = token_store.tokenize(read, tmp_path / "cache", 0, pieces)
    assert made.val.ids.tolist() == [
        ids[t] for t in ("▁wörd", "▁other", "▁läst", "▁wörd", "<0xC3>", "<0x9F>", "<end>")
    ] + [
        *(ids["▁läst"], ids["▁läst"], ids["<end>"]),
    ]
    text = [0, 5, 11, 17, 23, 23, 25, 25, 30, 36, 36]  # the first byte of ß is not a character
    assert [made.val_bytes(count) for count in range(11)] == text


def test_bits_per_byte_of_a_run_are_the_val_loss_over_the_bytes_of_its_first_validation_sequence(fit, uneven, tmp_path):
    made, _ = uneven
    files = (f"data.path={tmp_path}/train.txt", f"data.val_path={tmp_path}/val")
    summary, _ = fit("data=text", *files, "val_sequences=1", "max_steps=1")
    text = len(made.tokenizer.decode(made.val.ids[1:17]))  # of tokens 1 to 16
    assert summary["bits_per_byte"] == pytest.approx(summary["val_loss"] / np.log(2) * 16 / text, rel=1e-12)


def test_control_tokens_in_plain_text_are_counted_and_reported(tmp_path, caplog):
    text = f"one {token_store.END_OF_TEXT} two\n" * 2 + "and more words\n" * 40
    (tmp_path / "a.txt").write_text(text)
    source = text_files.text(str(tmp_path / "a.txt"), "*", 0.2)
    with caplog.at_level("INFO"):
        made = token_store.tokenize(source, tmp_path / "cache", 300)
    assert (made.train.ids == made.tokenizer.eos_token_id).sum() == 3  # encoded as in earlier versions
    assert (
        "the train text contains 2 control tokens of the tokenizer" in caplog.text and "the val text" not in caplog.text
    )
