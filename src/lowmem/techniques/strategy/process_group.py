"""Joins the group of processes that train together before anything is built, and leaves it in the end, come what may.

The program that started the processes has set torchrun's environment variables, which say how many there are and where
they meet. Without them there is one process.
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

PLACES = ("output_dir", "cache_dir")  # keys whose folders may differ between machines

# Reducers of groups that were left while a failure's traceback still referred to DDP. A group costs three threads; the
# next one that is left frees those whose traceback is gone.
_still_referenced: list[tuple[ref, dist.ProcessGroup]] = []


@contextmanager
def process_group(run: Run) -> Iterator[OneDevice]:
    """Yields the strategy of a process that has joined the group. Args: run: checked, with a device.

    Raises:
        Refused: some rank has other code or another run.
        RankLost: another rank has ended, or does not answer.
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
            with ranks.rank_0_first("write the model"):  # and the other things that rank 0 does alone
                pass
            ranks.barrier()  # keeps the store open until all ranks know that rank 0 is done
        leave(ranks)
    except Exception as error:
        if gone := lost_ranks.rank_lost(error, run.strategy.timeout):
            raise gone from error
        raise
    finally:
        if dist.is_initialized() and not _waits_for_others(run):
            leave(ranks)


def leave(ranks: OneDevice | None = None) -> None:
    """Leaves the process group so that Python drops the last reference to it.

    DDP's Reducer refers to the group from C++, and is freed with the GIL held. If that reference is the last one,
    freeing the group joins gloo's threads, while one of them may wait for the GIL to free a Python object: a deadlock.
    Python's own reference to a group is dropped without the GIL.

    A group that stays keeps its threads to the end of the process. One that waits for the GIL by then, on a machine so
    busy that it has not run since the last collective, is ended by Python inside C++, which aborts the process.

    Args: ranks: of this process; None: there is no strategy, or it could not be made.
    """
    group = dist.group.WORLD  # keeps the group until the Reducer is gone
    reducer = ranks.release() if ranks else None
    _still_referenced[:] = [(other, its_group) for other, its_group in _still_referenced if other() is not None]
    if reducer and reducer() is not None:
        _still_referenced.append((reducer, group))
    dist.destroy_process_group()


def _waits_for_others(run: Run) -> bool:
    """Returns True if leaving the group waits for other ranks: NCCL's waits for collectives under way, and so for ranks
    that wait for this process, which then could not report its error. At the end of the process it is aborted."""
    return run.device == "cuda" and dist.get_world_size() > 1


def _join(run: Run) -> dist.Store:
    if run.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # exchanges over the host do not make a card wait
    backend = "cpu:gloo,cuda:nccl" if run.device == "cuda" else "gloo"
    limit = timedelta(seconds=run.strategy.timeout)
    store, number, size = (
        next(dist.rendezvous("env://", timeout=limit)) if rank_environment.is_rank() else (dist.HashStore(), 0, 1)
    )
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=limit)
    return dist.PrefixStore("lowmem", store)


def _compare(ranks: OneDevice, run: Run) -> None:
    """Checks that all ranks run the same code with the same config: else they would wait for each other, or train
    another model."""
    values = {key: str(value) for key, value in run.as_dict().items() if key not in PLACES}
    values |= {"the code": _code(), "torch": torch.__version__, "transformers": transformers.__version__}
    require_same(
        ranks, values, "would not train the same model. Start all ranks with the same command and the same code"
    )


def require_same(ranks: OneDevice, values: dict[str, object], why: str) -> None:
    """Checks that all ranks have the same values. Args: values: this rank's values, by their names; why: the sentence
    that says why they must not differ, and what to do.

    Raises:
        Refused: on all ranks.
    """
    all_values = ranks.all_gather(values)
    for number, other in enumerate(all_values):
        if differing := [key for key in values | other if other.get(key) != all_values[0].get(key)]:
            raise Refused(f"Rank {number} and rank 0 differ in {', '.join(differing)}: they {why}.")


def _code() -> str:
    digest = sha256()
    for file in sorted(Path(lowmem.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
