"""Joins the process group before the model is built, creates the strategy, and leaves the group at the end of the run.

The launcher sets torchrun's environment variables, such as WORLD_SIZE and MASTER_ADDR. Without these variables, the
group has a single process.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from weakref import ref

import torch
import torch.distributed as dist
import transformers

import lowmem
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.system import rank_environment
from lowmem.system.errors import Refused
from lowmem.techniques.strategy import lost_ranks
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.techniques.strategy.rank_0_turns import Turns

log = logging.getLogger(__name__)

PLACES = ("output_dir", "cache_dir")  # keys whose values may differ between ranks

# (weak reference to DDP's Reducer, group) for each group that could not be freed because an error's traceback still
# referred to DDP. The next call of `leave` drops the groups whose Reducer has been freed; until then each group keeps
# three threads.
_still_referenced: list[tuple[ref, dist.ProcessGroup]] = []


@contextmanager
def process_group(run: Run) -> Iterator[OneDevice]:
    """Context manager that joins the process group, yields the strategy, and leaves the group at the end, also after an
    error. With NCCL and several ranks, however, the group stays open after an error until the process ends
    (`_waits_for_others`). A strategy for one process, such as strategy=auto, is yielded without a group. Args: run:
    checked settings, with a known device.

    Raises:
        Refused: ranks have different code, settings, or versions of torch or transformers.
        RankLost: another rank has exited, does not respond, or did not join; or another program uses the port of the
            rendezvous.
    """
    if not run.several:
        yield instantiate(run.strategy)(device=run.device, devices=1)
        return
    ranks = None
    try:
        store = _join(run)
        ranks = instantiate(run.strategy)(device=run.device, devices=run.devices)
        ranks.turns = Turns(store, ranks.rank == 0, run.strategy.timeout)
        with ranks.turns.heartbeat():
            _compare(ranks, run)
            yield ranks
            with ranks.rank_0_first("write the model"):  # other ranks wait until rank 0 has finished its work
                pass
            ranks.barrier()  # keeps the store open until all ranks have read that rank 0 has finished
        leave(ranks)
    except Exception as error:
        if gone := lost_ranks.rank_lost(error, run.strategy.timeout):
            raise gone from error
        raise
    finally:
        if dist.is_initialized() and not _waits_for_others(run):
            leave(ranks)


def leave(ranks: OneDevice | None = None) -> None:
    """Leaves the process group. The order of the steps ensures that Python, not C++ code, drops the last reference to
    the group.

    DDP's Reducer refers to the group from C++, and is freed while the GIL is held. If the Reducer had the last
    reference, freeing the group would join gloo's threads with the GIL held. This deadlocks if one of these threads
    waits for the GIL in order to free a Python object. A reference from Python, in contrast, is dropped with the GIL
    released.

    A group that is not freed keeps its threads until the process ends. On a very busy machine, one of these threads may
    wait for the GIL at interpreter shutdown. Python then ends this thread inside C++ code, which aborts the process.

    Args: ranks: the strategy; None: the strategy was not created.
    """
    group = dist.group.WORLD  # keeps the group alive until the Reducer is freed
    reducer = ranks.release() if ranks else None
    _still_referenced[:] = [(other, its_group) for other, its_group in _still_referenced if other() is not None]
    if reducer and reducer() is not None:
        _still_referenced.append((reducer, group))
    dist.destroy_process_group()


def _waits_for_others(run: Run) -> bool:
    """Returns True if leaving the group after an error might block. With NCCL, leaving waits for collectives in
    progress, and so for ranks that in turn wait for this process. Then the process could not report its error. If the
    process does not leave the group, the group is aborted when the process ends."""
    return run.device == "cuda" and dist.get_world_size() > 1


def _join(run: Run) -> dist.Store:
    if run.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # host tensors use gloo, because a collective of NCCL would make the card wait
    backend = "cpu:gloo,cuda:nccl" if run.device == "cuda" else "gloo"
    limit = timedelta(seconds=run.strategy.timeout)
    store, number, size = (
        next(dist.rendezvous("env://", timeout=limit)) if rank_environment.is_rank() else (dist.HashStore(), 0, 1)
    )
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=limit)
    return dist.PrefixStore("lowmem", store)


def _compare(ranks: OneDevice, run: Run) -> None:
    """Checks that all ranks have equal code, settings (except `PLACES`), and versions of torch and transformers. Ranks
    that differ might wait for each other until a timeout, or train different models. Raises: Refused."""
    values = {key: str(value) for key, value in run.as_dict().items() if key not in PLACES}
    values |= {"the code": _code(), "torch": torch.__version__, "transformers": transformers.__version__}
    require_same(
        ranks, values, "would not train the same model. Start all ranks with the same command and the same code"
    )


def require_same(ranks: OneDevice, values: dict[str, object], why: str) -> None:
    """Checks that all ranks, which must all call this function, have equal values.

    Args:
        ranks: the strategy.
        values: this rank's values, by name.
        why: continues the error message after "they": the problem, and what to do.

    Raises:
        Refused: values differ. All ranks raise the error.
    """
    all_values = ranks.all_gather(values)
    for number, other in enumerate(all_values):
        if differing := [key for key in values | other if other.get(key) != all_values[0].get(key)]:
            raise Refused(f"Rank {number} and rank 0 differ in {', '.join(differing)}: they {why}.")


def _code() -> str:
    """Returns a SHA-256 digest of the content of the package's Python files."""
    digest = sha256()
    for file in sorted(Path(lowmem.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
