"""Implements memory.limit: a run trains as if the card had that much memory, and stops where it would have run out.

On CUDA the allocator is capped. On a CPU the tracker counts the live tensors of the device side at every operator and
ends the run when they exceed the limit; scratch memory inside an operator is not counted.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

from lowmem.system.errors import Refused

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(limit: str | int | None, key: str = "memory.limit", plain: bool = True) -> int | None:
    """Returns the bytes of '12GiB', '900MiB' or a number.

    Args:
        key: the key that the user typed; plain: accept a number without a unit as bytes.

    Raises:
        Refused: another form.
    """
    if limit is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i)?(B?)", str(limit))
    if match is None or float(match[1]) <= 0 or not (plain or match[2] or match[3]):
        raise Refused(f"{key}={limit}: give a size such as 12GiB or 900MiB (GiB = 2**30 bytes).")
    return int(float(match[1]) * _UNITS[f"{match[2] or ''}B"])


@contextmanager
def capped(limit: int | None, device: str) -> Iterator[None]:
    """Caps CUDA's allocator inside the `with`; on a CPU the meter enforces the limit."""
    if limit is None or device != "cuda":
        yield
        return
    import torch  # not above: sizes are parsed before it is needed

    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(_share(limit, total))
    try:
        yield
    finally:  # the cap is the process's, and the next job of a sweep may have none
        torch.cuda.set_per_process_memory_fraction(1.0)


def _share(limit: int, total: int) -> float:
    """Returns the share of a card that torch converts back to at least `limit` bytes: it rounds down, and a byte less
    can cost a segment."""
    share = min(1.0, limit / total)
    return share if int(share * total) >= limit else math.nextafter(share, 1.0)
