"""Compiles a C++ file of this package into a shared library, and caches the library.

`adamw8bit.py` and `bitsandbytes_cpu.py` use such libraries for their steps on a CPU. A C++ compiler on the PATH
suffices: the files need neither the headers of Python or torch nor a build system. ctypes calls the functions of the
library, and releases the GIL during a call.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowmem.system.atomic_files import atomic_cache_write

log = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-std=c++17")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # dtype -> its number in half.hpp


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Returns a tensor's address for a C++ function, or a null pointer for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@functools.cache
def library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Returns the compiled library. Returns None and logs the reason if the PATH has no compiler, or if compiling or
    loading fails; the caller must then use a slower implementation. The result is cached per source and flags.

    Args:
        source: the C++ file.
        flags: additional compiler flags.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return _without(source, "there is no C++ compiler on the PATH")
    try:
        return ctypes.CDLL(str(_built(compiler, source, (*FLAGS, *flags))))
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)]
        return _without(source, f"{compiler} failed ({lines[0]})")


def _without(source: Path, why: str) -> None:
    log.info(
        f"optim: {why}, so {source.name} is not compiled. The optimizer step runs as torch operators and takes about 5 "
        "times as long."
    )


def _built(compiler: str, source: Path, flags: Sequence[str]) -> Path:
    """Returns the path of the library in the cache, and compiles the library first if the cache has no intact copy. The
    file name contains a hash of the sources, the flags and the compiler's predefined macros, which list this
    processor's instruction set."""
    describe = [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    target = _run(describe)
    texts = [file.read_text(encoding="utf-8") for file in (source, *sorted(source.parent.glob("*.hpp")))]
    key = hashlib.sha256("".join([*texts, target, *flags]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lowmem"
    built = cache / f"{source.stem}-{key}.so"
    if not _intact(built):
        cache.mkdir(parents=True, exist_ok=True)
        with atomic_cache_write(built) as draft:  # two processes may build at the same time
            _compile([compiler, *flags, str(source), "-o", str(draft)])
            _checksum_of(built).write_text(_checksum(draft), encoding="utf-8")
    return built


def _intact(built: Path) -> bool:
    """Returns True if the cached library exists and has the right checksum. Loading a truncated file would crash the
    process."""
    try:
        return _checksum(built) == _checksum_of(built).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _checksum_of(built: Path) -> Path:
    return built.with_suffix(".sha256")


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _compile(command: list[str]) -> None:
    try:
        _run([*command, "-fopenmp"])
    except subprocess.CalledProcessError:  # Apple's clang has no OpenMP: use one thread
        _run(command)


def _run(command: list[str]) -> str:
    """Runs a compiler and returns its output. Ctrl-C does not reach the compiler, because an interrupted run completes
    its current step before it stops, and this step needs the library."""
    return subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True).stdout
