"""Corpora: which files are text, and which of them are held out.

Train and validation are split *by file*: a split inside files would put a function's first half into training and its
second half into validation. Nothing is read here but names and sizes.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from lowmem.errors import Refused


@dataclass(frozen=True)
class Corpus:
    """Files of a corpus. `root` is what their names are relative to in keys and messages."""

    name: str
    root: Path
    train: list[Path]
    val: list[Path]


# Not the library itself: its tests, other people's packages, and what is generated: rows of code points, help texts.
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


def stdlib(val_fraction: float) -> Corpus:
    """The Python standard library's own source files on this machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not _NOT_STDLIB & set(f.relative_to(root).parts)]
    if not files:
        raise Refused(
            f"data=stdlib: there are no .py files under {root}; this Python ships its library without sources. "
            "Type data=text data.path=<your text files>."
        )
    return _split("stdlib", root, files, val_fraction)


def text(path: str, pattern: str, val_fraction: float, val_path: str | None = None) -> Corpus:
    """A file, or the files of a folder that match `pattern`."""
    root, files = _text_files(path, pattern, "data.path")
    if val_path is not None:
        return Corpus("text", root, files, _text_files(val_path, pattern, "data.val_path")[1])
    return _split("text", root, files, val_fraction)


def _text_files(path: str, pattern: str, key: str) -> tuple[Path, list[Path]]:
    root = Path(path).expanduser().resolve()
    if root.is_file():
        return root.parent, [root]
    if not root.is_dir():
        raise Refused(f"{key}={path}: there is no such file or folder. Give one that exists.")
    files = sorted(f for f in root.glob(pattern) if f.is_file() and f.stat().st_size)
    if not files:
        raise Refused(f"{key}={path}: no file there matches {pattern} and has text. Type data.pattern='**/*.md', say.")
    return root, files


def _split(name: str, root: Path, files: list[Path], val_fraction: float) -> Corpus:
    """Hold out whole files, in the order of a hash of their names, until `val_fraction` of the bytes is reached."""
    if not 0.0 < val_fraction < 1.0:
        raise Refused(f"data.val_fraction={val_fraction}: give a share between 0 and 1, such as 0.05.")
    if len(files) < 2:
        raise Refused(
            f"data={name}: only {files[0]} was found, and train and validation are split by file. "
            "Cut it into several files, or name another for validation: data.val_path=<file>."
        )
    order = sorted(files, key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest())
    wanted, held_out, val = val_fraction * sum(f.stat().st_size for f in files), 0, []
    while len(val) < len(order) - 1 and (not val or held_out < wanted):
        val.append(order[len(val)])
        held_out += val[-1].stat().st_size
    return Corpus(name, root, sorted(order[len(val) :]), sorted(val))
