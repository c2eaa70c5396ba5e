"""Wraps printed text and log messages at the width of the terminal, between words.

Text for files and pipes is not wrapped, so that a search finds whole sentences. If the environment variable COLUMNS is
set, its width applies to all text, including text for files and pipes.
"""

import logging
import os
import sys
import textwrap
from typing import TextIO


def width(stream: TextIO) -> int | None:
    """Returns the characters per line: COLUMNS if it is a positive number, otherwise the width of the terminal. Returns
    None if COLUMNS is not a positive number and the stream is not a terminal."""
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal
        return None


def folded(text: str, stream: TextIO | None = None) -> str:
    """Returns the text with long lines broken between words. Continuation lines are indented like the original line.
    Args: stream: where the text will be printed; None is stdout."""
    room = width(stream or sys.stdout)
    return text if room is None else "\n".join(piece for line in text.split("\n") for piece in _wrapped(line, room))


def _wrapped(line: str, room: int) -> list[str]:
    if len(line) <= room:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    whole_words = {"break_long_words": False, "break_on_hyphens": False}  # so that paths can be copied
    return textwrap.wrap(line, room, subsequent_indent=indent, **whole_words)


class Folding(logging.Formatter):
    """Wraps log messages at the width of the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return folded(super().format(record))
