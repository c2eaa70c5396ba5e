"""A checkpoint as a folder: each process writes its part of a divided model, and reads the part that it then has.

torch's distributed checkpoint plans who writes which piece of which tensor, and which pieces of a folder make up a part
that was divided otherwise. This file holds what it plans for, and no process ever more of it than its own part:

    part-00000.bin ...   numbers as they lie in memory, one file per process; a reader maps it and copies what it needs
    index.pt             everything else, and of each piece its place in the whole, in which file, and its CRC-32

torch's own storage keeps a copy of all that it writes until the file is closed, reads whole pieces, unpickles its index
with whatever code is in it, and has no digests. Source: torch.distributed.checkpoint's `StorageWriter` and planners.
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

from lowmem.atomic_files import atomic_write, draft_of, naming_file
from lowmem.fail_together import Ranks, fail_together
from lowmem.memory.process import page_out

INDEX = "index.pt"
ALIGNED = 64  # bytes: at such a place numbers of any dtype may begin
AT_ONCE = 1 << 22  # bytes that are read for a digest


class Piece(NamedTuple):
    """Where the numbers of a part of a tensor lie."""

    file: str
    start: int  # bytes
    bytes: int
    crc: int


# --- written ---------------------------------------------------------------------------------------------------------


def save(path: Path, tensors: Mapping[str, Tensor], content: dict, ranks: Ranks) -> None:
    """By all processes together, whole or not at all: when it returns, `path` is there and synced.

    Args:
        tensors: by name: DTensors, of which each process writes the part that it has, once where several have the same;
            and plain ones, of which the same name is the same everywhere.
        content: everything else, of tensors and plain values; that of rank 0 is written.

    Raises:
        OSError: on every process, where one cannot write; nothing is left of it, and what stood at `path` stands there.
    """
    with fail_together(ranks), ExitStack() as stack:
        with fail_together(ranks):
            draft = stack.enter_context(atomic_write(path)) if ranks.rank == 0 else draft_of(path)
            if ranks.rank == 0:
                draft.mkdir()
        with fail_together(ranks), _one_error(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process that is alone
            planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.save(dict(tensors), storage_writer=_Writer(draft, ranks.rank, content), planner=planner)


@contextmanager
def _one_error() -> Iterator[None]:
    """torch tells every process of all errors, in one that is no `Exception`."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


