"""Reads files as characters, in blocks: no file is ever in memory as a whole."""

import codecs
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lowmem.config.values import shown
from lowmem.system.errors import Refused

BLOCK = 1 << 20  # bytes
BOUNDARIES = ("\n\n", "\n", " ")  # of paragraphs, lines and words
OVER = object()
MARKS = {
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
}
T = TypeVar("T")


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turns an error while reading a text into a refusal: the text is the user's, and the cache is not at fault."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"data: {shown(file)} cannot be read ({(error.strerror or str(error)).lower()}). "
            "Make it readable, or type a data.pattern that leaves it out."
        ) from None


def digests(files: Iterable[Path]) -> list[str]:
    """Returns the SHA-256 of each file's bytes; it uses one thread per core."""

    def digest(file: Path) -> str:
        with readable(file), file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(digest, files))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields the same items; a thread makes the next one while one is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, OVER)
        while (item := coming.result()) is not OVER:
            coming = pool.submit(next, items, OVER)
            yield item


class _NoText(Exception):
    def __init__(self, reason: str, raw: bytes) -> None:
        super().__init__(reason)
        self.raw = raw


def blocks(file: Path, encoding: str, on_error: str | None) -> Iterator[str]:
    """Yields the characters of a text file in blocks. Bytes that are no text are refused or, with on_error=replace,
    replaced. Args: on_error: None: refuse them, and do not name the key.

    Raises:
        Refused: with the number of the first byte that is no text.
    """
    try:
        yield from _decoded(file, encoding, "replace" if on_error == "replace" else "strict")
    except _NoText as error:
        instead = (
            "data.on_error=skip leaves such files out, data.on_error=replace puts U+FFFD where there is no character."
            if on_error
            else "utf-8 takes every text, saved as that."
        )
        raise Refused(
            f"data: {shown(file)} is no text in {encoding} ({error}). {_likely(error.raw)}{instead}"
        ) from None


def is_text(file: Path, encoding: str) -> bool:
    """Returns True if a file is text. It is decoded twice, so that this is known before its first character is used."""
    try:
        for _ in _decoded(file, encoding, "strict"):
            pass
        return True
    except _NoText:
        return False


def _decoded(file: Path, encoding: str, errors: str) -> Iterator[str]:
    start = 0
    with readable(file), file.open("rb") as stream:
        head = raw = stream.read(BLOCK)
        decoder = codecs.getincrementaldecoder(_of_stream(encoding, head))(errors)
        while True:
            waiting = len(decoder.getstate()[0])  # bytes of a character that began in the last block
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeError as error:
                at = start - waiting + getattr(error, "start", 0)
                raise _NoText(f"see byte {at:,}", head) from None
            if errors == "replace":
                text = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
            elif "\0" in text:
                raise _NoText("it has zero bytes, as binary files have", head)
            elif not _has_no_half_pair(text):
                raise _NoText("it has half a character", head)
            start += len(raw)
            if text:
                yield text
            if not raw:
                return
            raw = stream.read(BLOCK)


def _of_stream(encoding: str, head: bytes) -> str:
    """Returns the encoding to decode a stream with: for text without a byte order mark Python assumes the machine's
    order, but refuses a stream."""
    name = codecs.lookup(encoding).name
    marked = any(head.startswith(mark) for mark in MARKS.get(name, (b"",)))
    return encoding if marked else f"{name}-{sys.byteorder[0]}e"


def _has_no_half_pair(text: str) -> bool:
    """Returns True if the text has no half of a surrogate pair, which some encodings produce."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeError:
        return False


def _likely(raw: bytes) -> str:
    """Guesses from a file's first bytes what else it may be."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "Type data.encoding=utf-16, as which it begins; "
    return "" if b"\0" in raw else "Type data.encoding=latin-1, if that is what it is; "


def cut_at(text: Callable[[], Iterable[str]], tail: float) -> int:
    """Returns the number of characters that are training text, if about the last `tail` of them are validation. The cut
    is at the last paragraph, line or word that begins before that share, unless none begins in as many characters
    before it.

    Args:
        text: returns the text's blocks; called twice.
    """
    length = sum(map(len, text()))
    at = min(max(1, round(length * (1 - tail))), max(1, length - 1))
    lowest = max(1, 2 * at - length)
    last, start, before = {}, 0, ""
    for block in text():
        joined, first = before + block, start - len(before)  # a boundary may lie across two blocks
        for boundary in BOUNDARIES:
            found = joined.rfind(boundary, max(0, lowest - first), max(0, at - first))
            if found >= 0:
                last[boundary] = first + found + len(boundary)
        start, before = start + len(block), block[-1:]
    return next((last[boundary] for boundary in BOUNDARIES if boundary in last), at)


def between(text: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """Yields the blocks of the characters from `start` to `stop`."""
    at = 0
    for block in text:
        if part := block[max(0, start - at) : None if stop is None else max(0, stop - at)]:
            yield part
        at += len(block)
