"""Stores bytes on a drive in unnamed files. `offload/drive.py` keeps masters, optimizer state and, with
weights.drive_holds=all, 16-bit weights in such files.

A pool of threads reads and writes the files with direct I/O, which bypasses the page cache. Direct I/O requires that
the memory address, the file offset and the length are multiples of the drive's block size; this module uses multiples
of a page. On file systems without direct I/O (some network and overlay file systems), reads and writes go through the
page cache, as reads from a memory map always do (`ScratchFile.mapped`).

An unnamed file exists only while it is open or mapped. So no file remains after a process has ended for any reason, and
two processes never share a file. (On file systems without O_TMPFILE, a file has a name until it is unlinked,
immediately after its creation.) `grow` allocates space before new tensors are written, so a full drive ends a run while
weights are loaded or in the first step, and not later.
"""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

import psutil

PAGE = mmap.PAGESIZE
PIECE = 1 << 23  # bytes: the maximum that a thread reads or writes with one system call
THREADS = 4  # with fewer threads, a fast drive is idle between requests
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0 on macOS and Windows, which lack the flag


class Disk:
    """The system calls that access a drive. Tests replace this class with subclasses whose calls fail or transfer fewer
    bytes."""

    def create(self, folder: Path, direct: bool) -> int:
        """Creates an unnamed file and returns its descriptor."""
        flags = os.O_RDWR | (_DIRECT if direct else 0)
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(folder, flags | os.O_TMPFILE, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
        created, name = tempfile.mkstemp(prefix=".lowmem-", dir=folder)
        try:
            return os.open(name, flags)
        finally:
            os.close(created)
            os.unlink(name)

    def reserve(self, file: int, start: int, size: int) -> None:
        os.posix_fallocate(file, start, size)

    def read(self, file: int, into: memoryview, start: int) -> int:
        return os.preadv(file, [into], start)

    def write(self, file: int, data: memoryview, start: int) -> int:
        return os.pwrite(file, data, start)


def is_memory(folder: Path) -> bool:
    """Returns whether a folder is in host memory, for example on tmpfs."""
    place = folder.resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[path] for path in (place, *place.parents) if path in mounts), "")
    return kind in ("tmpfs", "ramfs", "devtmpfs")


def pages(size: int) -> int:
    """Returns a size in bytes, rounded up to a multiple of a page."""
    return -(-size // PAGE) * PAGE


def buffer(size: int) -> mmap.mmap:
    """Returns page-aligned memory of at least `size` bytes. The system allocates each page when it is first written."""
    return mmap.mmap(-1, pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Drive:
    """A folder on a drive, and the pool of threads that read and write the files in it.

    Args:
        folder: created if it is missing.
        disk: the system calls that access the drive; None for the real ones.

    Raises:
        OSError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder, self.disk = folder, disk or Disk()
        self.read_bytes = self.written_bytes = 0
        self._threads: ThreadPoolExecutor | None = None
        # guards the creation of the pool, and the counts: other threads read 16-bit weights while the host thread reads
        # and writes masters and optimizer state
        self._lock = Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.direct = self._takes_direct()

    def file(self) -> "ScratchFile":
        return ScratchFile(self)

    def _takes_direct(self) -> bool:
        if not _DIRECT:
            return False
        try:
            file, page = self.disk.create(self.folder, True), buffer(PAGE)
            try:
                self.disk.reserve(file, 0, PAGE)
                self.disk.write(file, memoryview(page), 0)
                self.disk.read(file, memoryview(page), 0)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def start(self, move: Callable[[int, memoryview, int], int], file: int, memory: memoryview, start: int) -> "Moving":
        """Starts to read or write a file in pieces of PIECE bytes, and returns immediately.

        Args:
            move: `Disk.read` or `Disk.write`.
            file: the file descriptor.
            memory: the bytes to write, or the memory to read into.
            start: the offset in the file.
        """
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS, "drive")
        places = range(0, len(memory), PIECE)
        pieces = (memory[at : at + PIECE] for at in places)
        return Moving(
            [
                self._threads.submit(_all_of, move, file, piece, start + at)
                for at, piece in zip(places, pieces, strict=True)
            ]
        )

    def count(self, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written

    def close(self) -> None:
        """Waits for all accesses and stops the threads. The next access starts new threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


class Moving:
    """A read or write in progress."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def result(self) -> None:
        """Waits until all pieces have been transferred. Raises: OSError: a piece failed; the error is raised after the
        last piece has ended."""
        for piece in wait(self._pieces).done:
            piece.result()


class ScratchFile:
    """An unnamed file on a drive. For `read` and `write`, offsets, lengths and memory addresses must be multiples of a
    page."""

    def __init__(self, drive: Drive) -> None:
        self.drive, self.size = drive, 0
        self._file = drive.disk.create(drive.folder, drive.direct)
        # closes the file when this object is garbage collected; memory maps of the file remain valid
        self.close = weakref.finalize(self, os.close, self._file)

    def grow(self, size: int) -> None:
        """Extends the file to `size` bytes and allocates their space. A no-op if the file is large enough. Raises:
        OSError: the space cannot be allocated, for example because the drive is full."""
        if size > self.size:
            self.drive.disk.reserve(self._file, self.size, size - self.size)
            self.size = size

    def read(self, start: int, into: memoryview) -> Moving:
        self.drive.count(read=len(into))
        return self.drive.start(self.drive.disk.read, self._file, into, start)

    def write(self, start: int, data: memoryview) -> Moving:
        self.drive.count(written=len(data))
        return self.drive.start(self.drive.disk.write, self._file, data, start)

    def mapped(self, size: int) -> mmap.mmap:
        """Returns a read-only memory map of the file's first `size` bytes. The map remains valid after this object is
        deleted."""
        view = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        view.madvise(mmap.MADV_SEQUENTIAL)  # makes the system read further ahead
        return view

    def check(self) -> None:
        """Reads the whole file once, in the calling thread, so that an unreadable drive raises an OSError here. Without
        this check, an unreadable page of a memory map would end the process with a signal (SIGBUS) and without a
        message."""
        memory = buffer(PIECE)
        for start in range(0, self.size, PIECE):
            part = memoryview(memory)[: min(PIECE, self.size - start)]
            _all_of(self.drive.disk.read, self._file, part, start)

    def sync(self) -> None:
        os.fsync(self._file)


def _all_of(move: Callable[[int, memoryview, int], int], file: int, memory: memoryview, start: int) -> None:
    """Reads or writes all bytes of `memory`. A system call may transfer only some of the requested bytes; the next call
    then continues at the last page boundary. Raises: OSError: a call failed, or transferred less than a page although
    more bytes were left."""
    done = 0
    while done < len(memory):
        count = move(file, memory[done:], start + done)
        if done + count < len(memory):
            count = count // PAGE * PAGE
        if count <= 0:
            raise OSError(errno.EIO, "less than a page could be moved")
        done += count
