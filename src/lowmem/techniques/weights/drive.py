"""Stores on a drive what the host keeps of each block beside its 16-bit weights: masters and the optimizer's state.

The host needs them once per step, block by block, in an order that repeats. So each block has a file and is in memory
for its turn alone: from the step of its first weight to that of its last. The next block is read meanwhile, and the one
before is written. Outside its turn a tensor is a view of its file: whoever reads it, as a checkpoint does, reads the
drive, and nobody can write to it.

With 8-bit state and bf16 masters it saves the host 4.03 of 6.03 bytes per parameter. It reads and writes so many per
step, which costs no time where the drive is faster than the host's step, and wears the drive: docs/drive.md says by how
much. Source: Rajbhandari et al. 2021, arXiv 2104.07857, who move 12 to 16 bytes each way.
"""

import errno
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.memory.tracker import host_side
from lowmem.system.errors import DriveFailed
from lowmem.system.process import page_out, trim
from lowmem.system.scratch_file import PAGE, PIECE, THREADS, Drive, Moving, ScratchFile, buffer, pages
from lowmem.system.torch_private import is_traceable_wrapper_subclass
from lowmem.techniques.weights.resident import Place

BOUNCE = THREADS * PIECE  # bytes, through which a file is written for the first time
BUFFERS = 3  # blocks in memory: one is stepped, one is read and one is written

Key = tuple[str, str]  # (the weight's name, the tensor's name)


class Sizes(NamedTuple):
    """Counts what a drive stores."""

    tensors: int = 0  # bytes that leave the host's memory
    files: int = 0  # the same in full pages, all of which a step reads and writes
    room: int = 0  # bytes of memory for what is inside


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


class Shelf:
    """The tensors of one block, or of a large weight outside the blocks, and their file. A tensor keeps its identity;
    its data is in memory or a view of the file."""

    def __init__(self, drive: Drive, of_block: bool) -> None:
        self.of_block = of_block
        # bytes, in full pages; the first one stays free, since storages are told apart by their address
        self.drive, self.size = drive, PAGE
        self.memory: Tensor | None = None  # (bytes,), during the block's turn, and while it is read or written
        self._file: ScratchFile | None = None
        self._tensors: dict[Key, Tensor] = {}
        self._places: dict[Key, Place] = {}
        self._mapped: dict[Key, Tensor] = {}
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

    def room(self, size: int) -> int:
        """Returns the memory that shelves take while this one, of `size` bytes, has its turn."""
        return BUFFERS * size if self.of_block else size

    def store(self, bounce: Tensor) -> None:
        """Writes the tensors that have no place in the file yet, one by one, and makes them views of it: so those of a
        first step need no memory beside their own. Args: bounce: (full pages,). Raises: OSError."""
        if self._file is None:
            self._file = self.drive.file()
        new = {key: tensor for key, tensor in self._tensors.items() if key not in self._places}
        for key, tensor in new.items():
            self._places[key] = Place(self.size, tensor.shape, tensor.dtype)
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

    def mapped(self) -> Iterable[Tensor]:
        return self._mapped.values()

    def check(self) -> None:
        """Reads the file once. Raises: OSError: it cannot be read."""
        if self._file is not None:
            self._file.check()


