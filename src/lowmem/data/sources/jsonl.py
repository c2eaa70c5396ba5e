"""Reads records from JSON-lines files, line by line: for `data=jsonl` and `data=chat`, and for JSON-lines files of
`data=preference` and `data=hub`.

A line that is longer than `LONGEST` bytes becomes a `BadRecord`, and is never read into memory in full.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from lowmem.config.values import check_utf8
from lowmem.data.sources.bad_record import BadRecord, kind
from lowmem.data.sources.reading import UTF_8, readable
from lowmem.data.sources.records import Record, Records, records_of_files

LONGEST = 1 << 24  # maximum bytes of a line
BOM = b"\xef\xbb\xbf"


def jsonl(encoding: str = "utf-8", **how: str | float | bool | None) -> Records:
    """Returns the source of the lines of JSON-lines files. Args: how: further arguments of `records_of_files`."""
    check_utf8(encoding)
    return records_of_files(lines, [UTF_8], "chat" if how.get("messages") else "jsonl", **how)


def lines(file: Path) -> Iterator[Record]:
    """Yields the record of every line that is not blank. Raises: Refused: the file cannot be read."""
    with readable(file):
        for number, line in numbered(file):
            yield Record(f"line {number:,}", fields_of(line), line)


def numbered(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) of every line that is not blank. Only a line feed ends a line, because JSON text may
    contain other line separators, such as U+2028. A line that is too long is cut to LONGEST + 1 bytes, so that
    `value_of` returns a BadRecord."""
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(LONGEST + 1):
            number += 1
            rest = line
            while len(rest) > LONGEST and not rest.endswith(b"\n"):
                rest = stream.readline(LONGEST + 1)
            if rest is not line:
                yield number, line  # not stripped, so that the line stays too long
            elif stripped := line.removeprefix(BOM if number == 1 else b"").strip():
                yield number, stripped


def fields_of(line: bytes) -> dict | BadRecord:
    """Returns the fields of a line, or a BadRecord if the line is not a JSON object."""
    value = value_of(line)
    return (
        value
        if isinstance(value, dict | BadRecord)
        else BadRecord(f"the line must be a JSON object, but is {kind(value)}")
    )


def value_of(line: bytes) -> object:
    """Returns the JSON value of a line, or a BadRecord if the line is too long, not UTF-8 or not valid JSON. As in
    Python's `json`, NaN is accepted, and if several fields have the same name, the last one counts."""
    if len(line) > LONGEST:
        return BadRecord(f"the line is longer than {LONGEST:,} bytes")
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecord(
            f"the line is not valid UTF-8 (at byte {error.start:,}); convert the file with "
            "iconv -f latin1 -t utf-8 FILE > NEW"
        )
    except json.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 10) : error.pos + 10]
        reason = error.msg.lower().rstrip(".").removesuffix(" at")
        return BadRecord(f'the line is not valid JSON ({reason} at character {error.pos:,}, near "{near}")')
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or deeply nested brackets
        return BadRecord(f"the line cannot be read as JSON ({str(error).partition(';')[0].lower()})")
