"""Reports the bytes that a run stores on a drive, reads from it and writes to it. Written bytes matter because they
wear out the drive."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from lowmem.system.scratch_file import Drive
from lowmem.system.units import byte_size

WAYS = ("read", "written")

log = logging.getLogger(__name__)


def log_access(drive: Drive | None) -> None:
    """Logs the drive's folder, and whether files there are accessed with direct I/O or through the page cache. A no-op
    if `drive` is None."""
    if drive is None:
        return
    how = "direct I/O, which bypasses the page cache"
    if not drive.direct:
        how = (
            "buffered I/O, because the file system refuses direct I/O. The page cache uses host memory, and so does "
            "tmpfs"
        )
    log.info(f"weights.drive={drive.folder}: {how}. metrics.csv has the read and write rates.")


def figures(drive: Drive | None, rows: Iterable[Mapping], seconds: float | None) -> dict | None:
    """Returns the drive's figures for the summary; None without a drive or without a step. Figures per step are medians
    of all steps except the first, which creates the optimizer state. With a single step, they are that step's figures.

    Args:
        drive: the drive of the run; None: the run uses no drive.
        rows: rows of memory.csv.
        seconds: seconds per step; None if unknown.
    """
    if drive is None:
        return None
    columns = [f"drive_{name}" for name in ("bytes", *(f"{way}_bytes" for way in WAYS))]
    steps = [[row[column] for column in columns] for row in rows if "drive_bytes" in row and row["phase"] != "load"]
    if not steps:
        return None
    stored, *moved = zip(*steps, strict=True)
    moved = {way: median(sizes[1:] or sizes) for way, sizes in zip(WAYS, moved, strict=True)}
    return {
        "bytes": stored[-1],
        "direct": drive.direct,
        **{f"{way}_bytes_per_step": size for way, size in moved.items()},
        **{f"{way}_gb_per_second": size / seconds / 1e9 if seconds else None for way, size in moved.items()},
        "written_tb_per_1000_steps": 1000 * moved["written"] / 1e12,
    }


def lines(numbers: Mapping | None) -> Iterator[tuple[str, str]]:
    """Yields rows (name, value) for the table of results. `numbers` is the result of `figures`."""
    if numbers is None:
        return
    yield "on the drive", f"{byte_size(numbers['bytes'])}{'' if numbers['direct'] else ' (buffered)'}"
    for way in WAYS:
        yield f"  {way} per step", f"{byte_size(numbers[f'{way}_bytes_per_step'])}, {rate(numbers, way)}"
    yield "  written per 1,000 steps", f"{numbers['written_tb_per_1000_steps']:.3f} TB"


def rate(numbers: Mapping, way: str) -> str:
    """Returns the bytes per step divided by the seconds per step, as a text in GB/s; "- GB/s" if the time is not known.
    `numbers` is the result of `figures`, and `way` is "read" or "written"."""
    per_second = numbers[f"{way}_gb_per_second"]
    return "- GB/s" if per_second is None else f"{per_second:.2f} GB/s"
