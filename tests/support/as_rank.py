"""Lets this process act as each rank of a group in turn, with torch's fake process group, whose collectives send
nothing. `saved_by` writes a checkpoint of several ranks in the same steps as `torch.distributed.checkpoint.save`."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lowmem.saving.checkpoint_folder import _Writer
from lowmem.system.torch_private import FakeStore


@contextmanager
def as_rank(rank, size, *names):
    """Enters a fake process group as `rank`. Yields its device mesh.

    Args:
        names: nothing, or a name for the mesh's dimension. torch caches meshes by name, so different ranks of equal
            meshes need different names.
    """
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=names or None)
    finally:
        dist.destroy_process_group()


def part_of(whole, mesh, dim=0):
    """Returns a DTensor with this rank's shard of a tensor along `dim`. The shards of the last ranks may be smaller, or
    empty."""
    pieces = whole.chunk(mesh.size(), dim) if whole.dim() else ()
    mine = mesh.get_local_rank()
    empty = whole.narrow(dim, 0, 0)
    piece = (pieces[mine] if mine < len(pieces) else empty).clone()
    return DTensor.from_local(piece, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())


def saved_by(size, folder, tensors, content=None, dim=0):
    """Writes the checkpoint folder of `size` ranks. Each rank has a shard of every tensor along `dim`, and a copy of
    every scalar."""
    folder.mkdir(parents=True)
    planners, plans, results = [], [], []
    for rank in range(size):
        with as_rank(rank, size) as mesh:
            parts = {name: part_of(one, mesh, dim % one.dim()) if one.dim() else one for name, one in tensors.items()}
            planners.append(dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
            planners[-1].set_up_planner(parts, is_coordinator=rank == 0)
            plans.append(planners[-1].create_local_plan())
    plans, metadata = planners[0].create_global_plan(plans)
    writers = [_Writer(folder, rank, content or {}) for rank in range(size)]
    for writer, planner, plan in zip(writers, planners, plans, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)


def whole_of(parts, dim=0):
    return torch.cat(parts, dim)
