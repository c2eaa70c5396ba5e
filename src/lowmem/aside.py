"""Files and folders that are there whole or not at all: written beside their place, synced, then renamed into it."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yields: where to write the file or folder; in the end it takes the place of `path`. After an error nothing of it
    is left, for it may hold all the room that there was, and what stood at `path` stands there still.

    Raises:
        OSError: with the name of `path`, where that is why a library could not write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.writing")
    _delete(draft)  # of one who was killed
    try:
        yield draft
        for file in draft.rglob("*") if draft.is_dir() else [draft]:
            _sync(file)
        if path.is_dir():
            shutil.rmtree(path)  # a rename cannot replace a folder
        os.replace(draft, path)
    except Exception as error:
        _delete(draft)
        number = _why(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error
    except BaseException:
        _delete(draft)
        raise
    _sync(path.parent)  # makes the rename itself durable (POSIX)


def _why(error: BaseException) -> int | None:
    """The system's number of the error behind one: torch's writer hides it in its context, safetensors in its text."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if said := re.search(r"\(os error (\d+)\)", str(error)):
        return int(said[1])
    return _why(error.__context__) if error.__context__ else None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)
