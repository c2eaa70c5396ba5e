"""Tests which files a text source reads, and which of them are held out for validation."""

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest

from lowmem.data import token_store
from lowmem.data.sources import reading, text_files
from lowmem.system.errors import Refused


def test_stdlib_source_excludes_tests_encodings_and_site_packages_and_is_split_by_file():
    lib = text_files.stdlib(val_fraction=0.05)
    size = {split: sum(f.stat().st_size for f in files) for split, files in (("train", lib.train), ("val", lib.val))}
    assert size["train"] > 3e6 and size["val"] >= 0.05 * (size["train"] + size["val"])
    assert not set(lib.train) & set(lib.val)
    unwanted = {"site-packages", "test", "encodings", "pydoc_data"}
    assert not any(unwanted & {*f.parts} for f in lib.train + lib.val)


def test_added_text_file_moves_no_training_file_to_validation(text_folder, tmp_path):
    for f in text_folder.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    before = text_files.text(str(tmp_path), "**/*.txt", 0.2)
    (tmp_path / "more.txt").write_text("x" * 10)
    after = text_files.text(str(tmp_path), "**/*.txt", 0.2)
    assert {f.name for f in before.train} - {f.name for f in after.train} == set()


def test_files_of_val_path_are_excluded_from_training(text_folder, caplog):
    every = sorted(text_folder.iterdir())
    with caplog.at_level("INFO"):
        given = text_files.text(str(text_folder), "**/*.txt", 0.2, str(every[0]))
    assert given.val == [every[0]] and given.train == every[1:]  # the same order on every file system
    assert "excluded 1 of 12 files of data.path from training (validation only)" in caplog.text


@pytest.mark.parametrize("alone", [True, False], ids=["file", "folder"])
def test_val_path_that_equals_the_training_text_is_refused(text_folder, tmp_path, alone):
    path = next(text_folder.iterdir()) if alone else text_folder
    (tmp_path / "link").symlink_to(path)
    for same in (path, tmp_path / "link"):
        with pytest.raises(Refused, match="nothing is left to train on"):
            text_files.text(str(path), "**/*.txt", 0.2, str(same))


# --- a single file ----------------------------------------------------------------------------------------------------


def test_single_text_file_with_val_fraction_0_2_is_validated_on_its_last_fifth(text_folder):
    one = next(text_folder.iterdir())
    given = text_files.text(str(one), "*", 0.2)
    assert given.train == given.val == [one] and given.tail == 0.2


@pytest.mark.parametrize(
    ("text", "val"),
    [
        ("first line\nof it\n\n" * 10, "first line\nof it\n\n" * 2),  # between paragraphs
        ("a line of text\n" * 10, "a line of text\n" * 2),
        ("word " * 20, "word " * 4),
        ("x" * 100, "x" * 20),  # without a boundary the cut is at the exact fraction
        ("a\n" + "x" * 98, "x" * 20),  # a boundary that is too far away is ignored
        ("ab", "b"),
    ],
    ids=["paragraph", "line", "word", "no boundary", "distant boundary", "two characters"],
)
def test_single_text_file_is_split_at_a_paragraph_line_or_word_boundary(text, val):
    assert text[reading.cut_at(lambda: [text], 0.2) :] == val


def test_split_of_a_single_text_keeps_every_character_and_leaves_neither_side_empty():
    for length in range(2, 60):
        text = "".join("ab \n"[i * i % 4] for i in range(length))
        for tail in (0.001, 0.05, 0.5, 0.95, 0.999):
            at = reading.cut_at(partial(list, [text]), tail)
            train, val = text[:at], text[at:]
            assert train and val
            assert len(val) <= 2 * max(1, round(length * tail)) + 1
            for size in (1, 2, 7):  # the cut does not depend on the block size
                blocks = [text[i : i + size] for i in range(0, length, size)]
                assert reading.cut_at(partial(list, blocks), tail) == at
                assert "".join(reading.between(blocks, 0, at)) == train
                assert "".join(reading.between(blocks, at, None)) == val


# --- unreadable files, and files that are not read -------------------------------------------------------------------


