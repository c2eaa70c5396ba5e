"""Finds and tokenizes text files (`data=text`, `data=stdlib`), and selects the files that are held out for validation.
Sources that read records from files also call `find_files`.

Training and validation are split *by file*, because a split inside files could put the first half of a function into
training and the second half into validation. A file is divided only if it is the only one and data.val_path is not set:
its last part is then the validation split. Creating a `Corpus` reads only the names and sizes of files. While a batch
of text is tokenized, a second thread reads the next batch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lowmem.config.values import check_utf8, checked_on_error, no_such, shown
from lowmem.data.opening import StoredSource
from lowmem.data.sources.framing import framing_of
from lowmem.data.sources.pieces import Cuts, batches, controls, ids_of, pieces, text_bytes
from lowmem.data.sources.reading import UTF_8, ahead, between, blocks, cut_at, digests, is_text
from lowmem.data.sources.source import Encoded, SplitName
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

RECORDS = {".jsonl", ".ndjson"}  # files of records: as plain text, they would teach a model braces, keys and escapes


@dataclass(frozen=True)
class Corpus(StoredSource):
    """A source of text files. Each file is a document.

    Args:
        on_error: what to do with files that are not valid UTF-8 or contain zero bytes: `refuse` the run, `skip` the
            file, or `replace` invalid and zero bytes with U+FFFD.
        tail: share of the text that is held out for validation if `train` and `val` are the same single file; otherwise
            None.
        packing, too_long, bos: see `Source`.
    """

    name: str
    train: list[Path]
    val: list[Path]
    on_error: str = "refuse"
    tail: float | None = None
    packing: str = "joined"
    too_long: str = "cut"
    bos: bool | str = "auto"
    skipped: dict[str, int] = field(default_factory=dict, compare=False)  # split -> number of skipped files
    # split -> number of control tokens that are spelled out in the text
    controls: dict[str, int] = field(default_factory=dict, compare=False)

    def key(self) -> list:
        contents = [digests(getattr(self, split)) for split in ("train", "val")]
        return [contents, UTF_8, self.on_error, self.tail]

    def size(self, split: SplitName) -> int:
        share = {"train": 1 - self.tail, "val": self.tail}[split] if self.tail else 1
        return round(share * sum(file.stat().st_size for file in getattr(self, split)))

    def texts(self) -> Iterator[str]:
        for file in self._readable("train"):
            yield from (piece for piece, _ in pieces(self._blocks(file, "train")))

    def encoded(self, split: SplitName, tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
        framing, begins = framing_of(tokenizer, self.bos), True
        cuts, known = Cuts(tokenizer), list(controls(tokenizer).values())
        self.controls[split] = 0
        texts = (piece for file in self._readable(split) for piece in pieces(self._blocks(file, split), cuts))
        for batch in ahead(batches(texts, lambda piece: text_bytes(piece[0]))):
            ids_by_piece = ids_of(tokenizer, [text for text, _ in batch])
            for (text, ends), ids in zip(batch, ids_by_piece, strict=True):
                self.controls[split] += int(np.isin(ids, known).sum())
                yield framing.document(ids, text_bytes(text), begins, ends)
                begins = ends

    def notes(self) -> list[str]:
        return [
            f"data.on_error=skip: skipped {count:,} of {quantity(len(getattr(self, split)), f'{split} file')} "
            "(not UTF-8 text)."
            for split, count in self.skipped.items()
            if count
        ] + [
            f"data: the {split} text contains {quantity(count, 'control token')} of the tokenizer, spelled out. Each "
            "is encoded as the token itself, such as end of text, and not as letters."
            for split, count in self.controls.items()
            if count
        ]

    def _readable(self, split: SplitName) -> Iterator[Path]:
        self.skipped[split] = 0
        for file in getattr(self, split):
            if self.on_error == "skip" and not is_text(file):
                self.skipped[split] += 1
            else:
                yield file

    def _blocks(self, file: Path, split: SplitName) -> Iterator[str]:
        def read() -> Iterator[str]:
            return blocks(file, self.on_error)

        if self.tail is None:
            return read()
        at = cut_at(read, self.tail)
        return between(read(), 0, at) if split == "train" else between(read(), at, None)


# folders with tests, third-party packages and generated files, such as tables of code points
_NOT_STDLIB = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "ensurepip",
    "lib2to3",
    "encodings",
    "pydoc_data",
}


def stdlib(val_fraction: float, packing: str = "joined", too_long: str = "cut", bos: bool | str = "auto") -> Corpus:
    """Returns a corpus with the source files of the running Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not _NOT_STDLIB & set(f.relative_to(root).parts)]
    if not files:
        raise Refused(
            f"data=stdlib: there are no .py files under {root}, because this Python ships its library without sources. "
            "Type data=text data.path=<your text files>."
        )
    how = {"on_error": "replace", "packing": packing, "too_long": too_long, "bos": bos}
    divided = split(root, files, val_fraction)
    return Corpus("stdlib", divided.train, divided.val, **how)


