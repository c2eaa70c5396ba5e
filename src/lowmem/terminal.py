"""What is printed, in lines that a terminal neither cuts nor breaks inside a word.

Files and pipes get every sentence in one line, to be searched for; a command that is given COLUMNS folds there too.
"""

import logging
import os
import sys
import textwrap
from typing import TextIO


def width(stream: TextIO) -> int | None:
    """Characters of a line; None where nobody looks at the stream."""
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # no terminal
        return None


def folded(text: str, stream: TextIO | None = None) -> str:
    """Lines that are too long are broken between words, and go on as far in as they began."""
    room = width(stream or sys.stdout)
    return text if room is None else "\n".join(part for line in text.split("\n") for part in _parts(line, room))


def _parts(line: str, room: int) -> list[str]:
    if len(line) <= room:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    whole_words = {"break_long_words": False, "break_on_hyphens": False}  # a path is there to be copied
    return textwrap.wrap(line, room, subsequent_indent=indent, **whole_words)


class Folding(logging.Formatter):
    """Of messages that go to the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return folded(super().format(record))
