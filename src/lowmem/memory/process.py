"""What the operating system says of this process: resident memory now and at its highest."""

import functools
import resource
import sys
import time
from pathlib import Path

import psutil

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_KIB = 1024


@functools.cache
def _this() -> psutil.Process:
    return psutil.Process()


def rss_bytes() -> int:
    return _this().memory_info().rss


def peak_rss_bytes() -> int:
    """Highest resident size since the last `reset_peak_rss`, or of the whole process where it cannot be reset."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * _KIB
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else _KIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_rss() -> None:
    """Start a new peak (Linux; a no-op elsewhere). One owner only: the memory meter."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return


def seconds_since_start() -> float:
    """Since the operating system started this process, imports included."""
    return time.time() - _this().create_time()
