"""Swaps masters and optimizer state (and with weights.drive_holds=all the blocks' 16-bit weights) to files on a drive.

The host steps each weight once per window, in an order that repeats. So neighbouring weights of a block share a swap
file, and one file of each kind is pinned (kept in memory) while the host thread steps its weights:

    previous file    being written        buffer is free once the write is done
    pinned file      tensors in memory    the host thread steps its weights
    next files       being read ahead     the order of the last step predicts them

    SwapFile     the tensors of a group of weights, and their file
    SwapFiles    all swap files of one kind; pins, reads ahead, writes, and limits the buffers
    OnDrive      the two kinds of a model: masters with optimizer state, and 16-bit weights

A tensor that is swapped out keeps its Python object, but its data becomes a read-only view of the memory-mapped file: a
checkpoint reads such a tensor from the drive. Reads and writes run in the drive's own threads
(`system/scratch_file.py`). The host thread of `link.py` pins files; a lock lets other threads ask for tensors.

With 8-bit state and bf16 weights with split masters this saves the host 4.03 of 6.03 bytes per parameter. Each step
reads 4.03 bytes per parameter and writes as much, which takes no extra time if the drive is faster than the host's
step, but wears the drive (docs/drive.md says how much). Source: Rajbhandari et al. 2021, arXiv 2104.07857, who move 12
to 16 bytes each way.
"""

import errno
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
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

BOUNCE = THREADS * PIECE  # bytes; size of the buffer for the first write of a file
PARTS = 4  # swap files per block, about: fewer need larger buffers; each takes two file descriptors
SMALL = 0.01  # share of a block's elements: its smallest weights up to this share stay in memory and are not swapped
BLOCK, WEIGHTS = "block", "weights"  # names of a block's 16-bit weights
MASTERS = ("master", "rest")  # names of the tensors that `HostWeight.master_tensors` returns

Key = tuple[str, str]  # (the weight's name, the tensor's name)


class Sizes(NamedTuple):
    """Sizes of the data on a drive, in bytes."""

    tensors: int = 0  # tensors on the drive instead of in host memory
    files: int = 0  # the files, which are padded to full pages
    room: int = 0  # host memory for buffers
    stepped: int = 0  # part of `files` that each step reads and writes: all except frozen weights
    masters: int = 0  # part of `tensors`: master weights, or their lower halves
    weights: int = 0  # part of `files`: 16-bit weights


