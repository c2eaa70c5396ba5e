"""Counts the processors that this process may use."""

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable() -> int:
    """Returns the number of processors of the container, which is often lower than the number that torch counts."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="utf-8").split()
        return min(own, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        return own