def text(  # noqa: PLR0913
    path: str,
    pattern: str,
    val_fraction: float,
    val_path: str | None = None,
    encoding: str = "utf-8",
    on_error: str = "refuse",
    packing: str = "joined",
    too_long: str = "cut",
    bos: bool | str = "auto",
) -> Corpus:
    """Returns the corpus of a file or folder. From a folder, only the files that match `pattern` are read. The files of
    `val_path` are used for validation only. Raises: Refused: see `find_files`; or, with on_error=refuse, a file
    contains records (RECORDS)."""
    check_utf8(encoding)
    how = {"on_error": checked_on_error(on_error), "packing": packing, "too_long": too_long, "bos": bos}
    files = find_files(path, pattern, val_fraction, val_path, lambda files: _plain(files, on_error))
    return Corpus("text", files.train, files.val, tail=val_fraction if files.val_from_train else None, **how)


class Files(NamedTuple):
    """The files of both splits. Messages about records name the files relative to `root`."""

    root: Path
    train: list[Path]
    val: list[Path]

    @property
    def val_from_train(self) -> bool:
        """Returns whether both splits come from the same single file, which has to be divided."""
        return self.train == self.val


def find_files(
    path: str,
    pattern: str,
    val_fraction: float,
    val_path: str | Sequence[str] | None = None,
    usable: Callable[[list[Path]], list[Path]] = list,
) -> Files:
    """Finds the files of `data.path` and `data.val_path`. Without `data.val_path`, divides the files of `data.path` by
    `split`.

    Args:
        val_path: one or several paths. The files of the first path are the validation split; the files of all paths are
            excluded from training.
        usable: selects the files to use from the matching files.

    Raises:
        Refused: a path, `pattern` or `val_fraction` is invalid, a folder or file cannot be read, no file was found, no
            file is left for training, or `usable` raises Refused.
    """
    # named sets in a part of a mixture; for other data, training/build.py passes the paths without names
    if isinstance(val_path, Mapping):
        raise Refused(
            f"data.parts.<name>.val_path={dict(val_path)}: each part of a mixture has one validation set. Type "
            "one file or folder."
        )
    root, files = _files(path, pattern, "data.path", usable)
    if val_path is None:
        return split(root, files, val_fraction)
    places = [val_path] if isinstance(val_path, str) else val_path
    sets = [_files(place, pattern, "data.val_path", usable)[1] for place in places]
    held_out = {f.resolve() for val in sets for f in val}
    train = [f for f in files if f.resolve() not in held_out]
    if not train:
        raise Refused(
            f"data.val_path={', '.join(map(shown, places))}: this contains all files of data.path, so nothing is left "
            "to train on. Give other files, or leave out data.val_path to hold out data.val_fraction of the text."
        )
    if len(train) < len(files):
        log.info(
            f"data.val_path: excluded {len(files) - len(train):,} of {quantity(len(files), 'file')} of data.path from "
            "training (validation only)."
        )
    return Files(root, train, sets[0])


