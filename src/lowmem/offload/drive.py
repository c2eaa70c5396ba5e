"""Swaps masters and optimizer state between host memory and files on a drive, for `StreamedWeights` (`streamed.py`).

With weights.drive_holds=all the streamed weights of the blocks (16-bit, or packed 4-bit) are stored on the drive, too.
This module calls them "16-bit weights" in both cases. There are two kinds of swap files: masters with optimizer state,
and 16-bit weights. The host updates each trained weight once per window, usually in the same order as in the previous
window, so adjacent weights of a block share a swap file. In this module a swap file is "pinned" while its tensors must
stay in memory. At most one swap file of each kind is pinned at a time. While the host updates its weights:

    previous file    being written        its buffer is reused once the write is complete
    pinned file      tensors in memory    the host updates the weights of this file
    next files       being read ahead     predicted: the files that followed the pinned file last time

    SwapFile     the tensors of a group of weights, and their file
    SwapFiles    all swap files of one kind; pins, reads and writes the files, and limits the memory for buffers
    OnDrive      the swap files of a model, of both kinds: masters with optimizer state, and 16-bit weights

A tensor that is swapped out keeps its Python object, but its data becomes a read-only view of the memory-mapped file. A
checkpoint reads swapped tensors from the drive through this view. Before a checkpoint, `check` reads all files in the
calling thread. All other reads and writes run in the threads of the `Drive` (`system/scratch_file.py`). During training
on a card the host thread of `link.py` pins the swap files. The threads that run forward and backward passes look up the
16-bit weights of blocks in the swap files, so each `SwapFiles` has a lock.

With 8-bit optimizer state and split masters (bf16), a streamed parameter takes 6.03 bytes. With
weights.drive_holds=state the drive stores 4.03 of them, and each optimizer step reads 4.03 bytes per parameter and
writes 4.03 bytes. These accesses take no extra time if reading and writing a swap file takes no longer than the update
of its weights, but writing wears the drive (docs/drive.md says how much). Source: Rajbhandari et al. 2021, arXiv
2104.07857, who move 12 to 16 bytes per parameter in each direction.
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

BOUNCE = THREADS * PIECE  # bytes; size of the buffer through which new tensors are written to a file
# Approximate number of swap files for the masters and optimizer state of a block. Fewer files need larger buffers, and
# more files need more file descriptors (two per file).
PARTS = 4
# The smallest weights of a block, which together have at most this share of the block's elements, have no swap file:
# their masters and optimizer state stay in memory. (`parts` also leaves out weights whose fp32 master is smaller than a
# page.)
SMALL = 0.01
BLOCK, WEIGHTS = "block", "weights"  # (BLOCK, WEIGHTS) is the `Key` of a block's 16-bit weights
MASTERS = ("master", "rest")  # names of the tensors that `HostWeight.master_tensors` returns

Key = tuple[str, str]  # (the weight's name, the tensor's name), such as ("lm_head.weight", "master")


class Sizes(NamedTuple):
    """Sizes of the data on a drive, in bytes."""

    tensors: int = 0  # tensors that are on the drive instead of in host memory
    files: int = 0  # the files; each tensor in a file is padded to full pages
    room: int = 0  # memory limit of the buffers (`SwapFiles._room`), summed over both kinds of files in `OnDrive.sizes`
    # part of `files` that each optimizer step reads and writes: all files except the weights of blocks whose streamed
    # weights are all frozen
    stepped: int = 0
    masters: int = 0  # part of `tensors`: masters, or their lower halves
    weights: int = 0  # part of `files`: 16-bit weights of blocks


def goes_to_drive(tensor: object) -> bool:
    """Returns True if an object is a plain tensor of at least one page. Smaller tensors, quantized tensors and values
    that are not tensors stay in memory."""
    # a quantized tensor wraps several tensors
    if not isinstance(tensor, Tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.nbytes >= PAGE


class SwapFileEntry(NamedTuple):
    """The location of a tensor on the drive: `nbytes` bytes from offset `start` in a file. `Registered` copies the
    tensor to the device. Any thread may call `read`."""

    file: ScratchFile
    start: int
    nbytes: int

    def read(self, start: int, into: Tensor) -> None:
        """Reads bytes of the tensor into a buffer.

        Args:
            start: offset of the first byte in the tensor, a multiple of the page size.
            into: (bytes,), page-aligned; its size is a multiple of the page size, since the last page is read in full.

        Raises:
            DriveFailed: the read failed.
        """
        with failures_told(self.file.drive):
            self.file.read(self.start + start, memoryview(into.numpy())).result()


class SwapFile:
    """Some tensors, and the file to which they are swapped. The tensors are either the 16-bit weights of a block, as
    one flat tensor, or masters and optimizer state: of some weights of a block, or of one large weight outside the
    blocks. Once `store` has written a tensor, the tensor's data is a view either of the buffer `memory` or of the
    memory-mapped file. Swapping changes only the data, so the Python object of a tensor stays valid.

    Args:
        drive: creates the file. If None, only sizes are computed.
        single_weight: True: the file is for one large weight, so the file is unpinned as soon as this weight has been
            updated.
        stepped: True: each optimizer step changes the file.
        ahead: maximum number of files to read ahead while this file is pinned.
    """

    def __init__(self, drive: Drive, single_weight: bool, stepped: bool, ahead: int) -> None:
        self.single_weight, self.ahead = single_weight, ahead
        self.stepped = stepped
        # `size` is the file size in bytes, page-aligned. Tensors start at page 1, so `size` is PAGE until `store` has
        # written a tensor.
        self.drive, self.size = drive, PAGE
        # (bytes,): buffer for the contents of the file, from the start of a read until `leave`; None: no buffer
        self.memory: Tensor | None = None
        self._file: ScratchFile | None = None
        self._tensors: dict[Key, Tensor] = {}
        self._places: dict[Key, Span] = {}
        self._mapped: dict[Key, Tensor] = {}
        self.prefetched = False  # True: the file has been read ahead, or is being read ahead, and is not pinned yet
        self._moving: Moving | None = None
        self._bound = False  # True: the tensors are views of `memory`

    def put(self, key: Key, tensor: Tensor) -> None:
        """Adds a tensor, or replaces the tensor that has this key, for example after the optimizer has created a new
        tensor. If the file already has a place for a tensor with this key, shape and dtype, the tensor is copied into
        `memory`, unless it already is a view of that place. Otherwise the next `store` writes the tensor."""
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
        """Returns the size in bytes that the file needs for all tensors, including tensors that `store` has not written
        yet."""
        return self.size + sum(pages(t.nbytes) for key, t in self._tensors.items() if key not in self._places)

    def store(self, bounce: Tensor) -> None:
        """Writes the tensors that are not in the file yet, and makes all tensors views of the memory-mapped file. The
        tensors are written one by one through a small buffer, so the optimizer state that the first step creates needs
        no second copy in memory.

        Args:
            bounce: (bytes,), a page-aligned buffer of full pages.

        Raises:
            OSError: the file cannot be created, extended, mapped or written.
        """
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
        """Memory-maps the file at its current size. All tensors share one map, since each map takes a file
        descriptor."""
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
        """Waits until the read or write in progress is complete. Raises: OSError: the read or write failed."""
        moving, self._moving = self._moving, None  # cleared first: a later call must not raise the same error
        if moving is not None:
            moving.result()

    def bind(self) -> None:
        """Makes all tensors of the file views of `memory`. A no-op if there is no buffer, or if the tensors already are
        such views. Call this method after the file has been read."""
        if self._bound or self.memory is None:
            return
        for key, place in self._places.items():
            self._tensors[key].data = _view(self.memory.numpy(), place)
        self._bound = True

    def leave(self) -> Tensor:
        """Makes all tensors of the file views of the memory map, and returns the buffer, which is then unused."""
        for key in self._places if self._bound else ():
            self._tensors[key].data = self._mapped[key]
        memory, self.memory, self._bound = self.memory, None, False
        return memory

    def entry(self, key: Key) -> SwapFileEntry:
        """Waits for the read or write in progress, and returns a tensor's location in the file. Raises: OSError: the
        read or write failed."""
        self.wait()
        place = self._places[key]
        return SwapFileEntry(self._file, place.start, place.size)

    def tensors(self) -> list[Tensor]:
        return list(self._tensors.values())  # a copy, since another thread may add tensors

    @property
    def masters(self) -> int:
        """Returns the size in bytes of the masters, or of their lower halves."""
        return sum(tensor.nbytes for (_, name), tensor in self._tensors.items() if name in MASTERS)

    def mapped(self) -> Iterable[Tensor]:
        return self._mapped.values()

    def check(self) -> None:
        """Reads the full file once. Raises: OSError: a read failed."""
        if self._file is not None:
            self._file.check()


class SwapFiles:
    """Swap files of one kind. While one file is pinned, the previous file is written and the next files are read.

    Args:
        drive: stores the files. If None, nothing is stored: `new` and `put` only collect the tensors for `sizes`.
    """

    def __init__(self, drive: Drive | None) -> None:
        self.drive = drive
        self._lock = RLock()  # the host thread pins files while other threads look up 16-bit weights
        self._every: list[SwapFile] = []
        self._now: SwapFile | None = None  # the pinned file
        self._last: SwapFile | None = None  # the most recently pinned file, which may still be pinned
        self._inside: list[SwapFile] = []  # files that have a buffer in memory, the oldest first
        self._spare: list[Tensor] = []  # unused buffers, (bytes,) each
        self._follows: dict[SwapFile, SwapFile] = {}  # file -> the file that was pinned after it last time

    def new(self, single_weight: bool = False, stepped: bool = True, ahead: int = 1) -> SwapFile:
        """Creates a swap file.

        Args:
            single_weight, stepped, ahead: see `SwapFile`.
        """
        self._every.append(swap_file := SwapFile(self.drive, single_weight, stepped, ahead))
        return swap_file

    def pin(self, swap_file: SwapFile) -> None:
        """Reads a swap file into memory, pins it, and starts to read the next files. Pinning a file unpins the file
        that was pinned before. Raises: DriveFailed: a read or write failed."""
        with self._lock, failures_told(self.drive), host_side():
            if swap_file is self._now:
                return
            self._unpin()
            if self._last is not None:
                self._follows[self._last] = swap_file
            self._now = self._last = swap_file
            if swap_file.single_weight:
                trim()  # return freed heap memory to the operating system before the largest buffer is allocated
            self._bring(swap_file, waits=True)
            swap_file.wait()
            swap_file.bind()
            following: SwapFile | None = swap_file
            for _ in range(swap_file.ahead):
                following = self._follows.get(following)
                if following in (None, swap_file) or not self._bring(following, waits=False):
                    break

    def put(self, swap_file: SwapFile, weight: str, tensors: Mapping[str, object]) -> None:
        """Adds the tensors of a weight to its swap file. Then unpins the swap file if it is for a single weight.

        Args:
            swap_file: the weight's swap file. It must be pinned, unless there is no drive and only sizes are computed.
            weight: the weight's name, or BLOCK for the 16-bit weights of a block.
            tensors: name -> tensor. Values for which `goes_to_drive` returns False are ignored: they stay in memory.

        Raises:
            DriveFailed: a read or write failed.
        """
        with self._lock, host_side(), torch.no_grad():
            for name, tensor in tensors.items():
                if goes_to_drive(tensor):
                    swap_file.put((weight, name), tensor)
            if swap_file.single_weight and swap_file is self._now:
                with failures_told(self.drive):
                    self._unpin()

    def entry(self, swap_file: SwapFile, weight: str, name: str) -> SwapFileEntry:
        """Returns a tensor's location on the drive, after its last update has been written. Unpins the tensor's swap
        file if it is pinned. Raises: DriveFailed: a read or write failed."""
        with self._lock, failures_told(self.drive), host_side():
            if swap_file is self._now:
                self._unpin()
            return swap_file.entry((weight, name))

    def finish(self) -> None:
        """Unpins the pinned file, and waits until all files are written. Raises: DriveFailed: a read or write
        failed."""
        with self._lock, failures_told(self.drive), host_side():
            self._unpin()
            for swap_file in self._inside:
                swap_file.wait()

    def check(self) -> None:
        """Reads all files once. Call this method before a checkpoint reads the memory-mapped files: a read error in
        mapped memory would kill the process. Raises: DriveFailed: a file cannot be read."""
        with self._lock, failures_told(self.drive):
            for swap_file in self._every:
                swap_file.check()

    def drop_cached(self) -> None:
        """Evicts the pages of the mapped files from host memory."""
        for swap_file in self._every:
            page_out(swap_file.mapped())

    def memory(self) -> Iterator[Tensor]:
        """Yields all buffers, in use or free, (bytes,) each."""
        inside = (swap_file.memory for swap_file in [*self._inside])
        return (memory for memory in [*inside, *self._spare] if memory is not None)

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors of the swap files, whether they are swapped out or in memory."""
        return (tensor for swap_file in self._every for tensor in swap_file.tensors())

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes that the files will have when all tensors have been written. `weights` is 0, because only
        `OnDrive` knows the kind of these files."""
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
        """Unpins the pinned swap file, and starts to write its buffer. If the file has new tensors, this method also
        writes them, and returns when they are written. A no-op if no file is pinned."""
        swap_file, self._now = self._now, None
        if swap_file is None:
            return
        if swap_file.memory is not None:
            swap_file.start_writing()
        if swap_file.grown > swap_file.size:
            if swap_file.memory is not None:  # the buffer is too small for the new tensors
                self._release(swap_file)
                self._spare.clear()
            with torch.no_grad():
                swap_file.store(torch.frombuffer(buffer(BOUNCE), dtype=torch.uint8))
            trim()  # otherwise the optimizer state of the first step would stay in the heap as freed memory

    def _bring(self, swap_file: SwapFile, waits: bool) -> bool:
        """Starts to read a swap file, unless the file is in memory already or still empty.

        Args:
            swap_file: the file to read.
            waits: True: the file is needed now, so wait if necessary until another file has been written and its buffer
                can be reused. False: read the file ahead, but only if a buffer is available immediately.

        Returns:
            False if no buffer is available, otherwise True.
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
        """Returns a buffer for a file: an unused buffer of equal size, or a new buffer. Before a new buffer is
        allocated, unused buffers are freed and other files are released, the oldest first, until the new buffer fits
        into the memory limit. If `waits` is False, files that are being read or written, and files that were read
        ahead, are not released. If the new buffer still does not fit, it exceeds the limit if `waits` is True;
        otherwise the result is None. Args: waits: see `_bring`."""
        size = swap_file.size
        # A new buffer for a large weight replaces all other buffers: the weight's first update creates optimizer state
        # that `size` does not include.
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
                break  # no other buffer is left to release, so exceed the limit
            else:
                return None
        return torch.frombuffer(buffer(size), dtype=torch.uint8)

    def _room(self, sizes: Mapping[SwapFile, int]) -> int:
        """Returns the memory limit of all buffers together, in bytes. The limit has room for the largest file of a
        single weight, or for the largest group of neighboring files, whichever is larger. Neighboring files are a file
        that is being written, the pinned file that follows it, and the files after the pinned file that are read ahead.
        Args: sizes: file -> size in bytes."""
        row = [swap_file for swap_file in sizes if not swap_file.single_weight]
        largest = max((size for swap_file, size in sizes.items() if swap_file.single_weight), default=0)
        for first, swap_file in enumerate(row):
            neighbors = row[first : first + 2 + swap_file.ahead]
            while len(neighbors) > 2 + min(each.ahead for each in neighbors):  # the next block reads fewer files ahead
                neighbors.pop()
            largest = max(largest, sum(sizes[each] for each in neighbors))
        return largest

    def _buffer_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory())

    def _release(self, swap_file: SwapFile) -> None:
        swap_file.wait()
        self._spare.append(swap_file.leave())
        self._inside.remove(swap_file)
        swap_file.prefetched = False


