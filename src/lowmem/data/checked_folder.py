"""Stores files in a cache folder with their checksums, and rebuilds a folder if a file does not match its checksum. The
token store keeps its files in such folders.

`meta.json` contains the metadata that `fill` returned, the size and the CRC-32 of each file that it wrote, and a CRC-32
of all these values. Opening a folder reads and checks these files, at about 1 GB/s. Files that are added to the folder
later are not checked. The arrays that `open_or_fill` returns are memory-mapped from the files that were checked, so
another process may replace the folder while the arrays are in use.
"""

import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from lowmem.system.atomic_files import atomic_cache_write
from lowmem.system.errors import Refused

log = logging.getLogger(__name__)

META = "meta.json"
BLOCK = 1 << 20  # bytes
ATTEMPTS = 4  # maximum number of attempts to open or fill a folder, which another process may replace in between


class FolderContents(NamedTuple):
    """The contents of a folder. Args: meta: the values that `fill` returned; files: file name -> content, (bytes,)
    uint8."""

    meta: dict
    files: Mapping[str, np.ndarray]


class _Damaged(Exception):
    """Raised, with the name of the file, if a file is missing or its size or checksum differs from `meta.json`."""


def open_or_fill(folder: Path, fill: Callable[[Path], dict]) -> FolderContents:
    """Returns the contents of a folder. A folder that does not exist is filled first. A damaged folder is deleted and
    filled again, and the damage is logged.

    Args:
        fill: writes the files into an empty folder and returns the metadata, which JSON must be able to represent.

    Raises:
        OSError: a file cannot be read, or the folder cannot be written.
        Refused: after ATTEMPTS attempts there is still no folder whose files match their checksums, or `fill` raises
            Refused.
    """
    for _ in range(ATTEMPTS):
        found = _inode(folder)
        try:
            if found:
                return _opened(folder)
        except _Damaged as error:
            if _inode(folder) != found:  # another process has replaced the folder
                continue
            log.info(f"cache_dir={folder.parent}: {error} is missing or corrupted; rebuilding {folder.name}.")
            _remove(folder)
        _write(folder, fill)
    raise Refused(
        f"cache_dir={folder.parent}: files read back differ from what was written. Type cache_dir=<a folder on another "
        "drive>."
    )


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except FileNotFoundError:  # checking first would not help: another process may remove the folder at any time
        return None


def _opened(folder: Path) -> FolderContents:
    try:
        written = json.loads((folder / META).read_text(encoding="utf-8"))
        meta, sums = written["meta"], written["files"]
        if written["sum"] != _sum_of(meta, sums):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(META) from error
    return FolderContents(meta, {name: _mapped(folder / name, *sums[name]) for name in sums})


def _mapped(file: Path, size: int, checksum: int) -> np.ndarray:
    try:
        with file.open("rb") as stream:
            if [size, checksum] != _checksum(stream):
                raise _Damaged(file.name)
            return np.memmap(stream, np.uint8, "r") if size else np.empty(0, np.uint8)
    except FileNotFoundError:
        raise _Damaged(file.name) from None


def _write(folder: Path, fill: Callable[[Path], dict]) -> None:
    """Fills a draft folder and renames it to `folder` when it is complete, so that no other process reads a partial
    folder, and Ctrl-C does not leave one. If another process has created `folder` in the meantime, its folder is
    kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_cache_write(folder) as draft:
        draft.mkdir(mode=0o700)  # texts may be private
        meta, sums = fill(draft), {}
        for file in sorted(draft.iterdir()):
            with file.open("rb") as stream:
                sums[file.name] = _checksum(stream)
        written = {"meta": meta, "files": sums, "sum": _sum_of(meta, sums)}
        (draft / META).write_text(json.dumps(written), encoding="utf-8")


def _remove(folder: Path) -> None:
    """Deletes a folder. The folder is renamed first, so that no process opens a partially deleted folder."""
    aside = tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent)
    with suppress(FileNotFoundError):  # another process has removed the folder
        os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _checksum(stream: BinaryIO) -> list[int]:
    """Returns the size and the CRC-32 of a file."""
    size, value = 0, 0
    while block := stream.read(BLOCK):
        size, value = size + len(block), zlib.crc32(block, value)
    return [size, value]


def _sum_of(meta: dict, sums: dict) -> int:
    return zlib.crc32(json.dumps([meta, sums]).encode())
