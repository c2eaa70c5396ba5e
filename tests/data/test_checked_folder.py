"""Token caches that were truncated, modified or shared: a run gets the correct tokens or an error message."""

import json
import shutil
import threading
from hashlib import sha256
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lowmem.data import checked_folder, token_store
from lowmem.data.sources import text_files
from lowmem.system.errors import Refused

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "it"]


@pytest.fixture
def source(tmp_path):
    """Returns a function that returns a text source of the files as they are at the time of the call."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        draw = np.random.default_rng(number)
        (folder / f"{number}.txt").write_text(" ".join(draw.choice(WORDS, 300)))
    return lambda: text_files.text(str(folder), "*.txt", 0.2)


@pytest.fixture
def tokens(source, tmp_path):
    """Returns a function that reads the arrays and the tokenizer through the cache, and returns a digest of the arrays
    of both splits and the tokenizer as JSON."""

    def read():
        made = token_store.tokenize(source(), tmp_path / "cache", 300)
        arrays = [getattr(split, of) for split in (made.train, made.val) for of in ("ids", "ends", "text_bytes")]
        return sha256(b"".join(map(np.ndarray.tobytes, arrays))).hexdigest(), made.tokenizer.backend_tokenizer.to_str()

    return read


def folder_of(tmp_path):
    (folder,) = (tmp_path / "cache").iterdir()
    return folder


def cut(file):
    file.write_bytes(file.read_bytes()[:-8])


def emptied(file):
    file.write_bytes(b"")


def flipped(file):
    """Inverts one bit in the middle of the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def of_another_type(file):
    """Replaces the dtype of the token ids in a valid JSON file."""
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"meta": said["meta"] | {"dtype": "uint8"}}))


FILES = ("train.bin", "train_ends.bin", "train_text_bytes.bin", "val.bin", "tokenizer.json", "meta.json")


@pytest.mark.parametrize(
    ("file", "damaged"),
    [*product(FILES, (cut, emptied, flipped, Path.unlink)), ("meta.json", of_another_type)],
)
def test_damaged_cache_file_is_rebuilt_and_reported_in_one_line(tokens, tmp_path, caplog, file, damaged):
    right = tokens()
    damaged(folder_of(tmp_path) / file)
    with caplog.at_level("INFO", "lowmem"):
        assert tokens() == right
    (told,) = [message for message in caplog.messages if "cache_dir" in message]
    assert f"{file} is missing or corrupted; rebuilding {folder_of(tmp_path).name}." in told
    caplog.clear()
    assert tokens() == right and not [message for message in caplog.messages if "rebuilding" in message]


@pytest.mark.wrong
@pytest.mark.parametrize("damaged", [cut, flipped])
def test_damaged_cache_file_gives_wrong_tokens_without_checksums(tokens, tmp_path, monkeypatch, damaged):
    """The deliberately wrong variant maps the cached files without comparing their checksums."""
    right = tokens()
    damaged(folder_of(tmp_path) / "train.bin")
    monkeypatch.setattr(checked_folder, "_mapped", lambda file, *_: np.memmap(file, np.uint8, "r"))
    assert tokens() != right


def test_cache_folder_of_an_earlier_version_without_checksums_is_rebuilt(tokens, tmp_path):
    right = tokens()
    (folder_of(tmp_path) / "meta.json").write_text(json.dumps({"dtype": "uint16", "notes": []}))
    flipped(folder_of(tmp_path) / "train.bin")
    assert tokens() == right


def test_cached_tokenizer_is_trained_again_if_its_file_was_modified(source, tmp_path):
    def trained():
        return token_store.train_tokenizer(source(), tmp_path / "cache", 300, []).backend_tokenizer.to_str()

    right = trained()
    file = folder_of(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"ä"'))
    assert trained() == right


def test_open_token_arrays_stay_unchanged_while_another_run_rebuilds_the_cache_folder(source, tmp_path):
    made = token_store.tokenize(source(), tmp_path / "cache", 300)
    right = made.train.ids.tobytes()
    flipped(folder_of(tmp_path) / "val.bin")
    again = token_store.tokenize(source(), tmp_path / "cache", 300)
    assert made.train.ids.tobytes() == right == again.train.ids.tobytes()


def test_cache_folder_removed_by_another_process_while_opening_is_rebuilt(tokens, tmp_path, monkeypatch):
    right, mapped, once = tokens(), checked_folder._mapped, iter([True])

    def removed(file, *expected):
        if file.name == "val.bin" and next(once, False):
            shutil.rmtree(file.parent)
        return mapped(file, *expected)

    monkeypatch.setattr(checked_folder, "_mapped", removed)
    assert tokens() == right


def test_concurrent_runs_with_a_damaged_cache_get_the_tokens_of_the_undamaged_cache(tokens, tmp_path):
    """Threads stand in for the processes of the runs."""
    right, found = tokens(), []
    for _ in range(3):
        flipped(folder_of(tmp_path) / "train.bin")
        runs = [threading.Thread(target=lambda: found.append(tokens())) for _ in range(4)]
        [run.start() for run in runs]
        [run.join() for run in runs]
    assert found == [right] * 12
    assert folder_of(tmp_path).is_dir()  # `folder_of` would fail if a draft were left


def test_damaged_cache_folder_removed_by_another_process_is_rebuilt(tokens, tmp_path, monkeypatch):
    """The folder is removed after its damage was detected, and before it is rebuilt."""
    right = tokens()
    flipped(folder_of(tmp_path) / "train.bin")
    opened = checked_folder._opened

    def removed_meanwhile(folder):
        try:
            return opened(folder)
        except checked_folder._Damaged:
            shutil.rmtree(folder)
            raise

    monkeypatch.setattr(checked_folder, "_opened", removed_meanwhile)
    monkeypatch.setattr(Path, "exists", lambda *_, **__: True)  # the answer from before the removal
    assert tokens() == right


def test_concurrent_runs_that_fill_a_cache_get_the_tokens_that_a_later_run_reads_from_it(tokens, tmp_path):
    found = []
    runs = [threading.Thread(target=lambda: found.append(tokens())) for _ in range(4)]
    [run.start() for run in runs]
    [run.join() for run in runs]
    assert found == [tokens()] * 4 and folder_of(tmp_path).is_dir()


def test_text_changed_during_tokenization_is_refused_and_not_cached(source, tokens, tmp_path, monkeypatch):
    write, file = token_store._write, tmp_path / "text" / "0.txt"

    def changing(*arguments):
        file.write_text(file.read_text().replace("fox", "cat"))
        return write(*arguments)

    monkeypatch.setattr(token_store, "_write", changing)
    with pytest.raises(Refused, match=r"a file changed while it was being read\. Run the command again"):
        tokens()
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setattr(token_store, "_write", write)
    made = token_store.tokenize(source(), tmp_path / "cache", 300)
    assert "cat" in made.tokenizer.decode(made.train.ids)  # tokens of the changed text


def test_cache_on_a_drive_that_alters_written_files_is_refused(tokens, tmp_path, monkeypatch):
    replace = checked_folder.os.replace

    def damaging(draft, place):
        if (Path(draft) / "train.bin").exists() and ".damaged" not in str(place):
            flipped(Path(draft) / "train.bin")
        replace(draft, place)

    monkeypatch.setattr(checked_folder.os, "replace", damaging)
    with pytest.raises(Refused, match=r"differ from what was written\. Type cache_dir="):
        tokens()
