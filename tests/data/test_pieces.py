"""Tests that the pieces of a long text have the tokens of the whole text, that a text is not cut if the tokenizer
allows no cut, and that memory does not grow with the length of a text that is cut."""

import json
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lowmem.data import token_store
from lowmem.data.sources import jsonl, pieces, reading, text_files
from lowmem.system.errors import Refused

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
KINDS = {  # name -> (pre-tokenizer, normalizer, whether a text may be cut into pieces)
    "gpt2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, True),
    "llama3": (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]), None, True),
    "no words": (BYTES, None, True),  # merges may cross line ends
    "sentencepiece": (pre_tokenizers.Metaspace(), None, False),
    "prefix space": (pre_tokenizers.ByteLevel(add_prefix_space=True), None, False),
    "llama2": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), False),
}
LINES = ["def f(x):\n    return x\n", "\n\n", "hello world.\n", "  a = 1\n", "\tb\n", "x\ny", "don't\n", "!!!\n\n"]
LINES += ["123 456\n", "é\n", " \n \n", "\r\n", "x\r\nand ", "数据\nand", "#\n#", "it's\n's", "🙂\na"]


def text(lines, seed=0):
    return "".join(random.Random(seed).choices(LINES, k=lines))


@pytest.fixture(scope="module")
def tokenizer():
    made = {}

    def make(kind):
        if kind not in made:
            words, normalizer, _ = KINDS[kind]
            of = Tokenizer(models.BPE())
            of.normalizer = normalizer or of.normalizer
            of.pre_tokenizer = words or of.pre_tokenizer
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
            lines = [text(4000)] if words else text(4000).splitlines(keepends=True)
            of.train_from_iterator(lines, trainer)
            made[kind] = PreTrainedTokenizerFast(tokenizer_object=of)
        return made[kind]

    return make


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 500)
    monkeypatch.setattr(pieces, "BATCH", 4000)


