"""Which files are text, and which are held out."""

import pytest

from lowmem.data import corpus
from lowmem.errors import Refused


def test_stdlib_is_several_megabytes_of_source_split_by_file():
    lib = corpus.stdlib(val_fraction=0.05)
    size = {split: sum(f.stat().st_size for f in files) for split, files in (("train", lib.train), ("val", lib.val))}
    assert size["train"] > 3e6 and size["val"] >= 0.05 * (size["train"] + size["val"])
    assert not set(lib.train) & set(lib.val)
    unwanted = {"site-packages", "test", "encodings", "pydoc_data"}
    assert not any(unwanted & {*f.parts} for f in lib.train + lib.val)


def test_the_split_does_not_move_when_a_file_is_added(text_folder, tmp_path):
    for f in text_folder.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    before = corpus.text(str(tmp_path), "**/*.txt", 0.2)
    (tmp_path / "more.txt").write_text("x" * 10)
    after = corpus.text(str(tmp_path), "**/*.txt", 0.2)
    assert {f.name for f in before.train} - {f.name for f in after.train} == set()


def test_a_validation_path_of_its_own(text_folder):
    one = sorted(text_folder.iterdir())[0]
    given = corpus.text(str(text_folder), "**/*.txt", 0.2, str(one))
    assert given.val == [one] and given.train == sorted(text_folder.iterdir())  # the same order on every file system


def test_one_file_cannot_be_split(text_folder):
    with pytest.raises(Refused, match="split by file"):
        corpus.text(str(next(text_folder.iterdir())), "*", 0.2)
