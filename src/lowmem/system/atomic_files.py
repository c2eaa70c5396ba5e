"""Writes files and folders atomically: a draft is written next to the target, and then renamed to the target's name.

`atomic_write` is for files and folders that a single process replaces and that must survive a power failure: the draft
is written to the disk (fsync) before the rename. (Other ranks may write files into the draft of a folder, see
`checkpoint_folder.py`.) `atomic_cache_write` is for files and folders that several processes may write at the same
time, all with equal content.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from lowmem.system.errors import DENIED, FULL


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a draft path to write to. When the `with` ends, the draft is renamed to `path`.

    After an error before the rename, the draft is deleted (the disk may be full), and `path` is unchanged. If the
    process is killed while it replaces a folder, or replaces a file by a folder, the old content may remain at
    `old_of(path)`. `put_back` restores it; the next `atomic_write` to `path` calls `put_back`, too.

    Raises:
        OSError: the file could not be written. If the disk is full, broken or read-only, or access is denied, the error
            names `path`, or the parent folder that could not be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    put_back(path)  # a killed process may have left the old content
    delete(draft)
    try:
        with naming_file(path):
            yield draft
            for file in draft.rglob("*") if draft.is_dir() else [draft]:
                _sync(file)
            if path.is_dir() or (path.exists() and draft.is_dir()):
                os.replace(path, old_of(path))  # a rename cannot replace a folder, or a file by a folder
            os.replace(draft, path)
    except BaseException:
        delete(draft)
        put_back(path)
        raise
    _sync(path.parent)  # makes the rename itself durable (POSIX)
    delete(old_of(path))


@contextmanager
def atomic_cache_write(path: Path) -> Iterator[Path]:
    """Yields a draft path of this process, for a file or a folder of a cache. When the `with` ends, the draft is
    renamed to `path`. If `path` is an existing file, it is replaced. If `path` is an existing folder, for example
    because another process has created it meanwhile, the folder is kept and the draft is deleted.

    Nothing is synced to the disk, so code that reads the cache must verify the content. After an error the draft is
    deleted.
    """
    with TemporaryDirectory(prefix=".writing-", dir=path.parent, ignore_cleanup_errors=True) as folder:
        draft = Path(folder) / path.name
        yield draft
        try:
            os.replace(draft, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def put_back(path: Path) -> None:
    """Renames the old folder or file at `old_of(path)` back to `path`. If `path` exists, deletes the old folder or file
    instead. A no-op if nothing is at `old_of(path)`."""
    if path.exists():
        delete(old_of(path))
    else:
        with suppress(FileNotFoundError):  # usually nothing is there
            os.replace(old_of(path), path)


def draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def old_of(path: Path) -> Path:
    """Returns the path to which an old folder or file is renamed while `path` is being replaced."""
    return path.with_name(f".{path.name}.old")


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Converts errors that were caused by a full, broken or read-only disk, or by denied access, to an OSError that
    names the file. Passes on other errors."""
    try:
        yield
    except Exception as error:
        number = _why(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _why(error: BaseException) -> int | None:
    """Returns the errno of an error if it is in FULL or DENIED, or else the first such errno in the chain of its
    contexts; None if the chain has no such errno. torch's writer raises an error whose `__context__` has the errno;
    safetensors raises an error whose message has the errno."""
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
    """Deletes a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
