"""Helpers for reading files. Text files are read in blocks of characters, and never into memory in full. Other helpers
divide a text in two, compute the digests of files, and run an iterator in a second thread (`ahead`)."""

import codecs
import hashlib
import shlex
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lowmem.config.values import shown
from lowmem.system.errors import Refused

BLOCK = 1 << 20  # bytes
UTF_8 = "utf-8"  # part of cache keys, because earlier versions allowed other encodings
BOUNDARIES = ("\n\n", "\n", " ")  # ends of paragraphs, lines and words
OVER = object()
INSTEAD = (
    " Or type data.on_error=skip to leave out such files, or data.on_error=replace for U+FFFD in place of bad bytes."
)
T = TypeVar("T")


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Context manager that raises Refused, with the name of the file, in place of an OSError. The token store would
    report an OSError as an error in the cache folder."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"data: {shown(file)} cannot be read ({(error.strerror or str(error)).lower()}). "
            "Make it readable, or type a data.pattern that excludes it."
        ) from None


def digests(files: Iterable[Path]) -> list[str]:
    """Returns the SHA-256 of each file, computed in several threads."""

    def digest(file: Path) -> str:
        with readable(file), file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(digest, files))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields the items of an iterator. While the caller uses an item, a second thread computes the next item, so
    `items` runs entirely in that thread."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, OVER)
        while (item := coming.result()) is not OVER:
            coming = pool.submit(next, items, OVER)
            yield item


class NotText(Refused):
    """Raised if a file is not valid UTF-8 or, for `blocks` without on_error=replace, contains zero bytes. Args: line:
    the first invalid line; instead: further advice at the end of the message."""

    def __init__(self, file: Path, line: int, instead: str = "") -> None:
        super().__init__(
            f"data: {shown(file)} is not UTF-8 text (line {line:,}). If it is text in another encoding (`file` guesses "
            f"which), type iconv -f latin1 -t utf-8 {shlex.quote(shown(file))} > NEW.{instead}"
        )


def blocks(file: Path, on_error: str = "refuse") -> Iterator[str]:
    """Yields the characters of a text file in blocks. With on_error=replace, invalid bytes and zero bytes become
    U+FFFD.

    Raises:
        NotText: without on_error=replace, the file is not valid UTF-8, or contains zero bytes, as binary files do.
        Refused: the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace" if on_error == "replace" else "strict")
    line, raw = 1, b"more"
    with readable(file), file.open("rb") as stream:
        while raw:
            raw = stream.read(BLOCK)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise NotText(file, line + error.object[: error.start].count(b"\n"), INSTEAD) from None
            if on_error == "replace":
                text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
            elif "\0" in text:
                raise NotText(file, line + text.partition("\0")[0].count("\n"), INSTEAD)
            line += text.count("\n")
            if text:
                yield text


def is_text(file: Path) -> bool:
    """Returns whether a file is valid UTF-8 without zero bytes. Reads such a file to its end. Raises: Refused: the file
    cannot be read."""
    try:
        for _ in blocks(file):
            pass
        return True
    except NotText:
        return False


def cut_at(text: Callable[[], Iterable[str]], tail: float) -> int:
    """Returns the number of characters at the beginning of a text that are training text. The remaining characters, a
    share of about `tail`, are validation text. The cut is moved back to the last end of a paragraph before it, or else
    of a line, or else of a word. The cut moves by at most its distance from the end of the text; if none of these
    boundaries lies within this distance, it does not move.

    Args:
        text: returns the blocks of the text; called twice.
    """
    length = sum(map(len, text()))
    at = min(max(1, round(length * (1 - tail))), max(1, length - 1))
    lowest = max(1, 2 * at - length)
    last, start, before = {}, 0, ""
    for block in text():
        joined, offset = before + block, start - len(before)  # a boundary may extend over two blocks
        for boundary in BOUNDARIES:
            position = joined.rfind(boundary, max(0, lowest - offset), max(0, at - offset))
            if position >= 0:
                last[boundary] = offset + position + len(boundary)
        start, before = start + len(block), block[-1:]
    return next((last[boundary] for boundary in BOUNDARIES if boundary in last), at)


def between(text: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """Yields the characters from `start` to `stop` in blocks. Args: text: blocks of the full text; stop: None: to the
    end."""
    at = 0
    for block in text:
        if wanted := block[max(0, start - at) : None if stop is None else max(0, stop - at)]:
            yield wanted
        at += len(block)
