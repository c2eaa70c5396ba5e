"""Reads rows of csv and parquet files one by one: neither a file nor a row group is ever in memory as a whole.

It uses Python's own `csv` and pyarrow's file reader, not `datasets`: that reads csv with pandas, which takes an empty
text or "NA" for no text and 1.0 for a number, and parquet with a scanner that holds full row groups: with groups of 256
MB its memory grows by 300 MB, and by 20 MB here. `datasets` reads data sets of the hub (hub.py).
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lowmem.config.values import checked_encoding, shown
from lowmem.data.sources.reading import blocks, readable
from lowmem.data.sources.records import FIELDS, BadRecord, OfFiles, Records, records
from lowmem.data.sources.text_files import Files, find_files
from lowmem.system.errors import Refused

DELIMITERS = {"tab": "\t"}  # spellings that can be typed
LONGEST = 1 << 28  # characters of a row: beyond it a quotation mark is missing, or it is no table
AT_ONCE = 64  # rows of parquet: conversations of 100 kB make 6 MB
BUFFER = 1 << 20  # bytes of a column that are read at once
TOOLS = "tools"  # a column that belongs to conversations, like the field of this name


def table_csv(
    path: str,
    pattern: str,
    val_fraction: float,
    val_path: str | None = None,
    encoding: str = "utf-8",
    delimiter: str = ",",
    **how: str | bool | None,
) -> Records:
    """Returns the source of the rows of a csv file, or of the files of a folder that match `pattern`; its columns are
    the fields. Args: how: those of `records`."""
    if len(DELIMITERS.get(delimiter, delimiter)) != 1 or delimiter in ('"', "\n", "\r"):
        raise Refused(f"data.delimiter={delimiter}: it is one character, such as ';', or the word tab.")
    files, settings = find_files(path, pattern, val_fraction, val_path), [checked_encoding(encoding), delimiter]
    rows = Table(files, val_fraction, settings, "line", lambda file: csv_rows(file, delimiter, encoding))
    return records(rows, "csv", **how)


def table_parquet(
    path: str,
    pattern: str,
    val_fraction: float,
    val_path: str | None = None,
    **how: str | bool | None,
) -> Records:
    """Returns the source of the rows of a parquet file, or of the files of a folder that match `pattern`; only the
    columns in use are read. Args: how: those of `records`."""
    columns, also = used(*(how.get(name) for name in FIELDS)), [TOOLS] if how.get("messages") else []
    files = find_files(path, pattern, val_fraction, val_path)
    rows = Table(files, val_fraction, [columns + also], "row", lambda file: parquet_rows(file, columns, also))
    return records(rows, "parquet", **how)


def used(*names: str | None) -> list[str]:
    """Returns the columns that records are made of. Args: names: the yaml's keys for them."""
    return [name for name in names if name] or ["text"]


class Table(OfFiles):
    """The reader of the rows of files. Args: unit: what its records are called; numbered: yields the rows of a file
    with their numbers."""

    def __init__(
        self,
        files: Files,
        val_fraction: float,
        how: list,
        unit: str,
        numbered: Callable[[Path], Iterator[tuple[int, dict | BadRecord]]],
    ) -> None:
        super().__init__(files, val_fraction, how)
        self.unit, self.numbered = unit, numbered

    def identity(self, raw: dict | BadRecord) -> bytes:
        return str(raw).encode(errors="surrogatepass")

    def fields(self, raw: dict | BadRecord) -> dict | BadRecord:
        return raw


def csv_rows(file: Path, delimiter: str, encoding: str) -> Iterator[tuple[int, dict[str, str] | BadRecord]]:
    """Yields (the line in which a row begins, as an editor counts lines; the texts by the names in the first line).
    Lines without any cell are skipped.

    Raises:
        Refused: no names, or one twice; a row that does not end; bytes that are no text.
    """
    csv.field_size_limit(LONGEST)
    table = csv.reader(_lines(file, encoding), delimiter=DELIMITERS.get(delimiter, delimiter), strict=True)
    names = None
    while True:
        start = table.line_num + 1
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:  # the reader continues after the line
            if names is None or "field larger" in str(error):
                raise Refused(f"data: {shown(file)} is no table in csv: line {table.line_num}: {error}.") from None
            yield start, BadRecord(f"{error}, which {_from_to(start, table.line_num)}")
            continue
        if names is None:
            names = _checked(cells, file) if cells else None
        elif len(cells) == len(names):
            yield start, dict(zip(names, cells, strict=True))
        elif cells:
            yield start, BadRecord(f"it has {len(cells)} cells and the first line names {len(names)}")


def _from_to(start: int, stop: int) -> str:
    """Names a range of lines: a cell whose quotation mark is missing goes on to the next mark, over several rows."""
    several = f"takes lines {start:,} to {stop:,}: a quotation mark may be missing"
    return several if stop > start else f"ends at line {stop:,}"


def _checked(names: list[str], file: Path) -> list[str]:
    names[0] = names[0].removeprefix("\ufeff")  # a byte order mark
    if twice := [name for name in names if names.count(name) > 1]:
        raise Refused(f"data: {shown(file)} names the column {twice[0]!r} twice in its first line. Rename one.")
    return names


def _lines(file: Path, encoding: str) -> Iterator[str]:
    """Yields lines with their ends: a cell may contain some."""
    parts: list[str] = []
    for block in blocks(file, encoding, None):
        *whole, rest = block.split("\n")
        for line in whole:
            yield "".join([*parts, line, "\n"])
            parts = []
        parts.append(rest)
        if sum(map(len, parts)) > LONGEST:
            raise Refused(f"data: {shown(file)} has a line of more than {LONGEST:,} characters, as no table has.")
    if any(parts):
        yield "".join(parts)


def parquet_rows(
    file: Path, columns: Sequence[str], also: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any] | BadRecord]]:
    """Yields (number from 1 on, the values of these columns). Args: also: more columns, if the file has them.

    Raises:
        Refused: the file is no parquet, or damaged, or lacks a column.
    """
    import pyarrow
    from pyarrow import parquet

    with readable(file):
        try:
            table = parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
            there = table.schema_arrow.names
            _check_columns(there, columns, file)
            read = [*columns, *(name for name in also if name in there)]
            batches = table.iter_batches(AT_ONCE, columns=read, use_threads=False)
            yield from enumerate((row for batch in batches for row in _values(batch)), 1)
        except pyarrow.ArrowException as error:
            said = str(error).partition("\n")[0].rstrip(".")
            raise Refused(
                f"data: {shown(file)} is no parquet file, or a damaged one ({said}). Give one that is."
            ) from None


def _values(batch: Any) -> list[dict[str, Any] | BadRecord]:
    """Returns the rows of a pyarrow.RecordBatch. A row whose bytes are no text becomes a BadRecord of its own."""
    try:
        return batch.to_pylist()
    except UnicodeError:
        if batch.num_rows == 1:
            return [BadRecord("it holds bytes that are no UTF-8")]
        return [value for row in range(batch.num_rows) for value in _values(batch.slice(row, 1))]


def _check_columns(there: Sequence[str], columns: Sequence[str], file: Path) -> None:
    if missing := [name for name in columns if name not in there]:
        names = ", ".join(f'"{name}"' for name in there[:8])
        raise Refused(f'data: {shown(file)} has no column "{missing[0]}"; its columns are {names}. Type one of them.')
    if twice := [name for name in columns if there.count(name) > 1]:
        raise Refused(f'data: {shown(file)} has two columns "{twice[0]}". Rename one.')
