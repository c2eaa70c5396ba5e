"""Simulates one rank without the others: its strategy runs unchanged over torch's fake process group.

Sent data arrives nowhere and received data has no numbers, which is enough for tensors without memory: every buffer
that an engine gathers, reduces or sends is allocated as in a run. So 512 devices take no longer than two.
Source: torch/testing/_internal/distributed/fake_pg.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.system.errors import Refused
from lowmem.system.torch_private import FakeStore, unset_fake_temporarily
from lowmem.techniques.strategy import load_in_parts
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.techniques.strategy.tensor_parallel import TensorParallel


@contextmanager
def as_rank(run: Run, rank: int = 0) -> Iterator[OneDevice]:
    """Yields the strategy of one rank. Args: run: resolved; rank: below run.devices.

    Raises:
        Refused: this process belongs to a running process group.
    """
    if not run.several:
        yield OneDevice()
        return
    if dist.is_initialized():
        raise Refused(
            "A process of a multi-process run cannot search recipes. Type the same overrides after python plan.py."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.devices)
    try:
        ranks = instantiate(run.strategy)(device="cpu", devices=run.devices)
        ranks.all_max = ranks.broadcast = lambda value: value  # collectives answer as if all ranks had the same value
        ranks.all_gather = lambda value: [value] * run.devices
        ranks.rank_0_first = nullcontext
        ranks.in_numbers = True  # each rank has the full model, without numbers
        with (
            patch.object(DistributedDataParallel, "__init__", _reduces_without_numbers),
            patch.object(load_in_parts, "shard_and_send", _laid_out),
            patch.object(TensorParallel, "_compare", lambda *_: None),  # it compares numbers, once
            patch.object(DeviceMesh, "__init__", _with_numbers),
        ):
            yield ranks
    finally:
        dist.destroy_process_group()


def _laid_out(model: nn.Module, ranks: OneDevice, lay_out: Callable[[], object], device: torch.device) -> None:
    """Lays out the model without a broadcast: no numbers have to come from rank 0."""
    lay_out()


_mesh = DeviceMesh.__init__


def _with_numbers(mesh: DeviceMesh, *args, **kwargs) -> None:
    """Builds a mesh outside the fake mode, because it reads its tensor of ranks."""
    with unset_fake_temporarily():
        _mesh(mesh, *args, **kwargs)


_init = DistributedDataParallel.__init__


def _reduces_without_numbers(ddp: DistributedDataParallel, *args, **kwargs) -> None:
    """Builds DDP without what its C++ does with numbers: it compares weights, reads the results of communication, and
    once rebuilds its buckets by the order in which gradients came, with the same bytes."""
    _init(ddp, *args, **kwargs | {"init_sync": False})
    ddp.register_comm_hook(None, _sent)
    ddp.reducer = InThisOrder(ddp.reducer)


def _sent(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class InThisOrder:
    """Wraps a reducer of gradients so that its buckets are never rebuilt."""

    def __init__(self, reducer: object) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> object:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
