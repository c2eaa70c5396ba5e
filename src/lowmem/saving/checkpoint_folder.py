"""Writes and reads a checkpoint as a folder: each process writes its shards of the model, and reads the shards that it
needs. `AtomicCheckpointIO` (`checkpoint.py`) uses such a folder if the strategy divides the model.

torch's distributed checkpoint plans the work: when saving, it assigns pieces of tensors to processes; when loading, it
finds the pieces that overlap with the shards of a process. This module writes and reads the bytes. When saving, a
process copies one piece at a time to the host. When loading, a process copies the needed bytes from a mapped file to
the shard. A folder has these files:

    part-00000.bin ...   the bytes of tensors, one file per process
    index.pt             all other values; shapes and dtypes of the tensors; and for each piece its offsets and shape
                         in the tensor, its file, its place in the file and its CRC-32

torch's own writer and reader are not used: they keep a copy of all written tensors until the file is closed, always
read full pieces, unpickle an index that may contain code, and store no checksums. Source:
torch.distributed.checkpoint's `StorageWriter` and planners.
"""

import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lowmem.system.atomic_files import atomic_write, draft_of, naming_file
from lowmem.system.fail_together import Ranks, fail_together
from lowmem.system.process import page_out

INDEX = "index.pt"
ALIGNED = 64  # bytes: alignment of pieces in a file, suitable for every dtype
AT_ONCE = 1 << 22  # maximum bytes that are read at once to compute a CRC-32


class Piece(NamedTuple):
    """The location of a piece of a tensor in a file."""

    file: str  # name of the file in the folder
    start: int  # offset in bytes
    bytes: int  # size in bytes
    crc: int  # CRC-32 of the bytes


# --- written ---------------------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, Tensor], content: dict, ranks: Ranks) -> None:
    """Writes a checkpoint atomically. All processes must call this function. When it returns, `path` is complete and
    synced to the disk.

    Args:
        path: the folder to write.
        tensors: name -> tensor. Each process writes its shard of a DTensor (a replicated shard is written once).
            Processes may pass different names, as the stages of a pipeline do. A plain tensor is written once, so it
            must be equal in all processes that pass it.
        content: further tensors and plain values. Only the content of rank 0 is written.
        ranks: the processes.

    Raises:
        OSError: some process cannot write; raised in every process. The draft is deleted, and `path` is unchanged.
    """
    with fail_together(ranks), ExitStack() as stack:
        with fail_together(ranks):
            draft = stack.enter_context(atomic_write(path)) if ranks.rank == 0 else draft_of(path)
            if ranks.rank == 0:
                draft.mkdir()
        with fail_together(ranks), _one_error(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # torch warns about a single process
            planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.save(dict(tensors), storage_writer=_Writer(draft, ranks.rank, content), planner=planner)


@contextmanager
def _one_error() -> Iterator[None]:
    """Context manager that raises the original error of the first process that failed. torch wraps the errors of all
    processes in an error that is not an `Exception`."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Writer(dcp.StorageWriter):
    """Writes the file of one process, with this rank, into an existing folder. Rank 0 also writes the index, which has
    the values of `content` in addition to the locations of the pieces."""

    def __init__(self, folder: Path, rank: int, content: dict) -> None:
        self.folder, self.rank, self.content = folder, rank, content

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # `save` passes the folder to the constructor instead

    def reset(self, checkpoint_id: object = None) -> None:
        """No-op: each checkpoint has a new writer."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None:
        """No-op: the folder exists."""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return plans

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        name, results = f"part-{self.rank:05d}.bin", []
        with (self.folder / name).open("wb") as stream:
            for item in plan.items:
                piece = _written(planner.resolve_data(item), name, stream)
                results.append(WriteResult(item.index, piece.bytes, piece))
            stream.flush()
            os.fsync(stream.fileno())
        done = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index. torch calls this on rank 0 after all processes have written their files."""
        pieces = {result.index: tuple(result.storage_data) for some in results for result in some}
        tensors = {name: _entry(name, tensor, pieces) for name, tensor in metadata.state_dict_metadata.items()}
        index = self.folder / INDEX
        with (
            naming_file(index),
            index.open("wb") as stream,
        ):  # without `naming_file`, the error that reaches other processes would have no errno
            torch.save({"content": self.content, "tensors": tensors}, stream)


def _written(tensor: Tensor, name: str, stream: BinaryIO) -> Piece:
    """Copies a piece of a tensor to the host, writes it, and returns its location. Each call frees its copy, so the
    host has a copy of only one piece at a time."""
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    stream.write(bytes(-stream.tell() % ALIGNED))
    start = stream.tell()
    stream.write(numbers)
    return Piece(name, start, numbers.nbytes, zlib.crc32(numbers))


def _entry(name: str, tensor: TensorStorageMetadata, pieces: dict[MetadataIndex, tuple]) -> dict:
    """Returns a tensor's entry in the index: shape, dtype, and pieces as (offsets in the tensor, shape, `Piece`)."""
    chunks = ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks)
    placed = [(offsets, sizes, pieces[MetadataIndex(name, torch.Size(offsets))]) for offsets, sizes in chunks]
    return {"shape": tuple(tensor.size), "dtype": tensor.properties.dtype, "pieces": placed}


