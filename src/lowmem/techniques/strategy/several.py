"""Base classes of strategies with several processes, one process per device.

In each process Lightning sees a run on a single device (`AmongSeveral`). Lightning's own multi-device strategies are
not used, because they start processes themselves, move shards between devices, and have their own checkpoint formats.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lowmem.step.gradients import norm_of
from lowmem.system import rank_environment
from lowmem.system.torch_private import set_timeout
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.techniques.strategy.in_place import InPlace
from lowmem.techniques.strategy.load_in_parts import buffers
from lowmem.techniques.strategy.rank_0_turns import Turns

APART = 1_000_003  # seed distance between consecutive ranks; exceeds any window index, which is also added to the seed


class Several(OneDevice):
    """Base class of strategies with several processes. Created after this process has joined the process group.

    Args:
        device, devices: see `OneDevice`.
        timeout: timeout of collectives, in seconds. Subclasses set it for the process groups that they create; for the
            group of all ranks, `process_group.py` has set it.
    """

    several = True
    turns: Turns  # set by `process_group`; makes the other ranks wait for work of rank 0

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600) -> None:
        super().__init__(device, devices)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.data_rank, self.data_size = self.rank, self.size
        self.factor, self.data_group = float(self.size), dist.group.WORLD  # data_group: ranks over which `all_sum` sums
        self._locals: dict[nn.Parameter, nn.Parameter] = {}

    @staticmethod
    def data_ranks(devices: int, **_: object) -> int:
        return devices

    def folder(self, run_folder: Path) -> Path:
        return rank_environment.folder(run_folder, self.rank)

    @contextmanager
    def rank_0_first(self, work: str = "work alone") -> Iterator[None]:
        turn = self.turns.next()
        if self.rank:
            self.turns.wait(turn, work)
        with nullcontext() if self.rank else self.turns.working(turn):
            yield

    @contextmanager
    def leave_after_rank_0(self, work: str = "work alone") -> Iterator[None]:
        turn = self.turns.next()
        with nullcontext() if self.rank else self.turns.working(turn):
            yield
        if self.rank:
            self.turns.wait(turn, work)

    @property
    def place(self) -> torch.device:
        """Returns the device on which this process computes."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")

    def lightning(self) -> Strategy:
        return AmongSeveral(self)

    def before_training(self, module: LightningModule) -> None:
        super().before_training(module)
        # Ranks that read different rows draw different dropout masks; ranks that compute a row together draw equal
        # masks. The seeds must differ in their lower 32 bits, because a CPU generator ignores the upper bits.
        torch.manual_seed(torch.initial_seed() + module.position.window + self.data_rank * APART)

    def release(self) -> ref | None:
        self.data_group = None  # reference cycles in Lightning may keep this object, and so the group, alive
        return super().release()

    def local(self, p: nn.Parameter) -> nn.Parameter:
        if p not in self._locals:
            self._locals[p] = self.new_local(p)
        return self._locals[p]

    def new_local(self, p: nn.Parameter) -> nn.Parameter:
        """Creates the local parameter of `p`. Called once per parameter."""
        raise NotImplementedError

    def moved(self) -> None:
        """Makes local parameters share the memory of the model's parameters again, after Lightning has moved an
        undivided model to the device. Local parameters that are the model's own parameters need no change."""
        for p, local in self._locals.items():
            if local is not p:
                local.data = p.detach()

    def local_parameters(self, model: nn.Module) -> nn.Module:
        return LocalParameters(self, model)

    def all_sum(self, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed, group=self.data_group)
        return summed

    def all_max(self, number: int) -> int:
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def broadcast(self, value: object) -> object:
        box = [value]
        dist.broadcast_object_list(box, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value: object) -> list:
        box = [None] * self.size
        dist.all_gather_object(box, value)
        return box

    def barrier(self) -> None:
        self.all_max(0)


