"""Writes and reads a checkpoint as a folder: each process writes its shards of the model, and reads the shards it
needs.

torch's distributed checkpoint assigns pieces of tensors to processes when saving, and finds the pieces from which a
reader assembles its shards. This module does the input and output, and no process holds more than its own shards:

    part-00000.bin ...   the bytes of tensors, one file per process; a reader maps it and copies what it needs
    index.pt             everything else, and for each piece its offsets in the tensor, its file and its CRC-32

torch's own storage holds a copy of everything it writes until the file is closed, reads full pieces, unpickles its
index together with any code in it, and has no digests. Source: torch.distributed.checkpoint's `StorageWriter` and
planners.
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
ALIGNED = 64  # bytes: alignment of pieces, suitable for every dtype
AT_ONCE = 1 << 22  # bytes that are read at once for a digest


class Piece(NamedTuple):
    """The location of a tensor's piece in a file."""

    file: str
    start: int  # bytes
    bytes: int
    crc: int


# --- written ---------------------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, Tensor], content: dict, ranks: Ranks) -> None:
    """Writes a checkpoint atomically; all processes call this. When it returns, `path` is complete and synced.

    Args:
        tensors: name -> tensor. Of a DTensor each process writes its shard (replicated shards are written once); a
            plain tensor is equal in all processes.
        content: further tensors and plain values; the content of rank 0 is written.

    Raises:
        OSError: on every process, if any process cannot write. The draft is deleted, and `path` is unchanged.
    """
    with fail_together(ranks), ExitStack() as stack:
        with fail_together(ranks):
            draft = stack.enter_context(atomic_write(path)) if ranks.rank == 0 else draft_of(path)
            if ranks.rank == 0:
                draft.mkdir()
        with fail_together(ranks), _one_error(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process
            planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.save(dict(tensors), storage_writer=_Writer(draft, ranks.rank, content), planner=planner)


@contextmanager
def _one_error() -> Iterator[None]:
    """Raises the first of the processes' errors, which torch wraps in an error that is not an `Exception`."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Writer(dcp.StorageWriter):
    """Writes the file of one process. Args: rank: rank of this process; content: written to the index besides the
    pieces."""

    def __init__(self, folder: Path, rank: int, content: dict) -> None:
        self.folder, self.rank, self.content = folder, rank, content

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # the constructor gets the folder

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
        """Writes the index; rank 0 calls this once all processes have written."""
        pieces = {result.index: tuple(result.storage_data) for some in results for result in some}
        tensors = {name: _entry(name, tensor, pieces) for name, tensor in metadata.state_dict_metadata.items()}
        index = self.folder / INDEX
        with (
            naming_file(index),
            index.open("wb") as stream,
        ):  # torch's error has no errno when it reaches other processes
            torch.save({"content": self.content, "tensors": tensors}, stream)


def _written(tensor: Tensor, name: str, stream: BinaryIO) -> Piece:
    """Writes a tensor and returns its location. Only one tensor is on the host at a time."""
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    stream.write(bytes(-stream.tell() % ALIGNED))
    start = stream.tell()
    stream.write(numbers)
    return Piece(name, start, numbers.nbytes, zlib.crc32(numbers))


def _entry(name: str, tensor: TensorStorageMetadata, pieces: dict[MetadataIndex, tuple]) -> dict:
    """Returns a tensor's entry in the index. Its pieces are (offsets in the tensor, shape, `Piece`)."""
    chunks = ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks)
    placed = [(offsets, sizes, pieces[MetadataIndex(name, torch.Size(offsets))]) for offsets, sizes in chunks]
    return {"shape": tuple(tensor.size), "dtype": tensor.properties.dtype, "pieces": placed}


# --- read ------------------------------------------------------------------------------------------------------------


class CheckpointTensors(Mapping[str, Tensor]):
    """Maps names to the tensors of a folder, which have shape and dtype but no memory. `read` copies from the files."""

    def __init__(self, folder: Path, tensors: dict[str, dict], prefix: str = "") -> None:
        self.folder, self.tensors, self.prefix = folder, tensors, prefix
        self._mapped: dict[str, Tensor] = {}

    def under(self, prefix: str) -> Self:
        """Returns the tensors whose names begin with a prefix, under their names without the prefix."""
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
        """Fills a tensor from the files. Reads only the bytes that `into` needs, and sends nothing between processes.

        Args:
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
        """Returns the piece that begins at `offsets`, and its full file, both as mapped memory."""
        entry = self.tensors[self.prefix + name]
        sizes, piece = next((sizes, Piece(*piece)) for at, sizes, piece in entry["pieces"] if at == tuple(offsets))
        if piece.file not in self._mapped:
            path = self.folder / piece.file
            self._mapped[piece.file] = torch.from_file(str(path), False, path.stat().st_size, dtype=torch.uint8)
        mapped = self._mapped[piece.file]
        return mapped[piece.start : piece.start + piece.bytes].view(entry["dtype"]).view(sizes), mapped


def load(folder: Path) -> tuple[dict, CheckpointTensors]:
    """Returns the content and the tensors that `save` wrote."""
    index = torch.load(folder / INDEX, map_location="cpu", weights_only=True, mmap=True)
    return index["content"], CheckpointTensors(folder, index["tensors"])


def has_its_end(folder: Path) -> bool:
    """Returns whether every file has its full length, without reading a tensor."""
    try:
        if not zipfile.is_zipfile(folder / INDEX):
            return False
        return all((folder / file).stat().st_size >= end for file, end in _ends(load(folder)[1]).items())
    except PermissionError:
        raise
    except Exception:  # a broken index raises a dozen kinds of errors
        return False


def _ends(stored: CheckpointTensors) -> dict[str, int]:
    ends: dict[str, int] = {}
    for piece in _pieces(stored):
        ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.bytes)
    return ends


def _pieces(stored: CheckpointTensors) -> Iterator[Piece]:
    return (Piece(*piece) for entry in stored.tensors.values() for *_, piece in entry["pieces"])


def intact(folder: Path) -> bool:
    """Returns True if all files have the CRC-32 with which they were written."""
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
