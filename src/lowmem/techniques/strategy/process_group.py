"""The group of processes that train together: joined before anything is built, left in the end, come what may.

Who started them has said by torchrun's protocol, in the environment, how many there are and where they meet; where
nobody has, there is one.
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

PLACES = ("output_dir", "cache_dir")  # that may be others on each machine

# Groups that were left while the traceback of a failure still referred to DDP, each with its Reducer. A group costs
# three threads; the next one to be left drops those whose traceback is gone.
_still_referenced: list[tuple[ref, dist.ProcessGroup]] = []


@contextmanager
def process_group(run: Run) -> Iterator[OneDevice]:
    """Args: run: checked, with a device.

    Raises:
        Refused: other code or another run on some rank.
        RankLost: another one that is gone, or does not answer.
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
            with ranks.rank_0_first("write the model"):  # and all that is rank 0's alone
                pass
            ranks.barrier()  # and holds what they meet by, until all have heard that it has
        leave(ranks)
    except Exception as error:
        if gone := lost_ranks.rank_lost(error, run.strategy.timeout):
            raise gone from error
        raise
    finally:
        if dist.is_initialized() and not _waits_for_others(run):
            leave(ranks)


def leave(ranks: OneDevice | None = None) -> None:
    """Leaves the process group, and sees to it that the last reference to it is one of Python's.

    DDP's Reducer refers to the group from C++. It is freed with the GIL held; if its reference is the last one, freeing
    the group joins gloo's threads while one of them may wait for the GIL to drop a Python object, and both wait for
    ever. Python's own reference to a group is dropped without the GIL.

    Args: ranks: of this process; None: there is no strategy, or it could not be made.
    """
    group = dist.group.WORLD  # held until the Reducer is gone
    reducer = ranks.release() if ranks else None
    _still_referenced[:] = [(other, its_group) for other, its_group in _still_referenced if other() is not None]
    if reducer and reducer() is not None:
        _still_referenced.append((reducer, group))
    dist.destroy_process_group()


def _waits_for_others(run: Run) -> bool:
    """Whether leaving the group does: NCCL's waits for what is under way, and so for those who wait for this process,
    which then could not say what it has failed of. When the process ends, it is aborted."""
    return run.device == "cuda" and dist.get_world_size() > 1


def _join(run: Run) -> dist.Store:
    if run.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # what is said over the host does not make a card wait
    backend = "cpu:gloo,cuda:nccl" if run.device == "cuda" else "gloo"
    limit = timedelta(seconds=run.strategy.timeout)
    store, number, size = (
        next(dist.rendezvous("env://", timeout=limit)) if rank_environment.is_rank() else (dist.HashStore(), 0, 1)
    )
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=limit)
    return dist.PrefixStore("lowmem", store)


def _compare(ranks: OneDevice, run: Run) -> None:
    """All ranks run the same code with the same config: else they would wait for each other, or train another model."""
    said = {key: str(value) for key, value in run.as_dict().items() if key not in PLACES}
    said |= {"the code": _code(), "torch": torch.__version__, "transformers": transformers.__version__}
    require_same(ranks, said, "would not train one model. Start all of them with the same command and the same code")


def require_same(ranks: OneDevice, said: dict[str, object], why: str) -> None:
    """Args: said: by this rank, by what it is about; why: they are not to differ in that, and what to do.

    Raises:
        Refused: on all ranks.
    """
    every = ranks.all_gather(said)
    for number, other in enumerate(every):
        if differing := [key for key in said | other if other.get(key) != every[0].get(key)]:
            raise Refused(f"Rank {number} and rank 0 differ in {', '.join(differing)}: they {why}.")


def _code() -> str:
    digest = sha256()
    for file in sorted(Path(lowmem.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