class LocalParameters(nn.Module):
    """A module whose `named_parameters` yields the local parameters of a model, under the model's names."""

    def __init__(self, ranks: Several, model: nn.Module) -> None:
        super().__init__()
        self.ranks, self.model = ranks, (model,)  # a tuple keeps the model from being registered as a submodule

    def named_parameters(self, *args, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.model[0].named_parameters(*args, **kwargs)
        return ((name, self.ranks.local(p)) for name, p in named)


class Divided(Several):
    """Base class of strategies in which a process has only a part of the parameters: shards (DTensors), or a subset of
    the full parameters.

    The optimizer updates a shard as a plain tensor (`local`). An optimizer with an elementwise update computes the same
    bits for an element of a shard as for the same element of the full tensor.
    """

    divides = True
    in_numbers = False

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600) -> None:
        super().__init__(device, devices, timeout)
        # local parameter -> number of processes that have this shard
        self._holders: dict[nn.Parameter, int] = {}
        self._widened: dict[torch.dtype, torch.dtype] = {}

    def widen(self, read: torch.dtype, dtype: torch.dtype) -> None:
        self._widened = {read: dtype}

    def sent_as(self, tensor: Tensor) -> torch.dtype:
        return self._widened.get(tensor.dtype, tensor.dtype)

    @property
    def builds(self) -> bool:
        return self.in_numbers or self.rank == 0

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context manager for building the model: first rank 0 builds it with weights, then the other ranks build the
        modules on the meta device, without initialization. They receive their weights from rank 0 in `shard`. With
        `in_numbers`, which only memory plans set, the rank builds the complete model, and does not wait."""
        if self.in_numbers:
            yield
            return
        with self.rank_0_first("read the model"), nullcontext() if self.builds else torch.device("meta"):
            yield

    def meshed(self, timeout: float, **sizes: int) -> DeviceMesh:
        """Creates a device mesh of all processes, which must all call this method. Args: timeout: timeout of
        collectives in the mesh's process groups, in seconds; sizes: the number of ranks along each dimension, by the
        dimension's name."""
        mesh = init_device_mesh(self.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for group in mesh.get_all_groups():
            set_timeout(group, timedelta(seconds=timeout))
        return mesh

    def new_local(self, p: nn.Parameter) -> nn.Parameter:
        local = nn.Parameter(p.detach().to_local(), p.requires_grad) if isinstance(p, DTensor) else p
        self._holders[local] = self.holders(p)
        return local

    def before_training(self, module: LightningModule) -> None:
        super().before_training(module)
        for p, local in self._locals.items():
            if isinstance(p, DTensor):
                local.data = p.detach().to_local()  # the shard may have moved to other memory

    def holders(self, p: nn.Parameter) -> int:
        """Returns the number of processes, including this one, that have this process's shard of a parameter."""
        if not isinstance(p, DTensor):
            return self.size
        # not `is_shard()`, which is False for the placement of a tensor that is sharded twice along one dimension
        sizes = (p.device_mesh.size(dim) for dim, placement in enumerate(p.placements) if placement.is_replicate())
        outside = self.size // p.device_mesh.size()
        return outside * torch.Size(sizes).numel()

    def gather_gradients(self) -> None:
        for p, local in self._locals.items():
            if local is not p and p.grad is not None:
                local.data = p.detach().to_local()  # the shard may have moved
                local.grad = p.grad.to_local()

    def clear_gradients(self) -> None:
        for p in self._locals:
            p.grad = None

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        squares = [norm_of(p.grad).square() / self._holders[p] for p in parameters]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self.place)
        total = total.to(self.place)
        dist.all_reduce(total)
        return total.sqrt()

    def gathered(self, p: nn.Parameter, shard: Tensor) -> Tensor | None:
        return in_full(self.as_dtensor(p, shard)).cpu()

    def as_dtensor(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        """Returns a DTensor that shares the shard's memory and has the placements of `p`. If `p` is not a DTensor,
        returns the shard itself."""
        if not isinstance(p, DTensor):
            return shard
        placed = torch.empty_like(p.detach(), dtype=shard.dtype)  # `from_local` would copy host memory to the card
        with torch.no_grad():
            placed.to_local().data = shard
        return placed

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        if not isinstance(p, DTensor):
            return full
        # Goes from the last dimension of the mesh (tensor parallelism) to its first (fully_shard), because fully_shard
        # has sharded the shards of tensor parallelism again.
        where = zip(p.device_mesh.shape, p.device_mesh.get_coordinate(), p.placements, strict=True)
        for size, place, placement in reversed([*where]):
            if not placement.is_replicate():
                pieces = full.chunk(size, placement.dim)  # the last pieces may be smaller, or missing
                full = pieces[place] if place < len(pieces) else full.narrow(placement.dim, 0, 0)
        return full.clone(memory_format=torch.contiguous_format)


def in_full(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor; returns a plain tensor unchanged. Gathers one mesh dimension at a time,
    because torch warns if a single call gathers all dimensions. All ranks of the mesh must call this function."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = [*tensor.placements]
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


class AmongSeveral(InPlace):
    """The Lightning strategy of one of several processes: Lightning sees a single device, but barrier and broadcast are
    collectives of all ranks. `broadcast` always sends the object of rank 0."""

    strategy_name = "among_several"

    def __init__(self, ranks: Several) -> None:
        super().__init__()
        self.ranks = ranks
        # world_size stays 1: with a larger value, Lightning would run a collective after each step
        self.global_rank = ranks.rank

    @property
    def root_device(self) -> torch.device:
        return self.ranks.place

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def barrier(self, *_: object, **__: object) -> None:
        self.ranks.barrier()

    def broadcast(self, obj: object, src: int = 0) -> object:
        return self.ranks.broadcast(obj)

    def save_checkpoint(self, checkpoint: dict, filepath: str | Path, storage_options: object = None) -> None:
        """Saves a checkpoint. Called on all processes. If the strategy divides the model, each process writes its own
        part; otherwise rank 0 writes the full model."""
        self.checkpoint_io.save_checkpoint(checkpoint, filepath)

    def model_to_device(self) -> None:
        """Moves the model to the device. If the strategy divides the model, moves only the model's buffers: its
        parameters are already on their device, and torch refuses to move offloaded shards."""
        if not self.ranks.divides:
            super().model_to_device()
            self.ranks.moved()
        for _, holder, key, buffer in buffers(self.lightning_module):
            setattr(holder, key, buffer if buffer.is_meta else buffer.to(self.root_device))
