"""Reads a data set of the Hugging Face hub, or a folder with the layout of a data set, row by row: for `data=hub`, and
for `data=preference` with the id of a data set. A data set of the hub is streamed, without a complete download.

`datasets` finds the files of a split and streams them, without an Arrow copy on disk. It guesses the types of columns
of csv and JSON: 007 becomes a number, NA becomes null, and 2024-05-01 a date. So if all files of a split in a local
folder are csv, or all are JSON lines, the readers of data=csv or data=jsonl read these files instead of `datasets`,
unless the folder's README has a setting that these readers do not support (`Table._file_rows`). One row group of a
parquet file is in memory at a time; on the hub, row groups are usually small.

Without data.streaming, all rows are tokenized once into the token store. The order of rows, resume and packing then
work as with files. With data.streaming, no tokens are stored on disk (`stream.py`).
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from lowmem.config.values import shown
from lowmem.data.sources.bad_record import BadRecord
from lowmem.data.sources.jsonl import lines
from lowmem.data.sources.reading import digests
from lowmem.data.sources.records import Reader, Record, Records, identity, records
from lowmem.data.sources.source import SplitName
from lowmem.data.sources.tables import csv_rows, without_schema
from lowmem.data.stream import Stream
from lowmem.system.errors import Refused, first_line, refuse_gated

COMMIT = re.compile(r"[0-9a-f]{40}")
# extensions of files in a folder that the readers of data=csv and data=jsonl read; `datasets` reads all other files
TABLES, LINES = {".csv", ".tsv"}, {".jsonl", ".ndjson"}
# settings in the README of a data set that the readers of data=csv and data=jsonl support, or may ignore
PLAIN = {"name", "version", "description", "data_dir", "data_files", "sep", "delimiter"}
GUESSED = (
    "Fix the record or, if `datasets` guessed the wrong type for this text, type data=csv or data=jsonl "
    "data.path=<the file>"
)


def hub(  # noqa: PLR0913
    path: str,
    subset: str | None = None,
    split: str = "train",
    val_split: str | None = None,
    val_fraction: float = 0.05,
    revision: str | None = None,
    streaming: bool = False,
    block: int = 4096,
    val_rows: int = 512,
    **how: str | bool | None,
) -> Records | Stream:
    """Returns the source of a data set: a `Stream` with data.streaming=true, else `Records`. Args: how: further
    arguments of `records`."""
    table = Table(path, subset, {"train": split, "val": val_split}, val_fraction, revision)
    rows = records(table, "hub", **how)
    return Stream(rows, block, val_rows) if streaming else rows


class FileRows:
    """Iterates over the records of a split's files, from the current position on. As with datasets.IterableDataset,
    `state_dict` returns the position and `load_state_dict` sets it.

    Args:
        root: folder to which the file names in messages are relative.
        read: yields the records of a file.
    """

    def __init__(self, root: str, files: Sequence[Path], read: Callable[[Path], Iterator[Record]]) -> None:
        self.root, self.files, self.read = root, files, read
        self.load_state_dict({"file": 0, "row": 0})

    def state_dict(self) -> dict[str, int]:
        return {"file": self.file, "row": self.row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.file, self.row = state["file"], state["row"]  # index of the file, and number of its rows that were read

    def __iter__(self) -> Iterator[Record]:
        while self.file < len(self.files):
            file = self.files[self.file]
            for record in islice(self.read(file), self.row, None):
                self.row += 1
                name, fields = shown(os.path.relpath(file, self.root)), record.fields
                # `Table.record` also computes the identity of a row from its fields, so rows with equal fields have
                # equal identities with both readers
                known = record.identity if isinstance(fields, BadRecord) else identity(fields)
                yield Record(f"{name}, {record.where}", fields, known)
            self.file, self.row = self.file + 1, 0


class Table(Reader):
    """The reader of a data set's rows.

    Args:
        path: the id of a data set, or a folder.
        splits: split -> its name in the data set; None for "val": some training rows are held out.

    Raises:
        Refused: both splits have the same name.
    """

    val_key = "val_split=<another split>"

    def __init__(
        self,
        path: str,
        subset: str | None,
        splits: dict[SplitName, str | None],
        val_fraction: float,
        revision: str | None,
    ) -> None:
        if splits["val"] == splits["train"]:
            raise Refused(
                f"data.val_split={splits['val']}: data.split is {splits['train']}, too, so validation would leak "
                "training data. Type data.val_split=<another split>, or data.val_split=null to hold out some rows."
            )
        folder = Path(os.path.expanduser(path))
        self.path, self.folder = str(folder.resolve()) if folder.is_dir() else path, folder.is_dir()
        self.subset, self.splits, self.revision = subset, splits, revision
        super().__init__(splits["val"] is None, val_fraction)

    def key(self) -> list:
        return [
            self.contents(),
            self.subset,
            [*self.splits.values()],
            self.val_fraction if self.val_from_train else None,
        ]

    def contents(self) -> list:
        """Returns values that change with the content of the data set: names and digests of its files, or the commit of
        its repository."""
        if self.folder:
            files = sorted(file for file in Path(self.path).rglob("*") if file.is_file())
            return [[str(file.relative_to(self.path)) for file in files], digests(files)]
        if self.revision and COMMIT.fullmatch(self.revision):
            return [self.path, self.revision]
        from huggingface_hub import HfApi

        with self.reached():
            return [self.path, HfApi().dataset_info(self.path, revision=self.revision).sha]

    def size(self, split: SplitName) -> None:
        return None

    def all_records(self, split: SplitName) -> Iterator[Record]:
        name = self.splits[split] or self.splits["train"]
        with self.reached():
            for number, row in enumerate(self.rows(name), 1):
                yield self.record(row, name, number)

    def record(self, fields: dict | Record, name: str, number: int) -> Record:
        """Returns the record of a row. Args: fields: the row, or a `Record` of `FileRows`, which is returned unchanged;
        name: name of the split; number: number of the row in the split, from 1."""
        if isinstance(fields, Record):
            return fields
        return Record(f"{shown(self.path)}, {name}, row {number:,}", without_schema(fields), identity(fields))

    def rows(self, name: str, state: dict | None = None) -> Any:
        """Returns an iterable of a split's rows whose position can be saved: a datasets.IterableDataset, or `FileRows`.

        Args:
            state: the position from which to continue; None: the beginning. An older run may have saved a state of
                `datasets` for files that `FileRows` reads today; then `datasets` continues to read them.

        Raises:
            Refused: the data set or split does not exist, or cannot be reached.
        """
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        with self.reached():
            rows = self._file_rows(name) if self.folder and "file" in (state or {"file": 0}) else None
            if rows is None:
                how = {"split": name, "revision": self.revision, "streaming": True}
                rows = datasets.load_dataset(self.path, self.subset, **how)
                self.mend = GUESSED if rows.info.builder_name in ("csv", "json") else self.mend
            if state:
                rows.load_state_dict(state)
            return rows

    def _file_rows(self, name: str) -> FileRows | None:
        """Returns the rows of a folder's split if the split's files are all csv or all JSON lines, and the README has
        no settings except the ones in PLAIN. Otherwise returns None."""
        import datasets

        config = datasets.load_dataset_builder(self.path, self.subset).config
        files = [Path(file) for split, found in (config.data_files or {}).items() if split == name for file in found]
        usual, endings = vars(type(config)()), {file.suffix.lower() for file in files}
        if not files or {key for key, value in vars(config).items() if value != usual.get(key)} - PLAIN:
            return None
        if endings <= LINES:
            return FileRows(self.path, files, lines)
        return FileRows(self.path, files, lambda file: csv_rows(file, (), config.sep)) if endings <= TABLES else None

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Context manager that raises Refused in place of errors of `datasets` and of the hub, because users can fix
        the causes."""
        try:
            yield
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            if isinstance(error, Refused):
                raise
            refuse_gated(error, "data.path", shown(self.path), f"datasets/{self.path}")
            reason = first_line(error).rstrip(".")
            instead = (
                "Type a folder of parquet, csv or jsonl files, and a data.split that exists there."
                if self.folder
                else "Check the id and the network, or download the data set elsewhere (hf download --repo-type "
                f"dataset {shown(self.path)} --local-dir <folder>) and type data.path=<folder>."
            )
            raise Refused(f"data.path={shown(self.path)}: cannot read this data set ({reason}). {instead}") from None
