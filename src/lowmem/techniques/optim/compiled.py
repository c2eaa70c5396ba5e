"""A C++ file of this package as a library of functions: compiled once with whatever compiler there is, and cached.

Only a compiler is needed: no headers of Python or torch, no build system. The file's functions are called through
ctypes, which lets other Python threads run meanwhile.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-std=c++17")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as the C++ functions number those of half.hpp


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """What a C++ function is given of a tensor; null of none."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@functools.cache
def library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """None where there is no compiler, or it cannot compile this: said once, the caller has a slower way.

    Args: flags: beside those of every file here.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return _without(source, "no C++ compiler is on the PATH")
    try:
        return ctypes.CDLL(str(_built(compiler, source, (*FLAGS, *flags))))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return _without(source, f"{compiler} failed ({said.strip().splitlines()[0]})")


def _without(source: Path, why: str) -> None:
    log.info(f"optim={source.stem}: {why}, so its step runs as torch operators, some five times as long.")


def _built(compiler: str, source: Path, flags: Sequence[str]) -> Path:
    """The cached library; its name tells the sources, the compiler and the instructions of this processor."""
    describe = [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    target = subprocess.run(describe, capture_output=True, text=True, check=True).stdout
    texts = [file.read_text(encoding="utf-8") for file in (source, *sorted(source.parent.glob("*.hpp")))]
    key = hashlib.sha256("".join([*texts, target, *flags]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lowmem"
    built = cache / f"{source.stem}-{key}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # two processes may build at once
            draft = Path(folder) / built.name
            _compile([compiler, *flags, str(source), "-o", str(draft)])
            os.replace(draft, built)
    return built


def _compile(command: list[str]) -> None:
    quiet = {"capture_output": True, "text": True, "check": True}
    try:
        subprocess.run([*command, "-fopenmp"], **quiet)
    except subprocess.CalledProcessError:  # Apple's clang has no OpenMP: one thread then
        subprocess.run(command, **quiet)