# --- read ------------------------------------------------------------------------------------------------------------


class CheckpointTensors(Mapping[str, Tensor]):
    """Maps names to meta tensors with the shapes and dtypes of a folder's tensors. `read` copies the values.

    Args:
        folder: the checkpoint.
        tensors: full name -> entry of the index.
        prefix: the beginning of all full names. The names of the mapping do not contain it.
    """

    def __init__(self, folder: Path, tensors: dict[str, dict], prefix: str = "") -> None:
        self.folder, self.tensors, self.prefix = folder, tensors, prefix
        self._mapped: dict[str, Tensor] = {}

    def under(self, prefix: str) -> Self:
        """Returns the tensors whose names begin with a prefix, with the prefix removed from the names."""
        own = {name: entry for name, entry in self.tensors.items() if name.startswith(f"{self.prefix}{prefix}")}
        return type(self)(self.folder, own, f"{self.prefix}{prefix}")

    def __getitem__(self, name: str) -> Tensor:
        entry = self.tensors[self.prefix + name]
        return torch.empty(entry["shape"], dtype=entry["dtype"], device="meta")

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def read(self, name: str, into: Tensor) -> None:
        """Fills a tensor from the files. Reads only the bytes that `into` needs. Does not communicate.

        Args:
            name: name of the saved tensor.
            into: a DTensor, whose local shard is filled, or a plain tensor of the full shape.
        """
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: into}, Metadata({name: self._metadata(name)}), is_coordinator=True)
        for item in planner.finish_plan(planner.create_local_plan()).items:
            if 0 in item.lengths:  # an empty tensor has no bytes to map
                continue
            piece, mapped = self._piece(name, item.storage_index.offset)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(piece)
            page_out([mapped])

    def _metadata(self, name: str) -> TensorStorageMetadata:
        entry = self.tensors[self.prefix + name]
        places = (map(torch.Size, place[:2]) for place in entry["pieces"])
        chunks = [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in places]
        return TensorStorageMetadata(TensorProperties(entry["dtype"]), torch.Size(entry["shape"]), chunks)

    def _piece(self, name: str, offsets: torch.Size) -> tuple[Tensor, Tensor]:
        """Returns the piece of a tensor that begins at `offsets`, and all bytes of the file that contains this piece.
        Both are in mapped memory."""
        entry = self.tensors[self.prefix + name]
        sizes, piece = next((sizes, Piece(*piece)) for at, sizes, piece in entry["pieces"] if at == tuple(offsets))
        if piece.file not in self._mapped:
            path = self.folder / piece.file
            self._mapped[piece.file] = torch.from_file(str(path), False, path.stat().st_size, dtype=torch.uint8)
        mapped = self._mapped[piece.file]
        return mapped[piece.start : piece.start + piece.bytes].view(entry["dtype"]).view(sizes), mapped


def load(folder: Path) -> tuple[dict, CheckpointTensors]:
    """Returns the arguments `content` and `tensors` that `save` wrote. The values of `tensors` stay in the files until
    `CheckpointTensors.read`."""
    index = torch.load(folder / INDEX, map_location="cpu", weights_only=True, mmap=True)
    return index["content"], CheckpointTensors(folder, index["tensors"])


def has_its_end(folder: Path) -> bool:
    """Returns True if the index can be read, and no file is shorter than the index says. Reads only the index, and the
    sizes of the other files. Raises PermissionError if a file may not be read."""
    try:
        with (folder / INDEX).open("rb") as file:  # `is_zipfile` returns False for an unreadable path
            if not zipfile.is_zipfile(file):
                return False
        return all((folder / file).stat().st_size >= end for file, end in _ends(load(folder)[1]).items())
    except PermissionError:
        raise
    except Exception:  # a broken index raises a dozen kinds of errors
        return False


def _ends(stored: CheckpointTensors) -> dict[str, int]:
    """Returns a mapping from the name of each file to the offset in bytes at which its last piece ends."""
    ends: dict[str, int] = {}
    for piece in _pieces(stored):
        ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.bytes)
    return ends


def _pieces(stored: CheckpointTensors) -> Iterator[Piece]:
    return (Piece(*piece) for entry in stored.tensors.values() for *_, piece in entry["pieces"])


def intact(folder: Path) -> bool:
    """Returns True if the CRC-32 checksums of all pieces and of the index match their content. Raises PermissionError
    if a file may not be read."""
    try:
        with zipfile.ZipFile(folder / INDEX) as archive:
            if archive.testzip() is not None:
                return False
        return all(_is_what_was_written(folder / piece.file, piece) for piece in _pieces(load(folder)[1]))
    except PermissionError:
        raise
    except Exception:
        return False


def _is_what_was_written(file: Path, piece: Piece) -> bool:
    crc, left = 0, piece.bytes
    with file.open("rb") as stream:
        stream.seek(piece.start)
        while left and (numbers := stream.read(min(left, AT_ONCE))):
            crc, left = zlib.crc32(numbers, crc), left - len(numbers)
    return left == 0 and crc == piece.crc
