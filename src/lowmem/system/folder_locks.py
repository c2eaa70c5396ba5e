"""Locks folders against other processes. The kernel releases the lock of a process that dies."""

import fcntl
import os
from pathlib import Path


def lock(handle: int) -> bool | None:
    """Locks an open folder until it is closed.

    Returns:
        False if another process holds the lock; None if the file system has no locks.
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

    Some shared file systems (GPFS, some mounts of Lustre) do not show the locks of other machines.
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