class _Writer(dcp.StorageWriter):
    """Args: rank: of this process; content: what the index holds beside the places of tensors."""

    def __init__(self, folder: Path, rank: int, content: dict) -> None:
        self.folder, self.rank, self.content = folder, rank, content

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return False  # it is told its folder when it is made

    def reset(self, checkpoint_id: object = None) -> None:
        """It is made anew for each checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None:
        """The folder is there."""

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
        """By rank 0, once all have written."""
        pieces = {result.index: tuple(result.storage_data) for some in results for result in some}
        tensors = {name: _entry(name, tensor, pieces) for name, tensor in metadata.state_dict_metadata.items()}
        index = self.folder / INDEX
        with (
            naming_file(index),
            index.open("wb") as stream,
        ):  # torch's error has no number when it comes to other processes
            torch.save({"content": self.content, "tensors": tensors}, stream)


def _written(tensor: Tensor, name: str, stream: BinaryIO) -> Piece:
    """One tensor is on the host at a time."""
    numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    stream.write(bytes(-stream.tell() % ALIGNED))
    start = stream.tell()
    stream.write(numbers)
    return Piece(name, start, numbers.nbytes, zlib.crc32(numbers))


def _entry(name: str, tensor: TensorStorageMetadata, pieces: dict[MetadataIndex, tuple]) -> dict:
    """Of the index: its pieces are (place in the tensor, shape, `Piece`)."""
    shapes = ((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks)
    held = [(offsets, sizes, pieces[MetadataIndex(name, torch.Size(offsets))]) for offsets, sizes in shapes]
    return {"shape": tuple(tensor.size), "dtype": tensor.properties.dtype, "pieces": held}


# --- read ------------------------------------------------------------------------------------------------------------


class Stored(Mapping[str, Tensor]):
    """The tensors of a folder by name: of their shape and dtype, without memory. `read` fills others from them."""

    def __init__(self, folder: Path, tensors: dict[str, dict], prefix: str = "") -> None:
        self.folder, self.tensors, self.prefix = folder, tensors, prefix
        self._mapped: dict[str, Tensor] = {}

    def under(self, prefix: str) -> Self:
        """Those whose names begin so, by the rest of their names."""
        own = {name: one for name, one in self.tensors.items() if name.startswith(f"{self.prefix}{prefix}")}
        return type(self)(self.folder, own, f"{self.prefix}{prefix}")

    def __getitem__(self, name: str) -> Tensor:
        one = self.tensors[self.prefix + name]
        return torch.empty(one["shape"], dtype=one["dtype"], device="meta")

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def read(self, name: str, into: Tensor) -> None:
        """Nothing is sent, and of each file only what belongs to `into` is read.

        Args:
            into: of the whole's shape: a DTensor, whose part in this process is filled, or a plain tensor.
        """
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: into}, Metadata({name: self._metadata(name)}), is_coordinator=True)
        for item in planner.finish_plan(planner.create_local_plan()).items:
            if 0 in item.lengths:  # of a file without a number there is nothing to map
                continue
            piece, mapped = self._piece(name, item.storage_index.offset)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(piece)
            page_out([mapped])

    def _metadata(self, name: str) -> TensorStorageMetadata:
        one = self.tensors[self.prefix + name]
        places = (map(torch.Size, place[:2]) for place in one["pieces"])
        chunks = [ChunkStorageMetadata(offsets, sizes) for offsets, sizes in places]
        return TensorStorageMetadata(TensorProperties(one["dtype"]), torch.Size(one["shape"]), chunks)

    def _piece(self, name: str, offsets: torch.Size) -> tuple[Tensor, Tensor]:
        """Returns: the piece that begins there, and the whole file, both in the mapped memory."""
        one = self.tensors[self.prefix + name]
        sizes, piece = next((sizes, Piece(*piece)) for at, sizes, piece in one["pieces"] if at == tuple(offsets))
        if piece.file not in self._mapped:
            path = self.folder / piece.file
            self._mapped[piece.file] = torch.from_file(str(path), False, path.stat().st_size, dtype=torch.uint8)
        mapped = self._mapped[piece.file]
        return mapped[piece.start : piece.start + piece.bytes].view(one["dtype"]).view(sizes), mapped


def load(folder: Path) -> tuple[dict, Stored]:
    """Returns: what `save` was given as content, and the tensors."""
    index = torch.load(folder / INDEX, map_location="cpu", weights_only=True, mmap=True)
    return index["content"], Stored(folder, index["tensors"])


def has_its_end(folder: Path) -> bool:
    """Whether every file is there in its length: what no number has been looked at for."""
    try:
        if not zipfile.is_zipfile(folder / INDEX):
            return False
        return all((folder / file).stat().st_size >= end for file, end in _ends(load(folder)[1]).items())
    except PermissionError:
        raise
    except Exception:  # an index that makes no sense does so in a dozen ways
        return False


def _ends(stored: Stored) -> dict[str, int]:
    ends: dict[str, int] = {}
    for piece in _pieces(stored):
        ends[piece.file] = max(ends.get(piece.file, 0), piece.start + piece.bytes)
    return ends


def _pieces(stored: Stored) -> Iterator[Piece]:
    return (Piece(*piece) for one in stored.tensors.values() for *_, piece in one["pieces"])


def intact(folder: Path) -> bool:
    """Whether every number, and what else is in it, is what was written: by CRC-32, as in a file of torch's."""
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
