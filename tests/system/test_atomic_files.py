"""Tests that several processes can write the same cache entry at the same time, and that a failed write leaves no
temporary file."""

import pytest

from lowmem.system.atomic_files import atomic_cache_write


@pytest.mark.parametrize("folder", [False, True])
def test_cache_entry_of_two_writers_is_complete_and_no_temporary_file_is_left(tmp_path, folder):
    place = tmp_path / "entry"

    def fill(draft, text):
        if folder:
            draft.mkdir()
        (draft / "file" if folder else draft).write_text(text)

    with atomic_cache_write(place) as first, atomic_cache_write(place) as second:
        assert first != second
        fill(first, "first")
        fill(second, "second")
        assert not place.exists()
    file = place / "file" if folder else place
    assert file.read_text() == (
        "second" if folder else "first"
    )  # `second` ends first. Then `first` replaces a file; but if the entry is a folder, the existing one is kept.
    assert [*tmp_path.iterdir()] == [place]


def test_failed_write_of_a_cache_entry_keeps_the_old_entry_and_no_temporary_file(tmp_path):
    place = tmp_path / "entry"
    place.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_cache_write(place) as draft:
        draft.write_text("partial")
        raise KeyboardInterrupt
    assert place.read_text() == "old" and [*tmp_path.iterdir()] == [place]
