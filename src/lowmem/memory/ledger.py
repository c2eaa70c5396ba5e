"""Defines the ledger, which assigns long-lived storages to categories (weights, gradients, ...) and sides (device,
host, drive).

The memory meter sums the ledger's bytes, and the tracker takes the categories of long-lived storages from the ledger.
The side of a tensor follows from its role, not from `tensor.device`, so a run on a CPU shows the memory that a card
would need. Bytes are counted per storage, so tied weights and views count once.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lowmem.system.torch_private import is_traceable_wrapper_subclass, storage_key
from lowmem.system.units import CATEGORIES, HOST_CATEGORIES

Side = Literal["device", "host", "drive"]


class Owner(NamedTuple):
    """Tensors of one category on one side. `tensors` returns the tensors that exist at the time of the call. The ledger
    calls `tensors` whenever it lists storages or sums bytes, but the memory meter caches some sums
    (`MemoryMeter._held_bytes`)."""

    category: str
    side: Side
    tensors: Callable[[], Iterable[Tensor]]


class OwnedStorage(NamedTuple):
    """A storage that existed when `Ledger.storages` was called, with its category and side."""

    owner: Owner  # if several owners have this storage, the one that was registered first
    bytes: int
    storage: torch.UntypedStorage


class Ledger:
    """The owners of a run's long-lived tensors. The ledger does not count other tensors. An active tracker also follows
    tensors without an owner in the ledger: `tracker.belongs` gives some of them a category (for example tiles of the
    head, and gradients on their way to the host), and the rest count as activations or as "other"."""

    def __init__(self) -> None:
        self.owners: list[Owner] = []

    def own(self, category: str, tensors: Callable[[], Iterable[Tensor]], side: Side = "device") -> None:
        """Registers an owner. If several owners have a storage, it counts only for the one that was registered first.
        Args: see `Owner`."""
        self.owners.append(Owner(category, side, tensors))

    def storages(self) -> dict[int, OwnedStorage]:
        """Returns the storages of the current tensors of all owners, by storage key."""
        by_key: dict[int, OwnedStorage] = {}
        for owner in self.owners:
            for tensor in owner.tensors():
                for inner in plain_tensors(tensor):
                    storage = inner.untyped_storage()
                    by_key.setdefault(storage_key(storage), OwnedStorage(owner, storage.nbytes(), storage))
        return by_key

    def bytes(self, side: Side = "device") -> dict[str, int]:
        """Returns the current bytes of each category on one side."""
        total, seen = dict.fromkeys(HOST_CATEGORIES if side == "host" else CATEGORIES, 0), set()
        for owner in self.owners:
            counts = owner.side == side
            for tensor in owner.tensors():
                for inner in plain_tensors(tensor):
                    storage = inner.untyped_storage()
                    if (key := storage_key(storage)) not in seen:
                        seen.add(key)
                        if counts:
                            total[owner.category] += storage.nbytes()
        return total


PLAIN = (Tensor, nn.Parameter)


def plain_tensors(tensor: Tensor) -> Iterable[Tensor]:
    """Returns the tensors that store a tensor's data: the tensor itself, or the inner tensors of a wrapper subclass.
    The storage of a wrapper, such as a quantized tensor, reports the size of the unquantized tensor but has no
    memory."""
    if type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor):
        return (tensor,)
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    # the attributes of a DTensor also contain its mesh, which is not a tensor
    return [plain for wrapped in inner if isinstance(wrapped, Tensor) for plain in plain_tensors(wrapped)]


def weights(module: nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers that are not on the meta device. Callers should keep the list, because walking
    the modules takes longer than summing the bytes."""
    return [*parameters(module), *buffers(module)]


def parameters(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if not p.is_meta]


def buffers(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module.buffers() if not buffer.is_meta]


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    return (p.grad for p in parameters if p.grad is not None)


def optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields all tensors of the optimizer state, including tensors in nested dictionaries, lists and tuples (8-bit
    optimizers have such state)."""
    todo = list(optimizer.state.values())  # a copy, here and below: the host thread may add state at the same time
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            todo += list(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)


def paged_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields the optimizer state that is in CUDA unified memory. CUDA pages this memory between card and host, and
    torch's allocator does not count it."""
    return (tensor for tensor in optimizer_state(optimizer) if getattr(tensor, "is_paged", False))
