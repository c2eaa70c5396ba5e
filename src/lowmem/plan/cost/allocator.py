"""Simulates torch's caching allocator for CUDA, to predict how many bytes the allocator reserves for a sequence of
allocations. `prediction.py` replays the allocations of a traced run.

    request, rounded up to 512 B    a new segment for it
    up to 1 MiB                     2 MiB, in the pool of small blocks
    below 10 MiB                    20 MiB, in the pool of large blocks
    10 MiB or more                  the request rounded up to 2 MiB, in the pool of large blocks

A freed block is merged with adjacent free blocks and can be reused. A request takes the smallest free block of its pool
that is large enough, and among blocks of equal size the block with the lowest address. Segments stay reserved until the
card is full. Then the allocator releases all unused segments and tries the request again, before it raises an
out-of-memory error. So two numbers are predicted: the bytes that are reserved if the card has enough room, and the
smallest limit with which all requests succeed. Source: `malloc`, `get_free_block`, `alloc_block` and
`release_cached_blocks` in c10/cuda/CUDACachingAllocator.cpp, and c10/core/CachingDeviceAllocator.h.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

BLOCK = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20
ROUND = 2 << 20


@dataclass(eq=False)
class Block:
    """A block of a segment. `before` and `after` are the adjacent blocks; None at the ends of the segment."""

    size: int
    small: bool
    address: int
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class Full(Exception):
    """A request exceeds the limit, even after all unused segments have been released."""


class Allocator:
    """Simulates the memory pools of one CUDA stream. Args: limit: maximum reserved bytes; None: unlimited."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.reserved_peak = self.allocated = self.allocated_peak = 0
        self._end = 0  # end of the newest segment; addresses of released segments are not reused
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # is small -> sorted free blocks

    def allocate(self, size: int) -> Block:
        size = -(-size // BLOCK) * BLOCK
        small = size <= SMALL
        block = self._best(size, small) or self._segment(size, small)
        rest = block.size - size
        if rest >= BLOCK if small else rest > SMALL:
            tail = Block(rest, small, block.address + size, before=block, after=block.after)
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
            block.address, block.before = before.address, before.before
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
        if self.limit is not None and self.reserved + total > self.limit:
            self._give_back()
            if self.reserved + total > self.limit:
                raise Full
        self.reserved += total
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self._end += total
        return Block(total, small, self._end - total)

    def _give_back(self) -> None:
        """Releases all unused segments. A segment is unused if a single free block, without adjacent blocks, fills
        it."""
        for small, pool in self._free.items():
            in_use = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]
            self.reserved -= sum(size for size, *_ in pool) - sum(size for size, *_ in in_use)
            self._free[small] = in_use

    def _insert(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]


def replay(events: Iterable[tuple[Hashable, int]], limit: int | None = None) -> Allocator:
    """Simulates a sequence of allocations and releases, and returns the allocator.

    Args:
        events: (serial number of a storage, bytes). The bytes are positive for an allocation, and negative for a
            release.
        limit: maximum reserved bytes; None: unlimited.

    Raises:
        Full: `limit` is too small.
    """
    allocator, live = Allocator(limit), {}
    for serial, size in events:
        if size > 0:
            live[serial] = allocator.allocate(size)
        elif size < 0 and serial in live:
            allocator.release(live.pop(serial))
    return allocator


def from_the_start(
    events: Sequence[tuple[int, int]], existing: int, weights: int, workspaces: Mapping[int, int]
) -> list[tuple[Hashable, int]]:
    """Returns the events of a run from its start:

    1. allocations of the weights
    2. events of the first window: tensors that the window creates and frees, and cuBLAS workspaces
    3. allocations of the other tensors that exist before a later window, such as optimizer state
    4. events of this later window

    The first window allocates memory that is never freed: cuBLAS workspaces during its passes, and optimizer state
    during its update. These allocations fragment the memory: the tensors of later windows must fit into the gaps
    between them. Without the first window, the predicted smallest limits of six recipes on an H200 were up to 7 % too
    small. benchmarks/results/h200.md has the errors with the first window.

    Args:
        events: the events of a later window.
        existing: number of leading events that allocate tensors that exist before the window. The weights come first.
        weights: bytes of the weights.
        workspaces: index in `events[existing:]` -> bytes of a workspace that is allocated just before this event.
    """
    window, end, total = events[existing:], 0, 0
    while end < existing and total < weights:
        total, end = total + events[end][1], end + 1
    born, died = ({serial for serial, size in window if sign * size > 0} for sign in (1, -1))
    first = []
    for number, (serial, size) in enumerate(window):
        if number in workspaces:
            first.append((("workspace", number), workspaces[number]))
        if serial in born and serial in died:
            first.append((("first", serial), size))
    return [*events[:end], *first, *events[end:existing], *window]


def smallest_limit(events: Sequence[tuple[Hashable, int]], free: Allocator | None = None) -> int:
    """Returns the smallest limit of reserved bytes, among multiples of 2 MiB, with which all allocations succeed. Args:
    events: see `replay`; free: the result of `replay(events)`; None: it is computed here."""
    free = free or replay(events)
    fails, works = free.allocated_peak // ROUND - 1, -(-free.reserved_peak // ROUND)  # numbers of 2 MiB units
    while works - fails > 1:
        middle = (fails + works) // 2
        try:
            replay(events, middle * ROUND)
            works = middle
        except Full:
            fails = middle
    return works * ROUND