def goes_to_drive(tensor: object) -> bool:
    """Returns True if a value of a weight's state is swapped: a tensor of at least one page. Numbers and small tensors
    stay in memory."""
    # a quantized tensor wraps several tensors
    if not isinstance(tensor, Tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.nbytes >= PAGE


class SwapFileEntry(NamedTuple):
    """The location of a tensor on the drive. Threads other than the host thread can read it."""

    file: ScratchFile
    start: int
    nbytes: int

    def read(self, start: int, into: Tensor) -> None:
        """Reads bytes of the tensor. Args: start: offset of the first byte; into: (bytes,), page-aligned; its last
        page is read in full."""
        with failures_told(self.file.drive):
            self.file.read(self.start + start, memoryview(into.numpy())).result()


class SwapFile:
    """The tensors of several weights of a block, or of one large weight outside the blocks, and their file. The data of
    each tensor is either in `memory` or a view of the memory-mapped file; the tensor objects stay the same.

    Args:
        drive: creates the file; None: only sizes are computed.
        single_weight: the file has one weight, so it is unpinned after that weight's step.
        stepped: each optimizer step changes the file.
    """

    def __init__(self, drive: Drive, single_weight: bool, stepped: bool) -> None:
        self.single_weight = single_weight
        self.stepped = stepped
        # File size in bytes, page-aligned. Page 0 stays empty, so that no tensor starts at the map's own address.
        self.drive, self.size = drive, PAGE
        self.memory: Tensor | None = None  # buffer (bytes,), while the file is pinned, being read or being written
        self._file: ScratchFile | None = None
        self._tensors: dict[Key, Tensor] = {}
        self._places: dict[Key, Span] = {}
        self._mapped: dict[Key, Tensor] = {}
        self.prefetched = False  # True: read ahead, or being read ahead, and not pinned yet
        self._moving: Moving | None = None
        self._bound = False  # True: the tensors' data is in `memory`

    def put(self, key: Key, tensor: Tensor) -> None:
        """Adds a tensor, or replaces the tensor of the same key by a tensor that an optimizer has created."""
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
        """Returns the size in bytes that the file needs for all tensors."""
        return self.size + sum(pages(t.nbytes) for key, t in self._tensors.items() if key not in self._places)

    def store(self, bounce: Tensor) -> None:
        """Writes tensors that are not in the file yet, one by one, and makes them views of the file. So the state that
        a first step creates needs no second copy in memory. Args: bounce: a page-aligned buffer. Raises: OSError."""
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
        """Memory-maps the file at its current size, once for all tensors, since each map takes a file descriptor."""
        file = self._file.mapped(self.size)
        with warnings.catch_warnings(action="ignore"):  # torch warns about read-only memory
            self._mapped = {key: _view(file, place) for key, place in self._places.items()}

    def start_reading(self, memory: Tensor) -> None:
        self.memory = memory
        self._moving = self._file.read(0, memoryview(memory.numpy())[: self.size])

    def start_writing(self) -> None:
        self._moving = self._file.write(0, memoryview(self.memory.numpy())[: self.size])

    def moving(self) -> bool:
        return self._moving is not None and not self._moving.done()

    def wait(self) -> None:
        """Waits until the read or write in progress is done. Raises: OSError."""
        moving, self._moving = self._moving, None  # an error is raised once
        if moving is not None:
            moving.result()

    def bind(self) -> None:
        """Points all tensors into `memory`, once the file has been read."""
        if self._bound or self.memory is None:
            return
        for key, place in self._places.items():
            self._tensors[key].data = _view(self.memory.numpy(), place)
        self._bound = True

    def leave(self) -> Tensor:
        """Makes all tensors views of the file. Returns: the buffer, which is free now."""
        for key in self._places if self._bound else ():
            self._tensors[key].data = self._mapped[key]
        memory, self.memory, self._bound = self.memory, None, False
        return memory

    def entry(self, key: Key) -> SwapFileEntry:
        """Waits for the write in progress. Returns: a tensor's location in the file. Raises: OSError."""
        self.wait()
        place = self._places[key]
        return SwapFileEntry(self._file, place.start, place.size)

    def tensors(self) -> list[Tensor]:
        return list(self._tensors.values())  # a copy, since another thread may add tensors

    @property
    def masters(self) -> int:
        """Returns the bytes of master weights."""
        return sum(tensor.nbytes for (_, name), tensor in self._tensors.items() if name in MASTERS)

    def mapped(self) -> Iterable[Tensor]:
        return self._mapped.values()

    def check(self) -> None:
        """Reads the whole file once. Raises: OSError: a read failed."""
        if self._file is not None:
            self._file.check()


class SwapFiles:
    """Swap files of one kind. One file is pinned; meanwhile the previous file is written, and the next files are read.

    Args:
        drive: stores the files; None: only `sizes` is used.
        ahead: number of files to read ahead.
    """

    def __init__(self, drive: Drive | None, ahead: int = 1) -> None:
        self.drive, self.ahead = drive, ahead
        self._lock = RLock()  # the host thread pins files while the training thread asks for weights
        self._every: list[SwapFile] = []
        self._now: SwapFile | None = None  # the pinned file
        self._last: SwapFile | None = None  # the file that was pinned last; it may still be pinned
        self._inside: list[SwapFile] = []  # files in memory, the oldest first
        self._spare: list[Tensor] = []  # free buffers, (bytes,) each
        self._follows: dict[SwapFile, SwapFile] = {}  # file -> the file that was pinned after it last time

    def new(self, single_weight: bool = False, stepped: bool = True) -> SwapFile:
        """Creates a swap file.

        Args:
            single_weight: the file is for one large weight; while it is pinned, no other file needs a buffer.
            stepped: each optimizer step changes the file.
        """
        self._every.append(swap_file := SwapFile(self.drive, single_weight, stepped))
        return swap_file

    def pin(self, swap_file: SwapFile) -> None:
        """Reads a swap file into memory and keeps it there until another file is pinned. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if swap_file is self._now:
                return
            self._unpin()
            if self._last is not None:
                self._follows[self._last] = swap_file
            self._now = self._last = swap_file
            if swap_file.single_weight:
                trim()  # returns freed heap memory to the system before the largest buffer is needed
            self._bring(swap_file, waits=True)
            swap_file.wait()
            swap_file.bind()
            following: SwapFile | None = swap_file
            for _ in range(self.ahead):
                following = self._follows.get(following)
                if following in (None, swap_file) or not self._bring(following, waits=False):
                    break

    def put(self, swap_file: SwapFile, weight: str, tensors: Mapping[str, object]) -> None:
        """Adds the tensors of a weight to its swap file, which is pinned. Args: weight: the weight's name; tensors: by
        name. Raises: DriveFailed."""
        with self._lock, host_side(), torch.no_grad():
            for name, tensor in tensors.items():
                if goes_to_drive(tensor):
                    swap_file.put((weight, name), tensor)
            if swap_file.single_weight and swap_file is self._now:
                with failures_told(self.drive):
                    self._unpin()

    def entry(self, swap_file: SwapFile, weight: str, name: str) -> SwapFileEntry:
        """Waits until a tensor's last update is written. Returns: its location on the drive. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if swap_file is self._now:
                self._unpin()
            return swap_file.entry((weight, name))

    def finish(self) -> None:
        """Waits until all files are written. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            self._unpin()
            for swap_file in self._inside:
                swap_file.wait()

    def check(self) -> None:
        """Reads all files once, since a read error of mapped memory would kill the process. Raises: DriveFailed: a file
        cannot be read."""
        with self._lock, failures_told(self.drive):
            for swap_file in self._every:
                swap_file.check()

    def drop_cached(self) -> None:
        """Drops pages of the mapped files that the operating system has cached."""
        for swap_file in self._every:
            page_out(swap_file.mapped())

    def memory(self) -> Iterator[Tensor]:
        """Yields all buffers, in use or free, (bytes,) each."""
        inside = (swap_file.memory for swap_file in [*self._inside])
        return (memory for memory in [*inside, *self._spare] if memory is not None)

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors of the swap files, swapped out or in memory."""
        return (tensor for swap_file in self._every for tensor in swap_file.tensors())

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes that the files have once each has been written."""
        sizes = {swap_file: swap_file.grown for swap_file in self._every if swap_file.tensors()}
        return Sizes(
            sum(tensor.nbytes for tensor in self.tensors()),
            sum(sizes.values()),
            self._room(sizes),
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
            if swap_file.memory is not None:  # its buffer is too small for the new tensors
                self._release(swap_file)
                self._spare.clear()
            with torch.no_grad():
                swap_file.store(torch.frombuffer(buffer(BOUNCE), dtype=torch.uint8))
            trim()  # in the first step, all optimizer state would otherwise stay in the heap as freed memory

    def _bring(self, swap_file: SwapFile, waits: bool) -> bool:
        """Starts to read a swap file, unless it is in memory already.

        Args:
            swap_file: the file.
            waits: wait until another file has been written and its buffer is free. If False, the file is read ahead
                only if there is room.

        Returns:
            False if there is no room.
        """
        if swap_file.size == PAGE:
            return True
        if swap_file not in self._inside:
            memory = self._memory(swap_file, waits)
            if memory is None:
                return False
            swap_file.start_reading(memory)
            self._inside.append(swap_file)
        swap_file.prefetched = not waits
        return True

    def _memory(self, swap_file: SwapFile, waits: bool) -> Tensor | None:
        """Returns a buffer for a swap file, after releasing other files, the oldest first. Args: waits: as in `_bring`.
        Returns: None: there is no room."""
        size = swap_file.size
        # No other buffers next to a large weight: its first step creates optimizer state that is not counted yet.
        room = size if swap_file.single_weight else self._room({other: other.size for other in self._every})
        while True:
            for number, spare in enumerate(self._spare):
                if spare.nbytes == size:
                    return self._spare.pop(number)
            if self._buffer_bytes() + size <= room:
                break
            leaves = (s for s in self._inside if s is not self._now and (waits or not (s.moving() or s.prefetched)))
            if self._spare:
                self._spare.pop()
            elif (oldest := next(leaves, None)) is not None:
                self._release(oldest)
            elif waits:
                break  # the file alone is larger than `room`
            else:
                return None
        return torch.frombuffer(buffer(size), dtype=torch.uint8)

    def _room(self, sizes: Mapping[SwapFile, int]) -> int:
        """Returns the largest total size of the buffers in bytes. Either one large weight has the only buffer, or there
        are buffers for neighbouring files: the file that is being written, the pinned file, and the files that are read
        ahead. Args: sizes: size of each file."""
        row = [size for swap_file, size in sizes.items() if not swap_file.single_weight]
        neighbours = (sum(row[first : first + self.ahead + 2]) for first in range(len(row)))
        return max(chain(neighbours, (size for swap_file, size in sizes.items() if swap_file.single_weight)), default=0)

    def _buffer_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory())

    def _release(self, swap_file: SwapFile) -> None:
        swap_file.wait()
        self._spare.append(swap_file.leave())
        self._inside.remove(swap_file)
        swap_file.prefetched = False


class OnDrive:
    """Stores masters and optimizer state of streamed weights on a drive.

    Args:
        drive: stores the files; None: only `sizes` is used.
        blocks: the streamed weights of each block.
        edges: large weights outside the blocks (embedding and head).
        weights_too: also store the blocks' 16-bit weights, one flat tensor per block.
    """

    def __init__(
        self, drive: Drive | None, blocks: Sequence[Sequence[Tensor]], edges: Iterable[Tensor], weights_too: bool
    ) -> None:
        self.drive = drive
        parts_of = [parts(block) for block in blocks]
        # the swap files of a block are pinned in quick succession, so read a full block ahead
        self._masters, self._weights = SwapFiles(drive, ahead=max(map(len, parts_of), default=1)), SwapFiles(drive)
        self._masters_of = {edge: self._masters.new(single_weight=True) for edge in edges}
        self._weights_of: dict[Tensor, SwapFile] = {}
        for block, divided in zip(blocks, parts_of, strict=True):
            for part in divided:
                self._masters_of |= dict.fromkeys(part, self._masters.new())
            if weights_too:
                trained = any(p.requires_grad for p in block)
                self._weights_of |= dict.fromkeys(block, self._weights.new(stepped=trained))

    def pin(self, p: Tensor) -> None:
        """Reads the swap files of a weight into memory, so that the host can step the weight. Raises: DriveFailed."""
        if p in self._weights_of:
            self._weights.pin(self._weights_of[p])
        if p in self._masters_of:
            self._masters.pin(self._masters_of[p])

    def put(self, p: Tensor, name: str, tensors: Mapping[str, object]) -> None:
        if p in self._masters_of:
            self._masters.put(self._masters_of[p], name, tensors)

    def put_weights(self, p: Tensor, flat: Tensor) -> None:
        """Adds the 16-bit weights of a block. Args: p: any weight of the block; flat: the buffer of its `HostBlock`.
        Raises: DriveFailed."""
        if self.drive is not None:
            self._weights.pin(self._weights_of[p])
        self._weights.put(self._weights_of[p], BLOCK, {WEIGHTS: flat})

    def weights(self, p: Tensor) -> SwapFileEntry:
        """Waits until a block's 16-bit weights are written. Args: p: any weight of the block. Returns: their location
        on the drive. Raises: DriveFailed."""
        return self._weights.entry(self._weights_of[p], BLOCK, WEIGHTS)

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
    """Divides the large weights of a block, in order, into groups that share a swap file. A group has at most as many
    elements as the largest weight, or as a quarter of the block if that is more."""
    ascending = sorted(block, key=Tensor.numel)
    up_to = accumulate(p.numel() for p in ascending)  # elements of a weight and of all smaller weights
    total = sum(p.numel() for p in block)
    small = {p for p, elements in zip(ascending, up_to, strict=True) if elements <= SMALL * total}
    large = [p for p in block if p not in small]
    room = max(ascending[-1].numel(), total // PARTS)
    divided: list[list[Tensor]] = [[]]
    for p in large:
        if divided[-1] and sum(q.numel() for q in divided[-1]) + p.numel() > room:
            divided.append([])
        divided[-1].append(p)
    return divided


@contextmanager
def failures_told(drive: Drive) -> Iterator[None]:
    """Converts an `OSError` of the drive into a `DriveFailed` with advice. Raises: DriveFailed."""
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
    """Returns a tensor in a buffer, with a separate storage, because `torch.save` writes full storages. Args: memory:
    an object with the buffer protocol; place: the tensor's location."""
    flat = torch.frombuffer(memory, dtype=place.dtype, count=place.shape.numel(), offset=place.start)
    return flat.view(place.shape)
