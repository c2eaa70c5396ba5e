"""Counts the processors that this process may use, so that the ranks of a machine can share them."""

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable() -> int:
    """Returns the number of processors that CPU affinity and the container's CPU quota allow, at least 1. In a
    container this is often lower than the number that torch counts."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="utf-8").split()
        return min(own, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup, or "max"
        return own
