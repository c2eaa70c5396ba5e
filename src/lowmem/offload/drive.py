"""Stores on a drive what the host keeps of each block beside its 16-bit weights: masters and the optimizer's state.

The host needs them once per step, weight by weight, in an order that repeats. So neighbouring weights of a block share
a swap file, which is pinned (in memory) from the step of its first weight to that of its last. Meanwhile the next files
are read and the previous ones are written. A tensor whose file is not pinned is a read-only view of the file: a
checkpoint that reads it reads the drive.

With 8-bit state and bf16 masters it saves the host 4.03 of 6.03 bytes per parameter. It reads and writes so many per
step, which costs no time where the drive is faster than the host's step, and wears the drive: docs/drive.md says by how
much. Source: Rajbhandari et al. 2021, arXiv 2104.07857, who move 12 to 16 bytes each way.
"""

import errno
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.memory.tracker import host_side
from lowmem.offload.host_block import Span
from lowmem.system.errors import DriveFailed
from lowmem.system.process import OPEN_FILES, page_out, trim
from lowmem.system.scratch_file import PAGE, PIECE, THREADS, Drive, Moving, ScratchFile, buffer, pages
from lowmem.system.torch_private import is_traceable_wrapper_subclass

BOUNCE = THREADS * PIECE  # bytes, through which a file is written for the first time
PARTS = 4  # of a block, about: with fewer more of it is in memory, and each part takes two file descriptors
SMALL = 32  # weights this many times smaller than the block's largest stay in memory: swapping them costs more
BLOCK, WEIGHTS = "block", "weights"  # names of a block's 16-bit weights
MASTERS = ("master", "rest")  # names of what `HostWeight.master_tensors` returns

Key = tuple[str, str]  # (the weight's name, the tensor's name)


class Sizes(NamedTuple):
    """Counts what a drive stores."""

    tensors: int = 0  # bytes that leave the host's memory
    files: int = 0  # the same in full pages
    room: int = 0  # bytes of memory for what is inside
    stepped: int = 0  # bytes of the files that a step reads and writes: all except frozen weights
    masters: int = 0  # bytes of `tensors` that are master weights, or the lower halves of master weights
    weights: int = 0  # bytes of `files` that are 16-bit weights


def goes_to_drive(tensor: object) -> bool:
    """Returns whether something that belongs to a weight may leave memory: numbers and tables of some bytes stay."""
    if not isinstance(tensor, Tensor) or is_traceable_wrapper_subclass(tensor):  # a quantised one only wraps others
        return False
    return tensor.nbytes >= PAGE


class Stored(NamedTuple):
    """A tensor's bytes on the drive, for a reader beside the thread that steps."""

    file: ScratchFile
    start: int
    nbytes: int

    def read(self, start: int, into: Tensor) -> None:
        """Reads bytes from `start` on. Args: into: (bytes,), beginning at a page; its last page is read in full."""
        with failures_told(self.file.drive):
            self.file.read(self.start + start, memoryview(into.numpy())).result()


