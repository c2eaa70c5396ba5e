"""Implements memory.limit: the run ends with an out-of-memory error if it needs more device memory than this limit.

On CUDA this module caps the caching allocator. On a CPU `StorageTracker` sums the bytes of the live tensors of the
device side after every operator, and ends the run if the sum exceeds the limit. This sum does not include temporary
memory inside an operator.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

from lowmem.system.errors import Refused

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(limit: str | int | None, key: str = "memory.limit", plain: bool = True) -> int | None:
    """Converts a size such as '12GiB', '900MiB' or 12884901888 to bytes. Returns None if `limit` is None.

    Args:
        limit: the size.
        key: the setting that has this value, for the error message.
        plain: True: a number without a unit is accepted as bytes.

    Raises:
        Refused: the size does not have this format, is zero, or has no unit although `plain` is False.
    """
    if limit is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i)?(B?)", str(limit))
    if match is None or float(match[1]) <= 0 or not (plain or match[2] or match[3]):
        raise Refused(f"{key}={limit}: give a size such as 12GiB or 900MiB (GiB = 2**30 bytes).")
    return int(float(match[1]) * _UNITS[f"{match[2] or ''}B"])


@contextmanager
def capped(limit: int | None, device: str) -> Iterator[None]:
    """Context manager that caps CUDA's caching allocator. It does nothing without a limit. On a CPU it does nothing
    either, because `MemoryMeter` enforces the limit there.

    Args:
        limit: bytes.
        device: the type of the device, cpu or cuda.
    """
    if limit is None or device != "cuda":
        yield
        return
    import torch  # imported here, because parsing a size does not need torch

    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(_share(limit, total))
    try:
        yield
    finally:  # the cap applies to the process, and the next job of a sweep may have no limit
        torch.cuda.set_per_process_memory_fraction(1.0)


def _share(limit: int, total: int) -> float:
    """Returns `limit` as a fraction of the card's memory, or 1 if the limit exceeds the memory. torch multiplies the
    fraction by the memory and rounds down, and a cap that is one byte too small may prevent an allocation. So the
    fraction is rounded up if necessary."""
    share = min(1.0, limit / total)
    return share if int(share * total) >= limit else math.nextafter(share, 1.0)
