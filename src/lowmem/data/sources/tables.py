"""Reads rows of csv files one by one, and rows of parquet files in groups of AT_ONCE. Neither a complete file nor a
complete row group is in memory. The module is used for `data=csv` and `data=parquet`, for csv files of `data=hub`, and
for parquet files of `data=preference`.

This module uses Python's own `csv` and pyarrow's file reader instead of `datasets`. `datasets` reads csv with pandas,
which turns an empty text or "NA" into null and 1.0 into a number. `datasets` reads parquet with a scanner that keeps
full row groups in memory: for row groups of 256 MB, memory grows by 300 MB with `datasets`, and by 20 MB with this
module. Only hub.py uses `datasets`.
"""

import codecs
import csv
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from lowmem.config.values import check_utf8, shown
from lowmem.data.sources.reading import UTF_8, NotText, readable
from lowmem.data.sources.records import FIELDS, BadRecord, Record, Records, identity, records_of_files
from lowmem.system.errors import Refused

DELIMITERS = {"tab": "\t"}  # names of delimiters for the command line
LONGEST = 1 << 28  # maximum characters of a cell; a longer cell probably lacks a quotation mark
AT_ONCE = 64  # rows of parquet that are read at once; conversations of 100 kB each take 6 MB
BUFFER = 1 << 20  # bytes of a parquet column that are read at once
TOOLS = "tools"  # the column with the tools of a conversation, like the field `tools` of JSON records


def table_csv(encoding: str = "utf-8", delimiter: str = ",", **how: str | float | bool | None) -> Records:
    """Returns the source of the rows of csv files. Columns are fields.

    Args:
        how: further arguments of `records_of_files`.
    """
    check_utf8(encoding)
    rows = partial(csv_rows, columns=columns_of(how), delimiter=delimiter)
    return records_of_files(rows, [UTF_8, delimiter], "csv", **how)


def table_parquet(**how: str | float | bool | None) -> Records:
    """Returns the source of the rows of parquet files. Only the columns in use are read.

    Args:
        how: arguments of `records_of_files`.
    """
    columns, optional = columns_of(how), [TOOLS] if how.get("messages") else []
    rows = partial(parquet_rows, columns=columns, optional=optional)
    return records_of_files(rows, [columns + optional], "parquet", **how)


def columns_of(how: dict) -> list[str]:
    """Returns the names of the columns that the encoder reads. Args: how: arguments of `records`."""
    return [how[name] for name in FIELDS if how.get(name)] or ["text"]


def csv_rows(file: Path, columns: Sequence[str], delimiter: str = ",") -> Iterator[Record]:
    """Yields the rows of a table whose first non-empty line has the names of columns. Each record has all columns, and
    its `where` names the last line of the row. If a row has too many or too few cells, its record contains a BadRecord
    in place of the fields.

    Args:
        columns: columns that the table must have.

    Raises:
        Refused: the file cannot be read or is not valid UTF-8; one of `columns` is missing or not unique; or a row
            cannot be parsed, for example because of a missing quotation mark, a carriage return outside of quotation
            marks, or a cell longer than LONGEST.
    """
    csv.field_size_limit(LONGEST)
    with readable(file), file.open("rb") as stream:
        decoded = codecs.iterdecode(stream, "utf-8-sig")
        table = csv.DictReader(decoded, delimiter=DELIMITERS.get(delimiter, delimiter), strict=True)
        number = 0
        try:
            while table.fieldnames == []:  # blank lines before the header
                table.fieldnames = None
            _check_delimiter(table.fieldnames or [], columns, file)
            _check_columns(table.fieldnames or [], columns, file)
            number = table.line_num
            for fields in table:
                number = table.line_num
                raw = identity(fields)
                if None in fields or None in fields.values():  # too many cells, or too few
                    cells = "more" if None in fields else "fewer"
                    fields = BadRecord(
                        f"the row has {cells} cells than the header has columns ({len(table.fieldnames)})"
                    )
                yield Record(f"line {number:,}", fields, raw)
        except UnicodeDecodeError:
            raise NotText(file, table.reader.line_num + 1) from None
        except csv.Error as error:
            if "new-line" in str(error):
                raise Refused(
                    f"data: {shown(file)}, line {number + 1:,}: there is a carriage return outside of quotation marks. "
                    "If every line ends in one, type tr '\\r' '\\n' < FILE > NEW; otherwise quote the cell that "
                    "contains it."
                ) from None
            raise Refused(
                f"data: {shown(file)}, line {number + 1:,}: {error} (in line {table.reader.line_num:,}). Fix the row "
                f"that begins in line {number + 1:,}; a quotation mark may be missing."
            ) from None


def parquet_rows(file: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[Record]:
    """Yields a record for each row, with the values of `columns`, and of the optional columns that the file has.

    Raises:
        Refused: the file cannot be read, is not parquet, is damaged, or does not have each of `columns` exactly once.
    """
    import pyarrow
    from pyarrow import parquet

    number = 0
    with readable(file):
        try:
            table = parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
            names = table.schema_arrow.names
            _check_columns(names, columns, file)
            read = [*columns, *(name for name in optional if name in names)]
            batches = table.iter_batches(AT_ONCE, columns=read, use_threads=False)
            for fields in chain.from_iterable(batch.to_pylist(maps_as_pydicts="lossy") for batch in batches):
                number += 1
                yield Record(f"row {number:,}", without_schema(fields), identity(fields))
        except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError, OSError) as error:
            # an error of the file system, and not pyarrow's own error for a damaged page
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = str(error).partition("\n")[0].rstrip(".")
            raise Refused(
                f"data: {shown(file)} is not a parquet file, or is damaged after row {number:,} ({reason}). Give an "
                "intact parquet file."
            ) from None


def without_schema(fields: dict) -> dict:
    """Returns the columns of a row without nulls in nested objects. A parquet schema gives every object all keys of the
    objects in its column, with null for the keys that the object lacks. Without this function, these nulls would be
    rendered, for example in the arguments of a tool call. A null of the original data cannot be distinguished from a
    null of the schema, so both are removed. (Nulls in JSON lines are kept.)"""
    return {name: _present(value) for name, value in fields.items()}


def _present(value: object) -> object:
    if isinstance(value, dict):
        return {key: _present(field) for key, field in value.items() if field is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def has_column(file: Path, name: str) -> bool:
    """Returns whether a parquet file has a column. Returns False if the file cannot be read; `parquet_rows` then raises
    the error."""
    import pyarrow
    from pyarrow import parquet

    try:
        return name in parquet.read_schema(file).names
    except (pyarrow.ArrowException, OSError):
        return False


def _check_delimiter(names: Sequence[str], columns: Sequence[str], file: Path) -> None:
    if len(names) == 1 and names[0] not in columns:
        for character, typed in {"\t": "tab", ";": "';'", "|": "'|'"}.items():
            if character in names[0]:
                raise Refused(
                    f"data: {shown(file)} has a single column, named {shown(names[0])}, so another character seems to "
                    f"separate its cells. Type data=csv data.delimiter={typed}."
                )


def _check_columns(names: Sequence[str], columns: Sequence[str], file: Path) -> None:
    for column in columns:
        if column not in names:
            known = ", ".join(f'"{shown(name)}"' for name in names[:8]) or "unnamed"
            raise Refused(f'data: {shown(file)} has no column "{column}"; its columns are {known}. Type one of them.')
        if names.count(column) > 1:
            raise Refused(f'data: {shown(file)} has two columns named "{column}". Rename one.')