class Shelves:
    """The blocks of a drive.

    Args: drive: where they are; None: only `sizes` is read.
    """

    def __init__(self, drive: Drive | None) -> None:
        self.drive = drive
        self._lock = RLock()  # the thread that steps takes turns, and the training loop asks where weights are
        self._every: list[Shelf] = []
        self._now: Shelf | None = None  # whose turn it is
        self._inside: list[Shelf] = []  # those in memory, the oldest first
        self._spare: list[Tensor] = []  # free memory of blocks, (bytes,) each
        self._follows: dict[Shelf, Shelf] = {}  # which was next last time

    def new(self, of_block: bool = True) -> Shelf:
        self._every.append(shelf := Shelf(self.drive, of_block))
        return shelf

    def turn(self, shelf: Shelf) -> None:
        """Brings a block into memory, for as long as no other has its turn. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if shelf is self._now:
                return
            self._end_turn(shelf)
            self._now = shelf
            self._bring(shelf, waits=True)
            shelf.wait()
            shelf.bind()
            if (following := self._follows.get(shelf)) is not None:
                self._bring(following, waits=False)

    def put(self, shelf: Shelf, weight: str, tensors: Mapping[str, object]) -> None:
        """Takes in tensors of a weight, in the turn of its block."""
        with self._lock, host_side(), torch.no_grad():
            for name, tensor in tensors.items():
                if goes_to_drive(tensor):
                    shelf.put((weight, name), tensor)

    def stored(self, shelf: Shelf, weight: str, name: str) -> Stored:
        """Returns where a tensor is on the drive, once it is there as it was last stepped. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if shelf is self._now:
                self._end_turn(None)
            return shelf.stored((weight, name))

    def finish(self) -> None:
        """Returns when all of it is on the drive. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            self._end_turn(None)
            for shelf in self._inside:
                shelf.wait()

    def check(self) -> None:
        """Reads all files once, before they are read as memory. Raises: DriveFailed: one cannot be read."""
        with self._lock, failures_told(self.drive):
            for shelf in self._every:
                shelf.check()

    def drop_cached(self) -> None:
        """Frees memory in which the system keeps what was read outside of turns."""
        for shelf in self._every:
            page_out(shelf.mapped())

    def memory(self) -> Iterator[Tensor]:
        """Yields the memory of blocks that are inside, and spare memory, (bytes,) each."""
        inside = (shelf.memory for shelf in [*self._inside])
        return (memory for memory in [*inside, *self._spare] if memory is not None)

    def tensors(self) -> Iterator[Tensor]:
        """Yields all that is stored on the drive, also while it is in memory."""
        return (tensor for shelf in self._every for tensor in shelf.tensors())

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of all that was put here, as if each had had its turn."""
        sizes = {shelf: shelf.grown for shelf in self._every if shelf.tensors()}
        return Sizes(
            sum(tensor.nbytes for tensor in self.tensors()),
            sum(sizes.values()),
            max((shelf.room(size) for shelf, size in sizes.items()), default=0),
        )

    # --- memory ---------------------------------------------------------------------------------------------------

    def _end_turn(self, following: Shelf | None) -> None:
        """Starts to write the block whose turn ends."""
        shelf, self._now = self._now, None
        if shelf is None:
            return
        if following is not None:
            self._follows[shelf] = following
        if shelf.memory is not None:
            shelf.start_writing()
        if shelf.grown > shelf.size:
            if shelf.memory is not None:  # it has no room for what is new
                self._release(shelf)
                self._spare.clear()
            with torch.no_grad():
                shelf.store(torch.frombuffer(buffer(BOUNCE), dtype=torch.uint8))
            trim()  # else the heap keeps what was freed: as much as all state in the first step

    def _bring(self, shelf: Shelf, waits: bool) -> None:
        """Starts to read a block that is not in memory. Args: waits: until another one has left; else it is read if
        there is room."""
        if shelf in self._inside or shelf.size == PAGE:
            return
        memory = self._memory(shelf.size, waits)
        if memory is not None:
            shelf.start_reading(memory)
            self._inside.append(shelf)

    def _memory(self, size: int, waits: bool) -> Tensor | None:
        """Returns free memory of a size. Blocks that have been written leave for it, the oldest first."""
        room = max(size, *(shelf.room(shelf.size) for shelf in self._every))
        while self._taken() + size > room:
            leaves = (s for s in self._inside if s is not self._now and (waits or not s.moving()))
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

    def _release(self, shelf: Shelf) -> None:
        shelf.wait()
        self._spare.append(shelf.leave())
        self._inside.remove(shelf)


@contextmanager
def failures_told(drive: Drive) -> Iterator[None]:
    """Turns an error of the drive into a sentence. Raises: DriveFailed."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        instead = "a folder of a drive with more room" if full else "a folder of another drive"
        raise DriveFailed(
            f"weights.drive={drive.folder}: this drive failed ({why}). Type {instead}, or weights.drive=null to keep "
            "everything in memory."
        ) from error


def _view(memory: object, place: Place) -> Tensor:
    """Returns a tensor in memory, with a storage of its own: a checkpoint writes full storages. Args: memory: an
    object with a buffer."""
    flat = torch.frombuffer(memory, dtype=place.dtype, count=place.shape.numel(), offset=place.start)
    return flat.view(place.shape)