class OnDrive:
    """Stores masters and optimizer state of streamed weights on a drive, and optionally the 16-bit weights of blocks.
    `StreamedWeights` calls the methods.

    Args:
        drive: stores the files. If None, nothing is stored: `put` and `put_weights` only collect tensors for `sizes`.
        blocks: the streamed weights of each block.
        edges: large weights outside the blocks (embedding and head).
        weights_too: True: also store the blocks' 16-bit weights, one flat tensor per block.
    """

    def __init__(
        self, drive: Drive | None, blocks: Sequence[Sequence[Tensor]], edges: Iterable[Tensor], weights_too: bool
    ) -> None:
        self.drive = drive
        self._masters, self._weights = SwapFiles(drive), SwapFiles(drive)
        self._masters_of = {edge: self._masters.new(single_weight=True) for edge in edges}
        self._weights_of: dict[Tensor, SwapFile] = {}
        for block in blocks:
            divided = parts(block)
            for part in divided:
                # the swap files of a block are pinned in quick succession, so read as many files ahead as a block has
                self._masters_of |= dict.fromkeys(part, self._masters.new(ahead=len(divided)))
            if weights_too:
                trained = any(p.requires_grad for p in block)
                self._weights_of |= dict.fromkeys(block, self._weights.new(stepped=trained))

    def pin(self, p: Tensor) -> None:
        """Pins the swap files of a weight, so that the host can update the weight. A no-op for a weight without swap
        files. Raises: DriveFailed: a read or write failed."""
        if p in self._weights_of:
            self._weights.pin(self._weights_of[p])
        if p in self._masters_of:
            self._masters.pin(self._masters_of[p])

    def put(self, p: Tensor, name: str, tensors: Mapping[str, object]) -> None:
        if p in self._masters_of:
            self._masters.put(self._masters_of[p], name, tensors)

    def put_weights(self, p: Tensor, flat: Tensor) -> None:
        """Adds the 16-bit weights of a block. Args: p: any weight of the block; flat: the buffer of the block's
        `HostBlock`. Raises: DriveFailed: a read or write failed."""
        if self.drive is not None:
            self._weights.pin(self._weights_of[p])
        self._weights.put(self._weights_of[p], BLOCK, {WEIGHTS: flat})

    def weights(self, p: Tensor) -> SwapFileEntry:
        """Waits until a block's 16-bit weights are written, and returns their location on the drive. Args: p: any
        weight of the block. Raises: DriveFailed: a read or write failed."""
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
    """Divides the large weights of a block, in order, into groups; the weights of a group share a swap file. A group
    has at most as many elements as the block's largest weight, or 1 / PARTS of the block's elements if that is more.
    The smallest weights (see SMALL), and weights whose fp32 master is smaller than a page, are in no group."""
    ascending = sorted(block, key=Tensor.numel)
    up_to = accumulate(p.numel() for p in ascending)  # elements of a weight and of all smaller weights
    total = sum(p.numel() for p in block)
    small = {
        p for p, elements in zip(ascending, up_to, strict=True) if elements <= SMALL * total or 4 * p.numel() < PAGE
    }
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
    """Context manager that converts an `OSError` of the drive into a `DriveFailed` whose message says what to type."""
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
                f"{limit} before the command, or weights.drive=null weights.drive_holds=state to keep everything in "
                "host memory."
            ) from error
        raise DriveFailed(
            f"weights.drive={drive.folder}: reading or writing this drive failed ({why}). Type {instead}, or "
            "weights.drive=null weights.drive_holds=state to keep everything in host memory."
        ) from error


def _view(memory: object, place: Span) -> Tensor:
    """Returns a tensor that is a view of a buffer. Its storage has only the bytes of this tensor, because `torch.save`
    writes full storages. Args: memory: an object with the buffer protocol; place: the tensor's location in the
    buffer."""
    flat = torch.frombuffer(memory, dtype=place.dtype, count=place.shape.numel(), offset=place.start)
    return flat.view(place.shape)
