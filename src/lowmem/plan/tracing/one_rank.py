"""Simulates one rank of a run on several devices in a single process: the rank's strategy runs over torch's fake
process group.

The fake process group sends nothing, and does not write into the tensors that receive data. This is sufficient for fake
tensors: they have no values, and all buffers of a collective are allocated as in a run. Only one rank computes, so a
trace takes about the same time for 512 devices as for two. Source: torch/testing/_internal/distributed/fake_pg.py.
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
    """Context manager that joins a fake process group as one rank, and yields the strategy of this rank. For a run on
    one device, only yields `OneDevice()`. Args: run: resolved settings; rank: 0 to run.devices - 1.

    Raises:
        Refused: the run has several devices, and this process already belongs to a process group.
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
        ranks.all_max = ranks.broadcast = lambda value: value  # values are assumed to be equal on all ranks
        ranks.all_gather = lambda value: [value] * run.devices
        ranks.rank_0_first = nullcontext
        ranks.in_numbers = True  # each rank builds the full model as fake tensors
        with (
            patch.object(DistributedDataParallel, "__init__", _reduces_without_numbers),
            patch.object(load_in_parts, "shard_and_send", _laid_out),
            patch.object(TensorParallel, "_compare", lambda *_: None),  # the original method compares values of weights
            patch.object(DeviceMesh, "__init__", _with_numbers),
        ):
            yield ranks
    finally:
        dist.destroy_process_group()


def _laid_out(model: nn.Module, ranks: OneDevice, lay_out: Callable[[], object], device: torch.device) -> None:
    """Replaces `load_in_parts.shard_and_send`: shards the model, but broadcasts no weights from rank 0, because fake
    tensors have no values."""
    lay_out()


_mesh = DeviceMesh.__init__


def _with_numbers(mesh: DeviceMesh, *args, **kwargs) -> None:
    """Replaces the constructor of DeviceMesh: calls the original constructor outside of the fake tensor mode, because
    it reads the values of a tensor of rank numbers."""
    with unset_fake_temporarily():
        _mesh(mesh, *args, **kwargs)


_init = DistributedDataParallel.__init__


def _reduces_without_numbers(ddp: DistributedDataParallel, *args, **kwargs) -> None:
    """Replaces the constructor of DDP, to avoid the parts of DDP's C++ code that read values. These parts compare the
    weights of the ranks, read the results of collectives, and rebuild the buckets in the order in which gradients
    become ready. Rebuilding would not change the total bytes of the buckets."""
    _init(ddp, *args, **kwargs | {"init_sync": False})
    ddp.register_comm_hook(None, _sent)
    ddp.reducer = InThisOrder(ddp.reducer)


def _sent(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class InThisOrder:
    """Wraps DDP's reducer so that its buckets are never rebuilt."""

    def __init__(self, reducer: object) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> object:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
