"""Writes files and folders atomically: beside their place first, then synced, then renamed into it."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lowmem.system.errors import DENIED, FULL


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a path to write to; the file or folder is renamed to `path` at the end.

    After an error the draft is deleted, since it may fill the disk, and `path` is unchanged. If the process was killed
    while a folder was replaced, `put_back` restores the old one.

    Raises:
        OSError: with the name of `path`, if a library could not write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    put_back(path)  # left by a process that was killed
    delete(draft)
    try:
        with naming_file(path):
            yield draft
            for file in draft.rglob("*") if draft.is_dir() else [draft]:
                _sync(file)
            if path.is_dir() or (path.exists() and draft.is_dir()):
                os.replace(path, old_of(path))  # a rename cannot replace a folder, nor a file by one
            os.replace(draft, path)
    except BaseException:
        delete(draft)
        put_back(path)
        raise
    _sync(path.parent)  # makes the rename itself durable (POSIX)
    delete(old_of(path))


def put_back(path: Path) -> None:
    """Restores the old folder of `path` if nothing has replaced it, and deletes the old folder otherwise."""
    if path.exists():
        delete(old_of(path))
    else:
        with suppress(FileNotFoundError):  # most often there is none
            os.replace(old_of(path), path)


def draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def old_of(path: Path) -> Path:
    """Returns the place of a folder while another one replaces it."""
    return path.with_name(f".{path.name}.old")


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Raises an OSError with the name of `path` for an error that a failed write has caused."""
    try:
        yield
    except Exception as error:
        number = _why(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _why(error: BaseException) -> int | None:
    """Returns the system's error number if the place cannot be written to: torch's writer hides it in the error's
    context, safetensors in its text. None: the error has another cause."""
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else in_text and int(in_text[1])
    if number in FULL | DENIED:
        return number
    return _why(error.__context__) if error.__context__ else None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Deletes a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