def whole(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.rows("llama3", "no words", "sentencepiece")
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_a_text_in_pieces_equal_ids_of_the_whole_text(tokenizer, small_pieces, kind):
    cuts, long = pieces.Cuts(tokenizer(kind)), text(20_000, seed=1)
    count = len(list(pieces.pieces([long], cuts)))
    assert count > 100 if KINDS[kind][2] else count == 1
    short = ["", "a", text(3), text(200)]
    for one, ids in zip([*short, long], pieces.encode(tokenizer(kind), [*short, long]), strict=True):
        assert ids.tolist() == whole(tokenizer(kind), one)


@pytest.mark.parametrize("kind", ["gpt2", "sentencepiece"])
@pytest.mark.parametrize("wrong", ["every newline", "without proof"])
def test_pieces_cut_without_a_proof_have_other_ids_than_the_whole_text_except_regular_cuts_with_gpt2(
    tokenizer, small_pieces, monkeypatch, kind, wrong
):
    """Both deliberately wrong variants skip the proof that a cut changes no token, and "every newline" also cuts at
    every newline. For GPT-2 the regular cuts are correct without a proof; for SentencePiece they are not."""
    if wrong == "every newline":
        monkeypatch.setattr(pieces, "CUT", re.compile(r"\n"))
    monkeypatch.setattr(pieces.Cuts, "proved", lambda *_: True)
    long = text(20_000, seed=1)
    (ids,) = pieces.encode(tokenizer(kind), [long])
    same = ids.tolist() == whole(tokenizer(kind), long)
    assert same == (kind == "gpt2" and wrong == "without proof")


def test_proof_rejects_cuts_at_every_newline_so_the_ids_stay_those_of_the_whole_text(
    tokenizer, small_pieces, monkeypatch
):
    monkeypatch.setattr(pieces, "CUT", re.compile(r"\n"))
    long = text(20_000, seed=1)
    (ids,) = pieces.encode(tokenizer("gpt2"), [long])
    assert ids.tolist() == whole(tokenizer("gpt2"), long)


def test_tokenizer_that_allows_no_cut_encodes_texts_whole_and_is_reported_once(tokenizer, small_pieces, caplog):
    cuts = pieces.Cuts(tokenizer("sentencepiece"))
    with caplog.at_level("INFO"):
        for seed in range(3):
            assert [ends for _, ends in pieces.pieces([text(2000, seed)], cuts)] == [True]
    assert cuts.tried == pieces.PROOFS and caplog.text.count("encoded whole") == 1


def test_text_file_read_in_small_blocks_equals_the_whole_text(tmp_path, monkeypatch):
    """Some blocks end between the bytes of a character."""
    said = text(300)
    (tmp_path / "a").write_bytes(said.encode())
    for size in (2, 3, 7, 1000):
        monkeypatch.setattr(reading, "BLOCK", size)
        assert "".join(reading.blocks(tmp_path / "a")) == said


@pytest.mark.parametrize("raw", [b"word\n\xc3\xa4\n\xff\n", b"word\n\n\0", b"word\n\n\xc3"])
def test_error_for_invalid_utf_8_in_a_block_has_the_line_number_of_the_file(tmp_path, monkeypatch, raw):
    (tmp_path / "a").write_bytes(raw)
    for size in (2, 3, 5, 100):
        monkeypatch.setattr(reading, "BLOCK", size)
        replaced = "".join(reading.blocks(tmp_path / "a", "replace"))
        assert replaced == raw.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
        with pytest.raises(Refused, match=r"not UTF-8 text \(line 3\)"):
            list(reading.blocks(tmp_path / "a"))


def test_tokens_of_a_file_in_blocks_equal_tokens_of_the_whole_file(tmp_path, small_pieces, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 3000)
    said = text(9000)
    (tmp_path / "one.txt").write_bytes(said.encode())
    made = token_store.tokenize(text_files.text(str(tmp_path / "one.txt"), "*", 0.1), tmp_path / "cache", 400)
    at = reading.cut_at(lambda: [said], 0.1)
    for split, part in ((made.train, said[:at]), (made.val, said[at:])):
        assert split.ids.tolist() == [*whole(made.tokenizer, part), made.tokenizer.eos_token_id]
        assert split.ends.tolist() == [len(split.ids)] and split.text_bytes.tolist() == [len(part.encode())]


def test_read_ahead_thread_delivers_items_in_order_and_raises_the_error_of_the_source():
    made = []

    def items():
        for i in range(5):
            made.append(i)
            yield i
        raise Refused("no more")

    delivered = []
    with pytest.raises(Refused, match="no more"):
        delivered.extend(reading.ahead(items()))
    assert delivered == made == list(range(5))
    assert list(reading.ahead(iter(np.arange(9)))) == list(range(9))


# --- memory -----------------------------------------------------------------------------------------------------------

MB = 10**6


def grown(folder, kind, sizes, small, whole, pipe):
    """Tokenizes a file of each size (MB). Sends a list with one number for each file: the peak of resident memory up to
    the end of this file, minus the resident memory before the first file, in MB. Runs in a separate process.

    Args:
        kind: "text" or "jsonl".
        small: True reads small blocks and cuts small pieces.
        whole: True never cuts a text.
    """
    from lowmem.system.process import peak_rss_bytes, reset_peak_rss, rss_bytes

    if small:
        reading.BLOCK, pieces.BATCH, pieces.PIECE = 1 << 17, 1 << 18, 1 << 14
    if whole:  # the deliberately wrong variant
        pieces.CUT = re.compile(r"(?!)")
    paragraphs = [text(20, seed) for seed in range(200)]
    (folder / "small.txt").write_text("".join(paragraphs))
    token_store.train_bpe(paragraphs, 400, folder / "bpe.json")
    tokenizer = token_store.load_bpe(folder / "bpe.json")
    reset_peak_rss()
    before, peaks = rss_bytes(), []
    for size in sizes:
        draw, file, drawn = random.Random(size), folder / f"{size}.{kind}", 0
        with file.open("w") as out:
            while out.tell() < size * MB:
                said = "".join(draw.choices(paragraphs, k=5))
                drawn += len(said.encode())
                out.write(said if kind == "text" else json.dumps({"text": said}) + "\n")
        opened = text_files.text if kind == "text" else jsonl.jsonl
        source = opened(path=str(file), pattern="*", val_fraction=0.01)
        made = token_store.tokenize(source, folder / "cache", 400, tokenizer)
        assert made.train.text_bytes[-1] > 0.9 * drawn > 0.6 * size * MB
        file.unlink()
        peaks.append((peak_rss_bytes() - before) / MB)
    pipe.send(peaks)


@pytest.fixture
def peaks(processes, tmp_path):
    def of(*how):
        ours, theirs = processes.Pipe()
        child = processes.Process(target=grown, args=(Path(tempfile.mkdtemp(dir=tmp_path)), *how, theirs))
        child.start()
        theirs.close()
        found = ours.recv()
        child.join()
        return found

    return of


@pytest.mark.process
def test_memory_for_tokenizing_a_text_file_in_small_blocks_does_not_grow_with_the_file(peaks):
    first, second = peaks("text", (1, 3), True, False)
    assert second < 60 and second - first < 15
    first, second = peaks("text", (1, 3), True, True)  # the wrong variant tokenizes whole files
    assert second - first > 50


@pytest.mark.process
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_tokenizing_96_mb_needs_no_more_memory_than_32_mb(peaks, kind):
    first, second = peaks(kind, (32, 96), False, False)
    print(f"\n{first:.0f} MB, {second:.0f} MB")
    assert second < 200 and second - first < 20
