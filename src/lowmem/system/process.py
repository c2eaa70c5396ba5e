"""Asks the operating system about this process: resident memory now and at its peak, and free memory of the machine."""

import ctypes
import functools
import mmap
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch import Tensor

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_KIB = 1024
OPEN_FILES = 1 << 14


@functools.cache
def _this() -> psutil.Process:
    return psutil.Process()


@contextmanager
def allow_open_files(count: int = OPEN_FILES) -> Iterator[None]:
    """Raises the limit of open files to `count` inside the `with`, or to the system's maximum. Most systems start at
    1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def rss_bytes() -> int:
    return _this().memory_info().rss


def peak_rss_bytes() -> int:
    """Returns the peak resident size since the last `reset_peak_rss`, or of the process where it cannot be reset."""
    return rss_and_peak()[1]


def rss_and_peak() -> tuple[int, int]:
    """Returns `rss_bytes` and `peak_rss_bytes`. On Linux both are lines of one file, which is read once: the memory
    meter reads them several times per step."""
    try:
        with _STATUS.open("rb", buffering=0) as file:
            _, _, text = file.read().partition(b"VmHWM:")
        peak, _, rss = text.partition(b"VmRSS:")
        return int(rss.split(maxsplit=1)[0]) * _KIB, int(peak.split(maxsplit=1)[0]) * _KIB
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else _KIB
        return rss_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> None:
    """Starts a new peak (Linux; a no-op elsewhere). Only the memory meter may call this."""
    try:
        with _CLEAR_REFS.open("wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return


def trim() -> None:
    """Returns freed heap memory to the system (glibc; a no-op elsewhere), so that the memory meter sees the next
    allocations."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


_M_ARENA_MAX = -8  # parameter of glibc's mallopt


def share_heap() -> None:
    """Makes threads that start from now on share one heap (glibc; a no-op elsewhere). By default each thread has its
    own heap, and memory that one thread frees is not reused by another. glibc cannot undo this: threads of later runs
    share the heap, too, which costs them time but no memory."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)


_MADV_PAGEOUT = 21  # Linux 5.4; modified pages are kept, so a wrong address only costs time


def page_out(tensors: Iterable[Tensor]) -> None:
    """Evicts the pages of a mapped file after its tensors have been copied (Linux; a no-op elsewhere). The pages would
    count as resident memory until the map is closed."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    for address, size in storages.items():
        last = address + size
        start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_PAGEOUT)


def seconds_since_start() -> float:
    """Returns the seconds since the operating system started this process, imports included."""
    return time.time() - _this().create_time()


def processor() -> str:
    """Returns the processor's model name, if the system knows it."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def available_bytes() -> int:
    """Returns the free memory of the machine, or of the container if its limit leaves less."""
    free = psutil.virtual_memory().available
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, limit - used)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no cgroup, or "max"
        return None
