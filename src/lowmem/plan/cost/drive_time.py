"""Measures a drive's rates in a second, and stores them for a week, by file system.

If masters and optimizer state are on a drive (`offload/drive.py`), a step reads and writes all of them while
the host updates block after block. So an update takes at least as long as the drive. Rates of a drive that is not here,
or cannot be written to, are assumed, and the plan says so.
"""

from dataclasses import asdict, dataclass
from datetime import date
from functools import cache

from pydantic import ConfigDict

from lowmem.config.drives import FOLDER, existing
from lowmem.plan.cost.machine import RATES, Rate, cache_file, others_compute, store, stored
from lowmem.system.scratch_file import Drive


@dataclass(frozen=True)
class DriveRates:
    """Holds the rates of a drive, in bytes per second. Reads and writes share it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    read: Rate
    written: Rate
    measured_on: str | None = None  # a day; None: assumed, or others computed meanwhile, so they are not stored

    def seconds(self, read: int, written: int) -> float:
        """Returns the seconds in which so many bytes are read and written."""
        return read / self.read + written / self.written


ASSUMED = DriveRates(3.5e9, 1.5e9)  # what NVMe drives on four lanes of PCIe 4 sustain, once their cache is full


@cache
def drive_rates(folder: str) -> DriveRates:
    """Returns the rates of the drive with this folder: stored, measured now, or assumed."""
    if folder == FOLDER:
        return ASSUMED
    place = existing(folder)
    file = cache_file(f"drive-{RATES}-{place.stat().st_dev}")
    if (known := stored(DriveRates, file)) is not None:
        return known
    quiet = not others_compute("cpu")
    try:
        (drive := Drive(place)).file().close()
        read, written = drive.rates()
        drive.close()
    except OSError:  # the run itself would be refused, in this folder
        return ASSUMED
    if not quiet or others_compute("cpu"):
        return DriveRates(read, written)
    known = DriveRates(read, written, date.today().isoformat())
    store(asdict(known), file)
    return known
