"""Reads records from files of JSON lines, by bytes, so that an error names the file and the line.

It refuses what `json` accepts and JSON does not allow: a field that occurs twice, NaN. It never holds more than
`LONGEST` bytes of a line.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lowmem.config.values import checked_encoding
from lowmem.data.sources.reading import readable
from lowmem.data.sources.records import BadRecord, OfFiles, Records, records
from lowmem.data.sources.text_files import Files, find_files
from lowmem.system.errors import Refused

LONGEST = 1 << 24  # bytes of a line
BOM = b"\xef\xbb\xbf"


def jsonl(
    path: str,
    pattern: str,
    val_fraction: float,
    val_path: str | None = None,
    encoding: str = "utf-8",
    **how: str | bool | None,
) -> Records:
    """Returns the source of the lines of a file, or of the files of a folder that match `pattern`. Of several files
    some are validation; of one, some of its lines. Args: how: those of `records`."""
    lines = Lines(find_files(path, pattern, val_fraction, val_path), val_fraction, _of_lines(encoding))
    return records(lines, "chat" if how.get("messages") else "jsonl", **how)


def _of_lines(encoding: str) -> str:
    if "\n{".encode(checked_encoding(encoding)) != b"\n{":
        raise Refused(
            f"data.encoding={encoding}: lines of JSON are found by their bytes, which this encoding writes otherwise. "
            "Save the file as utf-8, or type utf-8, latin-1 or cp1252 if it is that."
        )
    return encoding


class Lines(OfFiles):
    """The reader of the lines of files."""

    unit = "line"

    def __init__(self, files: Files, val_fraction: float, encoding: str = "utf-8") -> None:
        super().__init__(files, val_fraction, [encoding])
        self.encoding = encoding

    def numbered(self, file: Path) -> Iterator[tuple[int, bytes]]:
        return _lines(file)

    def identity(self, raw: bytes) -> bytes:
        return raw

    def fields(self, raw: bytes) -> dict | BadRecord:
        return _fields(raw, self.encoding)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number, line) of every line that is not blank, stripped; of a line that is too long only the
    beginning."""
    with readable(file), file.open("rb") as stream:
        number = 0
        while line := stream.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST and not line.endswith(b"\n"):
                _skip_rest(stream)
            if stripped := line.removeprefix(BOM if number == 1 else b"").strip():
                yield number, stripped


def _skip_rest(stream: BinaryIO) -> None:
    while (rest := stream.readline(LONGEST)) and not rest.endswith(b"\n"):
        pass


def _fields(line: bytes, encoding: str) -> dict | BadRecord:
    if len(line) > LONGEST:
        return BadRecord(f"it is longer than {LONGEST:,} bytes")
    try:
        value = json.loads(line.decode(encoding), object_pairs_hook=_object, parse_constant=_no_constant)
    except BadRecord as bad:
        return bad
    except UnicodeError as error:
        return BadRecord(f"it is no {encoding} (see byte {getattr(error, 'start', 0):,} of the line)")
    except json.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 10) : error.pos + 10]
        return BadRecord(f'it is no JSON ({error.msg.lower().rstrip(".")} at character {error.pos:,}, near "{near}")')
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deeply nested brackets
        return BadRecord(f"it is no JSON that can be read ({str(error).partition(';')[0].lower()})")
    return value if isinstance(value, dict) else BadRecord(f"it is {_called(value)} and no object with fields")


def _object(pairs: list[tuple[str, object]]) -> dict:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRecord(f'field "{next(name for name in names if names.count(name) > 1)}" stands there twice')
    return made


def _no_constant(name: str) -> None:
    raise BadRecord(f"it holds {name}, which is no JSON")


def _called(value: object) -> str:
    return "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else f'"{value}"'