class SwapFile:
    """The tensors of a part of a block, or of a large weight outside the blocks, and their file. A tensor keeps its
    identity; its data is in memory or a view of the file."""

    def __init__(self, drive: Drive, buffers: int, alone: bool, stepped: bool) -> None:
        self.buffers = buffers  # swap files of its size that may be in memory while it is pinned
        self.alone = alone  # True: it has one weight, so it is unpinned after that weight's step
        self.stepped = stepped
        # File size in bytes, page-aligned. Page 0 stays empty, so that no tensor starts at the map's own address.
        self.drive, self.size = drive, PAGE
        self.memory: Tensor | None = None  # (bytes,), while it is pinned, read or written
        self._file: ScratchFile | None = None
        self._tensors: dict[Key, Tensor] = {}
        self._places: dict[Key, Span] = {}
        self._mapped: dict[Key, Tensor] = {}
        self.early = False  # True: it was read ahead, or is being read ahead
        self._moving: Moving | None = None
        self._bound = False  # True: the tensors' data is in `memory`

    def put(self, key: Key, tensor: Tensor) -> None:
        """Takes in a tensor, or what an optimizer has put in its place."""
        self._tensors[key], place = tensor, self._places.get(key)
        if place is None:
            return
        if (tensor.shape, tensor.dtype) != (place.shape, place.dtype):
            del self._places[key]
            self._mapped.pop(key, None)
        elif tensor.data_ptr() != (view := _view(self.memory.numpy(), place)).data_ptr():
            tensor.data = view.copy_(tensor)

    @property
    def grown(self) -> int:
        """Returns the size of a file that holds all tensors."""
        return self.size + sum(pages(t.nbytes) for key, t in self._tensors.items() if key not in self._places)

    def store(self, bounce: Tensor) -> None:
        """Writes the tensors that have no place in the file yet, one by one, and makes them views of it: so the tensors
        of a first step need no extra memory. Args: bounce: (full pages,). Raises: OSError."""
        if self._file is None:
            self._file = self.drive.file()
        new = {key: tensor for key, tensor in self._tensors.items() if key not in self._places}
        for key, tensor in new.items():
            self._places[key] = Span(self.size, tensor.shape, tensor.dtype)
            self.size += pages(tensor.nbytes)
        self._file.grow(self.size)
        self._map()
        for key in self._places.keys() - new.keys():
            self._tensors[key].data = self._mapped[key]
        for key, tensor in new.items():
            pieces = tensor.detach().reshape(-1).view(torch.uint8).split(bounce.numel())
            for number, piece in enumerate(pieces):
                bounce[: piece.numel()].copy_(piece)
                full = memoryview(bounce.numpy())[: pages(piece.numel())]
                self._file.write(self._places[key].start + number * bounce.numel(), full).result()
            tensor.data = self._mapped[key]

    def _map(self) -> None:
        """Maps the file as it is now: once, since each map takes a file descriptor."""
        file = self._file.mapped(self.size)
        with warnings.catch_warnings(action="ignore"):  # torch warns of memory that cannot be written to
            self._mapped = {key: _view(file, place) for key, place in self._places.items()}

    def start_reading(self, memory: Tensor) -> None:
        self.memory = memory
        self._moving = self._file.read(0, memoryview(memory.numpy())[: self.size])

    def start_writing(self) -> None:
        self._moving = self._file.write(0, memoryview(self.memory.numpy())[: self.size])

    def moving(self) -> bool:
        return self._moving is not None and not self._moving.done()

    def wait(self) -> None:
        """Returns when it has been read or written. Raises: OSError."""
        moving, self._moving = self._moving, None  # an error is raised once
        if moving is not None:
            moving.result()

    def bind(self) -> None:
        """Points all tensors into memory that has been read."""
        if self._bound or self.memory is None:
            return
        for key, place in self._places.items():
            self._tensors[key].data = _view(self.memory.numpy(), place)
        self._bound = True

    def leave(self) -> Tensor:
        """Makes all tensors views of the file. Returns: the memory, which is free now."""
        for key in self._places if self._bound else ():
            self._tensors[key].data = self._mapped[key]
        memory, self.memory, self._bound = self.memory, None, False
        return memory

    def stored(self, key: Key) -> Stored:
        """Returns where a tensor is in the file, once it has been written. Raises: OSError."""
        self.wait()
        place = self._places[key]
        return Stored(self._file, place.start, place.size)

    def tensors(self) -> list[Tensor]:
        return list(self._tensors.values())  # a list: another thread may ask

    @property
    def masters(self) -> int:
        """Returns the bytes of master weights."""
        return sum(tensor.nbytes for (_, name), tensor in self._tensors.items() if name in MASTERS)

    def mapped(self) -> Iterable[Tensor]:
        return self._mapped.values()

    def check(self) -> None:
        """Reads the file once. Raises: OSError: it cannot be read."""
        if self._file is not None:
            self._file.check()