def _files(path: str, pattern: str, key: str, usable: Callable[[list[Path]], list[Path]]) -> tuple[Path, list[Path]]:
    typed = f"{key}={shown(path)}"
    if not path.strip():
        raise Refused(f"{key}=: the path is empty. Type {key}=<a file or folder>, or {key}=. for the current folder.")
    try:
        root = Path(os.path.expanduser(path)).resolve()
        if root.is_file():
            root, files = root.parent, [root]
        elif root.is_dir():
            files = _matching(root, typed, pattern)
        else:
            raise no_such(key, path)
        files = [f for f in files if f.is_file() and f.stat().st_size]
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        where = getattr(error, "filename", None)
        place = f" ({shown(where)})" if where and str(where) != path else ""
        raise Refused(f"{typed}: {reason}{place}. Give files and folders that you can read.") from None
    files = usable(files)
    if not files:
        raise Refused(f"{typed}: there is no text in it. Give files that contain text.")
    return root, files


def _matching(root: Path, typed: str, pattern: str) -> list[Path]:
    """Returns the files below `root` that match the pattern. Logs the number of files that do not match, so that users
    notice if the default pattern finds only a tenth of their text. Args: typed: the override with the folder, for
    messages."""
    everything = _all_files(root)
    try:
        files = sorted(f for f in root.glob(pattern) if f.is_file())
    except (ValueError, NotImplementedError) as error:
        raise Refused(
            f"data.pattern={pattern}: {str(error).rstrip('.')}. Type a pattern relative to the folder, such as "
            "'**/*.md'."
        ) from None
    others = Counter(f.suffix for f in everything.difference(files))
    kinds = ", ".join(f"{count:,} {shown(suffix) or 'without an extension'}" for suffix, count in others.most_common(3))
    likely = next((suffix for suffix, _ in others.most_common() if suffix.isprintable() and suffix), ".md")
    if not files:
        others_are = f" (found: {kinds})" if others else ""
        raise Refused(
            f"{typed}: no file there matches data.pattern={pattern}{others_are}. Type, for example, "
            f"data.pattern='**/*{likely}'."
        )
    if others:
        log.info(f"{typed}: data.pattern={pattern} skips {quantity(others.total(), 'other file')} ({kinds}).")
    return files


def _all_files(root: Path) -> set[Path]:
    """Returns all files below a folder, except hidden files and files in hidden folders.

    Raises:
        OSError: a folder cannot be read. (`glob` silently skips such a folder.)
    """

    def refuse(error: OSError) -> None:
        raise error

    files = set()
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if not name.startswith(".")]
        files |= {Path(folder, name) for name in names if not name.startswith(".")}
    return files


def _plain(files: Sequence[Path], on_error: str) -> list[Path]:
    records = [f for f in files if f.suffix.lower() in RECORDS]
    if records and on_error == "refuse":
        raise Refused(
            f"data: {shown(records[0])} contains records, but data=text reads plain text: the model would learn braces "
            "and keys. Type data=jsonl to read the fields of records, data.on_error=replace to train on such files as "
            "they are, or data.on_error=skip to leave them out."
        )
    return [f for f in files if on_error != "skip" or f not in records]


def split(root: Path, files: list[Path], val_fraction: float) -> Files:
    """Holds out complete files, in the order of a hash of their names, until they have `val_fraction` of the bytes. At
    least one file is held out, and at least one remains for training. If there is only one file, it is in both splits,
    and has to be divided (`Files.val_from_train`). Raises: Refused: `val_fraction` is not between 0 and 1."""
    if not 0.0 < val_fraction < 1.0:
        raise Refused(
            f"data.val_fraction={val_fraction}: type a fraction between 0 and 1, such as data.val_fraction=0.05."
        )
    if len(files) == 1:
        return Files(root, files, files)
    order = sorted(files, key=lambda f: hashlib.sha256(_name(f, root)).digest())
    wanted, held_out, val = val_fraction * sum(f.stat().st_size for f in files), 0, []
    while len(val) < len(order) - 1 and (not val or held_out < wanted):
        val.append(order[len(val)])
        held_out += val[-1].stat().st_size
    return Files(root, sorted(order[len(val) :]), sorted(val))


def _name(file: Path, root: Path) -> bytes:
    """Returns the path relative to `root` as the file system's bytes, which may not be valid UTF-8."""
    return os.fsencode(file.relative_to(root).as_posix())
