"""Stores bytes on a drive in unnamed files, which several threads read and write with direct I/O, past the page cache.

An unnamed file exists as long as it is open. So a process leaves no file behind, however the process ends, and two
processes never share a file. Space is allocated before anything is written, so a full drive fails immediately and not
in the middle of a run. Memory, offset and length of direct I/O are multiples of a page. On file systems without direct
I/O (some network and overlay file systems) the page cache is used.
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
PIECE = 1 << 23  # bytes that a thread reads or writes at once
THREADS = 4  # with fewer threads a fast drive idles between requests
_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS and Windows lack it


class Disk:
    """The system calls that reach a drive. Tests replace them by calls that fail or transfer less."""

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
    """Returns whether a folder is in host memory, such as one on tmpfs."""
    place = folder.resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[path] for path in (place, *place.parents) if path in mounts), "")
    return kind in ("tmpfs", "ramfs", "devtmpfs")


def pages(size: int) -> int:
    """Returns a size in bytes, rounded up to a multiple of a page."""
    return -(-size // PAGE) * PAGE


def buffer(size: int) -> mmap.mmap:
    """Returns page-aligned memory. Pages take no memory until they are written."""
    return mmap.mmap(-1, pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Drive:
    """A folder of a drive, and the threads that read and write there.

    Args:
        folder: created if it is missing.
        disk: the system calls that reach the drive.

    Raises:
        OSError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder, self.disk = folder, disk or Disk()
        self.read_bytes = self.written_bytes = 0
        self._threads: ThreadPoolExecutor | None = None
        # guards the pool and the counts, because one thread reads weights while another thread steps
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
        """Starts to read or write memory in pieces, from position `start` of a file."""
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
        """Stops the threads. The next access starts them again."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


class Moving:
    """An access in progress."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    def done(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def result(self) -> None:
        """Waits until the access is complete. Raises: OSError: a piece failed; by then no other piece is in
        progress."""
        for piece in wait(self._pieces).done:
            piece.result()


class ScratchFile:
    """An unnamed file. All offsets and lengths are multiples of a page."""

    def __init__(self, drive: Drive) -> None:
        self.drive, self.size = drive, 0
        self._file = drive.disk.create(drive.folder, drive.direct)
        # closes the file when this object is freed; maps stay valid
        self.close = weakref.finalize(self, os.close, self._file)

    def grow(self, size: int) -> None:
        """Allocates space up to `size` bytes. Raises: OSError: the drive is full."""
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
        """Returns a read-only map of the file's first bytes, which may outlive this object."""
        view = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        view.madvise(mmap.MADV_SEQUENTIAL)  # increases the system's read-ahead
        return view

    def check(self) -> None:
        """Reads the whole file once, through the page cache if direct I/O is not available. If the drive could not read
        a mapped page, the process would end with a signal and without a message. Raises: OSError."""
        memory = buffer(PIECE)
        for start in range(0, self.size, PIECE):
            part = memoryview(memory)[: min(PIECE, self.size - start)]
            _all_of(self.drive.disk.read, self._file, part, start)

    def sync(self) -> None:
        os.fsync(self._file)


def _all_of(move: Callable[[int, memoryview, int], int], file: int, memory: memoryview, start: int) -> None:
    """Reads or writes all bytes of `memory`, since a system call may transfer fewer than it was asked for. After a
    partial transfer the rest starts at a page boundary again."""
    done = 0
    while done < len(memory):
        count = move(file, memory[done:], start + done)
        if done + count < len(memory):
            count = count // PAGE * PAGE
        if count <= 0:
            raise OSError(errno.EIO, "less than a page could be moved")
        done += count