class SwapFiles:
    """Swap files of a drive, one of which is pinned: meanwhile the previous one is written, and the next are read.

    Args: drive: where they are; None: only `sizes` is read; ahead: how many are read ahead.
    """

    def __init__(self, drive: Drive | None, ahead: int = 1) -> None:
        self.drive, self.ahead = drive, ahead
        self._lock = RLock()  # the host thread pins, and the training loop asks where weights are
        self._every: list[SwapFile] = []
        self._now: SwapFile | None = None  # the pinned one
        self._last: SwapFile | None = None  # the one that was pinned last, or is
        self._inside: list[SwapFile] = []  # those in memory, the oldest first
        self._spare: list[Tensor] = []  # free memory of swap_files, (bytes,) each
        self._follows: dict[SwapFile, SwapFile] = {}  # which was next last time

    def new(self, alone: bool = False, stepped: bool = True) -> SwapFile:
        """Returns a new swap file. Args: alone: of one large weight; while it is pinned there need be no room for
        others; stepped: each step changes it."""
        self._every.append(swap_file := SwapFile(self.drive, 1 if alone else self.ahead + 2, alone, stepped))
        return swap_file

    def pin(self, swap_file: SwapFile) -> None:
        """Reads a swap file into memory, until another one is pinned. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if swap_file is self._now:
                return
            self._unpin()
            if self._last is not None:
                self._follows[self._last] = swap_file
            self._now = self._last = swap_file
            if swap_file.alone:
                trim()  # else the heap keeps what blocks have computed with, just when most memory is needed
            self._bring(swap_file, waits=True)
            swap_file.wait()
            swap_file.bind()
            following: SwapFile | None = swap_file
            for _ in range(self.ahead):
                following = self._follows.get(following)
                if following in (None, swap_file) or not self._bring(following, waits=False):
                    break

    def put(self, swap_file: SwapFile, weight: str, tensors: Mapping[str, object]) -> None:
        """Takes in tensors of a weight whose swap file is pinned. Raises: DriveFailed."""
        with self._lock, host_side(), torch.no_grad():
            for name, tensor in tensors.items():
                if goes_to_drive(tensor):
                    swap_file.put((weight, name), tensor)
            if swap_file.alone and swap_file is self._now:
                with failures_told(self.drive):
                    self._unpin()

    def stored(self, swap_file: SwapFile, weight: str, name: str) -> Stored:
        """Returns where a tensor is on the drive, once it is there as it was last stepped. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if swap_file is self._now:
                self._unpin()
            return swap_file.stored((weight, name))

    def finish(self) -> None:
        """Returns when all of it is on the drive. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            self._unpin()
            for swap_file in self._inside:
                swap_file.wait()

    def check(self) -> None:
        """Reads all files once, before they are read as memory. Raises: DriveFailed: one cannot be read."""
        with self._lock, failures_told(self.drive):
            for swap_file in self._every:
                swap_file.check()

    def drop_cached(self) -> None:
        """Frees memory in which the system keeps what was read from files that were not pinned."""
        for swap_file in self._every:
            page_out(swap_file.mapped())

    def memory(self) -> Iterator[Tensor]:
        """Yields the memory of swap_files that are inside, and spare memory, (bytes,) each."""
        inside = (swap_file.memory for swap_file in [*self._inside])
        return (memory for memory in [*inside, *self._spare] if memory is not None)

    def tensors(self) -> Iterator[Tensor]:
        """Yields all that is stored on the drive, also while it is in memory."""
        return (tensor for swap_file in self._every for tensor in swap_file.tensors())

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of all that was put here, as if each file had been pinned once."""
        sizes = {swap_file: swap_file.grown for swap_file in self._every if swap_file.tensors()}
        return Sizes(
            sum(tensor.nbytes for tensor in self.tensors()),
            sum(sizes.values()),
            max((swap_file.buffers * size for swap_file, size in sizes.items()), default=0),
            sum(size for swap_file, size in sizes.items() if swap_file.stepped),
            sum(swap_file.masters for swap_file in self._every),
        )

    # --- memory ---------------------------------------------------------------------------------------------------

    def _unpin(self) -> None:
        """Starts to write the pinned swap file."""
        swap_file, self._now = self._now, None
        if swap_file is None:
            return
        if swap_file.memory is not None:
            swap_file.start_writing()
        if swap_file.grown > swap_file.size:
            if swap_file.memory is not None:  # it has no room for what is new
                self._release(swap_file)
                self._spare.clear()
            with torch.no_grad():
                swap_file.store(torch.frombuffer(buffer(BOUNCE), dtype=torch.uint8))
            trim()  # else the heap keeps what was freed: as much as all state in the first step

    def _bring(self, swap_file: SwapFile, waits: bool) -> bool:
        """Starts to read a swap file that is not in memory. Args: waits: until another one has left; else it is read
        ahead, if there is room. Returns: False if there is none."""
        if swap_file.size == PAGE:
            return True
        if swap_file not in self._inside:
            memory = self._memory(swap_file, waits)
            if memory is None:
                return False
            swap_file.start_reading(memory)
            self._inside.append(swap_file)
        swap_file.early = not waits
        return True

    def _memory(self, swap_file: SwapFile, waits: bool) -> Tensor | None:
        """Returns free memory for a swap file. Others that have been written leave for it, the oldest first."""
        size = swap_file.size
        # No others beside a large weight: in its first step its state, which is not counted yet, is made beside it.
        room = size if swap_file.alone else max(size, *(other.buffers * other.size for other in self._every))
        while self._taken() + size > room:
            leaves = (s for s in self._inside if s is not self._now and (waits or not (s.moving() or s.early)))
            if self._spare and self._spare[-1].nbytes == size:
                break
            if self._spare:
                self._spare.pop()
            elif (oldest := next(leaves, None)) is not None:
                self._release(oldest)
            elif waits:
                break  # it is larger than all that may be in memory
            else:
                return None
        if self._spare and self._spare[-1].nbytes == size:
            return self._spare.pop()
        return torch.frombuffer(buffer(size), dtype=torch.uint8)

    def _taken(self) -> int:
        return sum(memory.nbytes for memory in self.memory())

    def _release(self, swap_file: SwapFile) -> None:
        swap_file.wait()
        self._spare.append(swap_file.leave())
        self._inside.remove(swap_file)
        swap_file.early = False