def _files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return str(folder)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"path": "{}/none"}, "no such file or folder"),
        ({"path": ""}, "the path is empty"),
        ({"path": "~nobody-of-this-name/x"}, "no such file or folder"),
        ({"path": "{}/" + "x" * 300}, "file name too long"),
        ({"path": "{}/circle"}, "symlink loop|symbolic links"),
        ({"pattern": "/abs/*.txt"}, "Non-relative patterns are unsupported. Type"),
        ({"pattern": ""}, "Unacceptable pattern"),
        ({"val_path": "{}/none"}, "data.val_path=.*no such file"),
        ({"val_fraction": 0}, "between 0 and 1"),
        ({"encoding": "utf-16"}, "data.encoding=utf-16: only UTF-8 is supported. Type iconv -f utf-16 -t utf-8"),
        ({"on_error": "ignore"}, "type refuse, replace or skip"),
    ],
)
def test_text_source_with_an_invalid_path_pattern_fraction_encoding_or_on_error_is_refused(tmp_path, typed, said):
    _files(tmp_path, "a.txt", "b.txt")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    typed = {"path": "{}", "pattern": "**/*.txt", "val_fraction": 0.5} | typed
    typed = {
        key: value.replace("{}", str(tmp_path)) if isinstance(value, str) else value for key, value in typed.items()
    }
    with pytest.raises(Refused, match=said):
        text_files.text(**typed)


def test_files_that_do_not_match_the_pattern_are_counted_in_the_log(tmp_path, caplog):
    path = _files(tmp_path, "a.txt", "b.txt", "c.md", "below/d.md", "e.rst", "f", ".git/g.md", "h.TXT")
    with caplog.at_level("INFO"):
        text_files.text(path, "**/*.txt", 0.5)
    assert "skips 5 other files (2 .md, " in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        text_files.text(path, "**/*", 0.5)
    assert not caplog.text


def test_pattern_without_a_match_is_refused_with_the_files_found(tmp_path):
    with pytest.raises(
        Refused, match=r"no file there matches data.pattern=\*\*/\*.txt \(found: 2 .md, 1 .rst\). Type.*'\*\*/\*.md'"
    ):
        text_files.text(_files(tmp_path, "a.md", "b.md", "c.rst"), "**/*.txt", 0.5)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(Refused, match="there is no text in it"):
        text_files.text(str(tmp_path), "**/*.txt", 0.5)


def test_record_files_read_as_plain_text_are_refused_unless_on_error_is_set(tmp_path):
    path = _files(tmp_path, "a.jsonl", "b.txt", "c.txt")
    with pytest.raises(Refused, match=r"a.jsonl contains records.*data.on_error=replace"):
        text_files.text(f"{path}/a.jsonl", "*", 0.5)
    with pytest.raises(Refused, match=r"a.jsonl contains records"):
        text_files.text(path, "*", 0.5)
    taken, left = (text_files.text(path, "*", 0.5, on_error=how) for how in ("replace", "skip"))
    assert len(taken.train + taken.val) == 3 and len(left.train + left.val) == 2
    with pytest.raises(Refused, match="no text in it"):
        text_files.text(f"{path}/a.jsonl", "*", 0.5, on_error="skip")


@pytest.fixture
def locked():
    """Yields a folder of text files whose permissions a test can remove. Root may read every file, so if root runs the
    test, the effective user is `nobody` during the test."""
    folder = Path(tempfile.mkdtemp(prefix="lowmem-"))  # not tmp_path, which only its owner may enter
    _files(folder, "a.txt", "b.txt", "below/c.txt")
    folder.chmod(0o755)
    administrator = os.geteuid() == 0
    if administrator:
        os.seteuid(65534)
    yield folder
    if administrator:
        os.seteuid(0)
    folder.chmod(0o755)  # otherwise only root could list the folder
    for path in folder.iterdir():
        path.chmod(0o755)
    shutil.rmtree(folder)


def _lock(path, mode=0o000):
    user = os.geteuid()
    os.seteuid(os.getuid())
    path.chmod(mode)
    os.seteuid(user)


@pytest.mark.parametrize("which", [".", "below"], ids=["the folder", "a subfolder"])
def test_unreadable_folder_is_refused_with_permission_denied(locked, which):
    assert text_files.text(str(locked), "**/*.txt", 0.5).train
    _lock(locked / which)
    with pytest.raises(Refused, match=f"data.path={locked}: permission denied.*Give files"):
        text_files.text(str(locked), "**/*.txt", 0.5)


def test_unreadable_file_is_refused_with_permission_denied(locked):
    _lock(locked / "b.txt")
    with pytest.raises(Refused, match=r"b.txt cannot be read \(permission denied\)"):
        token_store.tokenize(text_files.text(str(locked), "**/*.txt", 0.5), locked / "cache", 300)
