"""Describes the drive of a run or a plan by a folder on the drive and the number of free bytes. With weights.drive=,
the drive stores masters and optimizer state, and with weights.drive_holds=all also the 16-bit weights of blocks.

plan.py's `drive=` is either a folder on this machine, in which case the free space of its drive is used, or the size of
a planned drive. Drives are sold by decimal sizes, so a size may also end in GB (10**9 bytes) or TB. This module does
not import torch.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from lowmem.memory import cap
from lowmem.system.errors import Refused

FOLDER = "FOLDER"  # placeholder for the folder in printed commands, if only the size of a drive was typed
DECIMAL = {"GB": 10**9, "TB": 10**12}
# Assumed bytes per second: the sustained rates of NVMe drives on four lanes of PCIe 4, once the drive's cache is full
READ, WRITTEN = 3.5e9, 1.5e9


@dataclass(frozen=True)
class DriveSpace:
    """The space on a drive that a run may use: a folder on the drive, and the free bytes of the drive."""

    folder: str
    size: int


def space(folder_or_size: str | None, folder: str | None = None) -> DriveSpace | None:
    """Returns the space on a drive, or None if the run uses no drive.

    Args:
        folder_or_size: plan.py's `drive`.
        folder: the run's `weights.drive`, if set.
    """
    size = None if folder_or_size is None else size_of(folder_or_size)
    folder = folder or (folder_or_size if size is None else FOLDER)
    if folder is None:
        return None
    return DriveSpace(folder, shutil.disk_usage(existing(folder)).free if size is None else size)


def size_of(folder_or_size: str) -> int | None:
    """Returns the bytes of a size such as '200GB' or '180GiB', or None for a folder. Raises Refused for a number that
    is not positive, has no unit, or has an unknown unit."""
    decimal = re.fullmatch(r"(\d+(?:\.\d+)?) ?([GT]B)", folder_or_size)
    if decimal and float(decimal[1]):
        return int(float(decimal[1]) * DECIMAL[decimal[2]])
    if not re.fullmatch(r"-?\d+(\.\d+)? ?[A-Za-z]*", folder_or_size):
        return None
    try:
        return cap.parse_bytes(folder_or_size, plain=False)
    except Refused:
        raise Refused(f"drive={folder_or_size}: give a folder, or a size such as 200GB or 180GiB.") from None


def existing(folder: str) -> Path:
    """Returns the folder if it exists, otherwise its closest parent that exists."""
    path = Path(folder).expanduser().absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())
