"""Wraps calls to the operating system about this process and this machine."""

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
    """Raises the limit of open files inside the `with` to `count`, or to the hard limit if that is lower. A higher
    limit is kept. The default of many systems is 1,024."""
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
    """Returns the peak resident memory in bytes since the last `reset_peak_rss`. Where the peak cannot be reset,
    returns the peak since the process started."""
    return rss_and_peak()[1]


def rss_and_peak() -> tuple[int, int]:
    """Returns `rss_bytes` and `peak_rss_bytes`. The memory meter needs both values several times per step, so on Linux
    a single read of `/proc/self/status` gives both."""
    try:
        with _STATUS.open("rb", buffering=0) as file:
            _, _, text = file.read().partition(b"VmHWM:")
        peak, _, rss = text.partition(b"VmRSS:")
        return int(rss.split(maxsplit=1)[0]) * _KIB, int(peak.split(maxsplit=1)[0]) * _KIB
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else _KIB
        return rss_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> None:
    """Resets the peak to the current resident memory (Linux; a no-op elsewhere). While a run is measured, only the
    memory meter may call this function, because the meter resets the peak at the start of each phase."""
    try:
        with _CLEAR_REFS.open("wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return


def trim() -> None:
    """Returns freed heap memory to the system (glibc; a no-op elsewhere). Otherwise freed memory may stay resident in
    the heap. If later allocations reuse it, resident memory does not grow, so the memory meter does not see them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


_M_ARENA_MAX = -8  # parameter of glibc's mallopt


def share_heap() -> None:
    """Makes all threads that start after this call share one heap (glibc; a no-op elsewhere). By default threads have
    separate heaps, and a thread cannot reuse memory that was freed in the heap of another thread. The setting cannot be
    undone: threads of later runs in this process share the heap, too, which costs time but no memory."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)


_MADV_PAGEOUT = 21  # Linux 5.4 or later; the content of pages is kept, so a wrong address only costs time


def page_out(tensors: Iterable[Tensor]) -> None:
    """Evicts the memory pages of tensors that are mapped from a file (Linux; a no-op elsewhere). Call this after
    the tensors have been copied. Without this call, the pages would count as resident memory until the map is
    closed."""
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
    """Returns the seconds since the operating system started this process. The time of imports is included."""
    return time.time() - _this().create_time()


def processor() -> str:
    """Returns the model name of the processor. If /proc/cpuinfo is missing or has no name, returns
    `platform.processor()`, which may be ""."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def available_bytes() -> int:
    """Returns the available memory in bytes: the available memory of the machine, or the container's limit minus its
    used memory, whichever is less."""
    free = psutil.virtual_memory().available
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, limit - used)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no cgroup, or "max"
        return None
