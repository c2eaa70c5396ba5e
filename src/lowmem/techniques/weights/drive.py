"""Stores on a drive what the host keeps of each block beside its 16-bit weights: masters and the optimizer's state.

The host needs them once per step, weight by weight, in an order that repeats. So a few neighbours in a block have a
file in common and are in memory for their turn alone: from the step of the first to that of the last. The next ones are
read meanwhile, and those before are written. Outside its turn a tensor is a view of its file: whoever reads it, as a
checkpoint does, reads the drive, and nobody can write to it.

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
from lowmem.system.errors import DriveFailed
from lowmem.system.process import OPEN_FILES, page_out, trim
from lowmem.system.scratch_file import PAGE, PIECE, THREADS, Drive, Moving, ScratchFile, buffer, pages
from lowmem.system.torch_private import is_traceable_wrapper_subclass
from lowmem.techniques.weights.resident import Place

BOUNCE = THREADS * PIECE  # bytes, through which a file is written for the first time
PARTS = 4  # of a block, about: with fewer more of it is in memory, and each part takes two file descriptors
SMALL = 32  # a weight with so many times fewer elements than its block's largest stays in memory: its turn costs more
BLOCK, WEIGHTS = "block", "weights"  # names of a block's 16-bit weights

Key = tuple[str, str]  # (the weight's name, the tensor's name)


class Sizes(NamedTuple):
    """Counts what a drive stores."""

    tensors: int = 0  # bytes that leave the host's memory
    files: int = 0  # the same in full pages
    room: int = 0  # bytes of memory for what is inside
    stepped: int = 0  # those of the files that a step reads and writes: all but frozen weights


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
    """The tensors of a part of a block, or of a large weight outside the blocks, and their file. A tensor keeps its
    identity; its data is in memory or a view of the file."""

    def __init__(self, drive: Drive, buffers: int, alone: bool, stepped: bool) -> None:
        self.buffers = buffers  # so many of its size may be in memory while it has its turn
        self.alone = alone  # True: it has one weight, so its turn ends with its step
        self.stepped = stepped
        # bytes, in full pages; the first one stays free, since storages are told apart by their address
        self.drive, self.size = drive, PAGE
        self.memory: Tensor | None = None  # (bytes,), during its turn, and while it is read or written
        self._file: ScratchFile | None = None
        self._tensors: dict[Key, Tensor] = {}
        self._places: dict[Key, Place] = {}
        self._mapped: dict[Key, Tensor] = {}
        self.early = False  # True: it was read, or is being read, before its turn
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
    """Shelves of a drive, which take turns in memory: while one is stepped, one is written, and some are read ahead.

    Args: drive: where they are; None: only `sizes` is read; ahead: how many are read before their turns.
    """

    def __init__(self, drive: Drive | None, ahead: int = 1) -> None:
        self.drive, self.ahead = drive, ahead
        self._lock = RLock()  # the thread that steps takes turns, and the training loop asks where weights are
        self._every: list[Shelf] = []
        self._now: Shelf | None = None  # whose turn it is
        self._last: Shelf | None = None  # whose turn it was last, or is
        self._inside: list[Shelf] = []  # those in memory, the oldest first
        self._spare: list[Tensor] = []  # free memory of shelves, (bytes,) each
        self._follows: dict[Shelf, Shelf] = {}  # which was next last time

    def new(self, alone: bool = False, stepped: bool = True) -> Shelf:
        """Returns a new shelf. Args: alone: of one large weight; in its turn there need be no room for others; stepped:
        each step changes it."""
        self._every.append(shelf := Shelf(self.drive, 1 if alone else self.ahead + 2, alone, stepped))
        return shelf

    def turn(self, shelf: Shelf) -> None:
        """Brings a shelf into memory, for as long as no other has its turn. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if shelf is self._now:
                return
            self._end_turn()
            if self._last is not None:
                self._follows[self._last] = shelf
            self._now = self._last = shelf
            if shelf.alone:
                trim()  # else the heap keeps what blocks have computed with, just when most memory is needed
            self._bring(shelf, waits=True)
            shelf.wait()
            shelf.bind()
            following: Shelf | None = shelf
            for _ in range(self.ahead):
                following = self._follows.get(following)
                if following in (None, shelf) or not self._bring(following, waits=False):
                    break

    def put(self, shelf: Shelf, weight: str, tensors: Mapping[str, object]) -> None:
        """Takes in tensors of a weight, in the turn of its shelf. Raises: DriveFailed."""
        with self._lock, host_side(), torch.no_grad():
            for name, tensor in tensors.items():
                if goes_to_drive(tensor):
                    shelf.put((weight, name), tensor)
            if shelf.alone and shelf is self._now:
                with failures_told(self.drive):
                    self._end_turn()

    def stored(self, shelf: Shelf, weight: str, name: str) -> Stored:
        """Returns where a tensor is on the drive, once it is there as it was last stepped. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            if shelf is self._now:
                self._end_turn()
            return shelf.stored((weight, name))

    def finish(self) -> None:
        """Returns when all of it is on the drive. Raises: DriveFailed."""
        with self._lock, failures_told(self.drive), host_side():
            self._end_turn()
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
        """Yields the memory of shelves that are inside, and spare memory, (bytes,) each."""
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
            max((shelf.buffers * size for shelf, size in sizes.items()), default=0),
            sum(size for shelf, size in sizes.items() if shelf.stepped),
        )

    # --- memory ---------------------------------------------------------------------------------------------------

    def _end_turn(self) -> None:
        """Starts to write the shelf whose turn ends."""
        shelf, self._now = self._now, None
        if shelf is None:
            return
        if shelf.memory is not None:
            shelf.start_writing()
        if shelf.grown > shelf.size:
            if shelf.memory is not None:  # it has no room for what is new
                self._release(shelf)
                self._spare.clear()
            with torch.no_grad():
                shelf.store(torch.frombuffer(buffer(BOUNCE), dtype=torch.uint8))
            trim()  # else the heap keeps what was freed: as much as all state in the first step

    def _bring(self, shelf: Shelf, waits: bool) -> bool:
        """Starts to read a shelf that is not in memory. Args: waits: until another one has left; else it is read ahead,
        if there is room. Returns: False if there is none."""
        if shelf.size == PAGE:
            return True
        if shelf not in self._inside:
            memory = self._memory(shelf, waits)
            if memory is None:
                return False
            shelf.start_reading(memory)
            self._inside.append(shelf)
        shelf.early = not waits
        return True

    def _memory(self, shelf: Shelf, waits: bool) -> Tensor | None:
        """Returns free memory for a shelf. Others that have been written leave for it, the oldest first."""
        size = shelf.size
        # No others beside a large weight: in its first step its state, which is not counted yet, is made beside it.
        room = size if shelf.alone else max(size, *(other.buffers * other.size for other in self._every))
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

    def _release(self, shelf: Shelf) -> None:
        shelf.wait()
        self._spare.append(shelf.leave())
        self._inside.remove(shelf)
        shelf.early = False


class OnDrive:
    """Stores on a drive what belongs to a model whose weights stream.

    Args: drive: None: only `sizes` is read; blocks: the weights of each that stream; edges: large weights outside the
    blocks; weights_too: it stores the blocks' 16-bit weights as well, each block's in one tensor.
    """

    def __init__(
        self, drive: Drive | None, blocks: Sequence[Sequence[Tensor]], edges: Iterable[Tensor], weights_too: bool
    ) -> None:
        self.drive = drive
        # a block's parts have their turns soon after one another, so all of the next block's are read ahead
        self._masters, self._weights = Shelves(drive, ahead=PARTS), Shelves(drive)
        self._masters_of = {edge: self._masters.new(alone=True) for edge in edges}
        self._weights_of: dict[Tensor, Shelf] = {}
        for block in blocks:
            for part in parts(block):
                self._masters_of |= dict.fromkeys(part, self._masters.new())
            if weights_too:
                trained = any(p.requires_grad for p in block)
                self._weights_of |= dict.fromkeys(block, self._weights.new(stepped=trained))

    def turn(self, p: Tensor) -> None:
        """Brings into memory what the host steps of a weight. Raises: DriveFailed."""
        if p in self._weights_of:
            self._weights.turn(self._weights_of[p])
        if p in self._masters_of:
            self._masters.turn(self._masters_of[p])

    def put(self, p: Tensor, name: str, tensors: Mapping[str, object]) -> None:
        if p in self._masters_of:
            self._masters.put(self._masters_of[p], name, tensors)

    def put_weights(self, p: Tensor, flat: Tensor) -> None:
        """Takes in the 16-bit weights of a block. Args: p: one of them. Raises: DriveFailed."""
        if self.drive is not None:
            self._weights.turn(self._weights_of[p])
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
        return Sizes(*map(sum, zip(self._masters.sizes, self._weights.sizes, strict=True)))


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


def _view(memory: object, place: Place) -> Tensor:
    """Returns a tensor in memory, with a storage of its own: a checkpoint writes full storages. Args: memory: an
    object with a buffer."""
    flat = torch.frombuffer(memory, dtype=place.dtype, count=place.shape.numel(), offset=place.start)
    return flat.view(place.shape)