class OnDrive:
    """Stores on a drive what belongs to a model whose weights stream.

    Args: drive: None: only `sizes` is read; blocks: the weights of each that stream; edges: large weights outside the
    blocks; weights_too: it stores the blocks' 16-bit weights as well, each block's in one tensor.
    """

    def __init__(
        self, drive: Drive | None, blocks: Sequence[Sequence[Tensor]], edges: Iterable[Tensor], weights_too: bool
    ) -> None:
        self.drive = drive
        # a block's parts are pinned soon after one another, so all of the next block's are read ahead
        self._masters, self._weights = SwapFiles(drive, ahead=PARTS), SwapFiles(drive)
        self._masters_of = {edge: self._masters.new(alone=True) for edge in edges}
        self._weights_of: dict[Tensor, SwapFile] = {}
        for block in blocks:
            for part in parts(block):
                self._masters_of |= dict.fromkeys(part, self._masters.new())
            if weights_too:
                trained = any(p.requires_grad for p in block)
                self._weights_of |= dict.fromkeys(block, self._weights.new(stepped=trained))

    def pin(self, p: Tensor) -> None:
        """Brings into memory what the host steps of a weight. Raises: DriveFailed."""
        if p in self._weights_of:
            self._weights.pin(self._weights_of[p])
        if p in self._masters_of:
            self._masters.pin(self._masters_of[p])

    def put(self, p: Tensor, name: str, tensors: Mapping[str, object]) -> None:
        if p in self._masters_of:
            self._masters.put(self._masters_of[p], name, tensors)

    def put_weights(self, p: Tensor, flat: Tensor) -> None:
        """Takes in the 16-bit weights of a block. Args: p: one of them. Raises: DriveFailed."""
        if self.drive is not None:
            self._weights.pin(self._weights_of[p])
        self._weights.put(self._weights_of[p], BLOCK, {WEIGHTS: flat})

    def weights(self, p: Tensor) -> Stored:
        """Returns where the 16-bit weights of a block are, once they are there as last stepped. Raises: DriveFailed."""
        return self._weights.stored(self._weights_of[p], BLOCK, WEIGHTS)

    def finish(self) -> None:
        self._masters.finish()
        self._weights.finish()

    def check(self) -> None:
        self._masters.check()
        self._weights.check()

    def drop_cached(self) -> None:
        self._masters.drop_cached()
        self._weights.drop_cached()

    def memory(self) -> Iterator[Tensor]:
        return chain(self._masters.memory(), self._weights.memory())

    def tensors(self) -> Iterator[Tensor]:
        return chain(self._masters.tensors(), self._weights.tensors())

    @property
    def sizes(self) -> Sizes:
        masters, weights = self._masters.sizes, self._weights.sizes
        both = Sizes(*map(sum, zip(masters, weights, strict=True)))
        return both._replace(weights=weights.files)


def parts(block: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divides the large weights of a block, in their order: a part is at most as large as the largest weight, or a
    quarter of the block."""
    largest = max(p.numel() for p in block)
    large = [p for p in block if SMALL * p.numel() >= largest]
    room = max(largest, sum(p.numel() for p in large) // PARTS)
    divided: list[list[Tensor]] = [[]]
    for p in large:
        if divided[-1] and sum(q.numel() for q in divided[-1]) + p.numel() > room:
            divided.append([])
        divided[-1].append(p)
    return divided


@contextmanager
def failures_told(drive: Drive) -> Iterator[None]:
    """Turns an error of the drive into a sentence. Raises: DriveFailed."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        instead = "a folder on a drive with more space" if full else "a folder on another drive"
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EFBIG):
            limit = "ulimit -f unlimited" if error.errno == errno.EFBIG else f"ulimit -n {OPEN_FILES}"
            raise DriveFailed(
                f"weights.drive={drive.folder}: this process reached a limit of the operating system ({why}). Type "
                f"{limit} before the command, or weights.drive=null to keep everything in host memory."
            ) from error
        raise DriveFailed(
            f"weights.drive={drive.folder}: reading or writing this drive failed ({why}). Type {instead}, or "
            "weights.drive=null to keep everything in host memory."
        ) from error


def _view(memory: object, place: Span) -> Tensor:
    """Returns a tensor in memory, with a storage of its own: a checkpoint writes full storages. Args: memory: an
    object with a buffer."""
    flat = torch.frombuffer(memory, dtype=place.dtype, count=place.shape.numel(), offset=place.start)
    return flat.view(place.shape)
