"""Locks folders against other processes with `flock`. When a process ends for any reason, the kernel releases its
locks."""

import fcntl
import os
from pathlib import Path


def lock(handle: int) -> bool | None:
    """Locks a folder until the file descriptor `handle` is closed.

    Returns:
        True if the folder is locked now; False if another open descriptor, usually of another process, holds the lock;
            None if the file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_locked(folder: Path) -> bool | None:
    """Returns whether a process holds the folder's lock; None if the file system has no locks, or if the folder cannot
    be opened, for example because of its permissions.

    On some shared file systems (GPFS, some mounts of Lustre), locks that other machines hold are not visible.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        free = lock(handle)
    finally:
        os.close(handle)
    return None if free is None else not free
