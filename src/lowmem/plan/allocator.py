"""CUDA's caching allocator, as far as bytes go: what it reserves for a sequence of allocations.

Requests are rounded to 512 bytes. Those up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB, and
larger ones get a segment of their own, rounded to 2 MiB. A freed block is merged with its neighbours and used again,
best fit first; segments stay reserved. Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/CachingDeviceAllocator.h.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20
ROUND = 2 << 20


@dataclass(eq=False)
class Block:
    """A part of a segment; neighbours within the same segment, or None."""

    size: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """One stream's pools."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.allocated_peak = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # small or not -> by size

    def allocate(self, size: int) -> Block:
        size = -(-size // BLOCK) * BLOCK
        small = size <= SMALL
        block = self._best(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= BLOCK if small else rest > SMALL:
            tail = Block(rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = tail
            block.size, block.after = size, tail
            self._insert(tail)
        block.free = False
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        self.allocated -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            self._remove(before)
            block.size += before.size
            block.before = before.before
            if before.before is not None:
                before.before.after = block
        if after is not None and after.free:
            self._remove(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        self._insert(block)

    def _best(self, size: int, small: bool) -> Block | None:
        pool = self._free[small]
        at = bisect_left(pool, (size,))
        return pool.pop(at)[2] if at < len(pool) else None

    def _segment(self, size: int, small: bool) -> Block:
        total = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // ROUND) * ROUND
        self.reserved += total
        return Block(total, small)

    def _insert(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, id(block), block))

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, id(block)))]


def replay(events: Iterable[tuple[int, int]]) -> Allocator:
    """Args: events: (serial, bytes): + born, - died."""
    allocator, live = Allocator(), {}
    for serial, size in events:
        if size > 0:
            live[serial] = allocator.allocate(size)
        elif size < 0 and serial in live:
            allocator.release(live.pop(serial))
    return allocator
