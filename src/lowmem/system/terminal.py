"""Wraps printed text between words at the width of the terminal.

Files and pipes get each sentence in one line, so that it can be searched for, unless COLUMNS is set.
"""

import logging
import os
import sys
import textwrap
from typing import TextIO


def width(stream: TextIO) -> int | None:
    """Returns the characters per line; None if the stream is not a terminal."""
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # not a terminal
        return None


def folded(text: str, stream: TextIO | None = None) -> str:
    """Breaks long lines between words. Continuation lines have the indentation of the line that they continue."""
    room = width(stream or sys.stdout)
    return text if room is None else "\n".join(piece for line in text.split("\n") for piece in _wrapped(line, room))


def _wrapped(line: str, room: int) -> list[str]:
    if len(line) <= room:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    whole_words = {"break_long_words": False, "break_on_hyphens": False}  # users copy paths
    return textwrap.wrap(line, room, subsequent_indent=indent, **whole_words)


class Folding(logging.Formatter):
    """Wraps log messages that go to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return folded(super().format(record))
