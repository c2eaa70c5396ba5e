"""Text files with arbitrary bytes and names are tokenized or refused, and a refusal leaves nothing in the cache.

The decoded tokens are compared with the text that `read_again` decodes from the same bytes. `read_again` uses code of
lowmem only for the position at which a single file is split.
"""

import os
from functools import partial

import pytest
from hypothesis import strategies as st

from arbitrary import one_of, outcomes
from lowmem.config import values
from lowmem.data import checked_folder, token_store
from lowmem.data.sources import reading, text_files
from lowmem.system.errors import Refused

SENTENCES = (
    "not UTF-8 text",
    "contain no text",
    "there is no text in it",
    "no file there matches",
    "contains records",
    "nothing is left to train on",
    "would leak training data",
)


words = st.text(max_size=300)
contents = one_of(
    st.just(b""),
    words.map(lambda text: text.encode()),
    st.text("abc \n", min_size=20, max_size=400).map(lambda text: text.encode()),
    words.map(lambda text: text.encode("utf-16")),
    st.text(st.characters(max_codepoint=255), max_size=300).map(lambda text: text.encode("latin-1")),
    st.binary(max_size=300),
    st.integers(1, 3000).map(lambda lines: b"\n" * lines),
    st.integers(1, 3000).map(lambda zeros: b"\0" * zeros),
    st.integers(1000, 30_000).map(lambda letters: b"abcdefg" * (letters // 7)),
    st.integers(1, 300).map(lambda times: "ein Wort, 数据 und 🙂\r\n\r\n".encode() * times),
)
# Any bytes except / and NUL, which no file name may contain; a name need not be valid UTF-8.
stems = st.binary(min_size=1, max_size=40).map(lambda raw: raw.translate(None, b"/\0") or b"x").map(os.fsdecode)
stems |= st.sampled_from(["a", "Müller's (old) notes, 2026", "a=b", "#h", "数据", "~", "$x", "-rf", "*", "[ab]"])
suffixes = st.sampled_from([".txt"] * 8 + [".md", ".jsonl", "", ".TXT"])
names = st.tuples(st.sampled_from(["", "", "below", "val"]), stems, suffixes)
files = st.dictionaries(names, contents, max_size=6) | st.dictionaries(names, contents, min_size=30, max_size=60)
typed = st.fixed_dictionaries(
    {
        "alone": st.booleans(),  # data.path is one file instead of the folder
        "pattern": st.sampled_from(["**/*.txt", "**/*.txt", "**/*", "*"]),
        "val_fraction": st.floats(0.001, 0.999),
        "val": st.booleans(),  # data.val_path is the folder val, if there is one
        "on_error": st.sampled_from(values.ON_ERROR),
    }
)


def write(folder, files):
    paths = []
    for (below, stem, suffix), content in files.items():
        name = stem + suffix
        path = folder / below / ("x" if name in (".", "..") else name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        paths.append(path)
    return paths


def outcome(folder, files, typed):
    """Returns "tokens" if the files are tokenized, or the phrase of SENTENCES in the message if the files are refused.
    Errors other than `Refused` are raised."""
    typed, text, cache = dict(typed), folder / "text", folder / "cache"
    text.mkdir()
    paths = write(text, files)
    alone, val = typed.pop("alone"), typed.pop("val")
    path = paths[0] if alone and paths else text
    val_path = str(text / "val") if val and (text / "val").is_dir() else None
    try:
        read = text_files.text(str(path), val_path=val_path, **typed)
        made = token_store.tokenize(read, cache, 300)
    except Refused as error:
        assert str(error).isprintable() and str(error).endswith(".")
        assert not cache.exists() or not list(cache.iterdir())
        (known,) = [words for words in SENTENCES if words in str(error)][:1]
        return known
    assert {path.name for path in cache.glob("*/*")} == set(KEPT) and len(list(cache.iterdir())) == 1
    for split in ("train", "val"):
        said = made.tokenizer.decode(getattr(made, split).ids)
        assert said == "".join(f"{text}{token_store.END_OF_TEXT}" for text in read_again(read, split))
    return "tokens"


KEPT = (
    "meta.json",
    "tokenizer.json",
    *(f"{s}{of}.bin" for s in ("train", "val") for of in ("", "_ends", "_text_bytes")),
)


def read_again(of, split):
    for path in getattr(of, split):
        text = path.read_bytes().decode("utf-8", "replace")
        plain = text.replace("\0", "\ufffd")
        if plain != text or "\ufffd" in text:
            assert of.on_error != "refuse" or "\ufffd".encode() in path.read_bytes()
            if of.on_error == "skip":
                continue
        if of.tail is not None:
            at = reading.cut_at(partial(list, [plain]), of.tail)
            plain = plain[:at] if split == "train" else plain[at:]
        if plain:
            yield plain


DRAWN = (files, typed)


@pytest.mark.parametrize("cases", [50, pytest.param(500, marks=pytest.mark.matrix)])
def test_tokens_of_text_files_with_arbitrary_bytes_and_names_decode_to_the_text_or_files_are_refused(cases, tmp_path):
    counted = outcomes(outcome, DRAWN, tmp_path / "case", cases, again=cases > 50)
    empty = counted["contain no text"] + counted["there is no text in it"]
    assert counted["tokens"] > cases / 10 and empty > cases / 25 and len(counted) >= 5


@pytest.mark.wrong
@pytest.mark.filterwarnings("ignore:Generating overly large repr")  # the repr of the failing example's files
def test_planted_text_reader_faults_fail_the_arbitrary_files_test(tmp_path, monkeypatch):
    """With each planted fault, the test of arbitrary files must raise an error other than `Refused`."""
    for of, name, fault in (
        (reading, "shown", lambda file: str(file)[10**9]),  # an IndexError while an error message is built
        (
            checked_folder,
            "shutil",
            type("shutil", (), {"rmtree": staticmethod(lambda *_, **__: None)}),
        ),  # drafts are not removed
        (
            text_files,
            "pieces",
            lambda blocks, _=None: ((block[1:], True) for block in blocks),
        ),  # a block loses a character
    ):
        with monkeypatch.context() as planted, pytest.raises((AssertionError, IndexError)):
            planted.setattr(of, name, fault)
            outcomes(outcome, DRAWN, tmp_path / name, 100)
