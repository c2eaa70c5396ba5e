"""Saves and restores the random states of dropout, so that a resumed run draws what the unbroken one would have drawn.

With another number of processes, or other shards, the old states do not fit. Then each process seeds anew with the
seed, the step and the index of its data. Dropout's masks differ from the unbroken run's then; everything else is the
same to the bit.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from lowmem.system.random_state import captured, restored
from lowmem.system.units import quantity
from lowmem.techniques.strategy.contract import OneDevice

log = logging.getLogger(__name__)

KINDS = ("cpu", "cuda")  # names of the generators in a checkpoint, in the order of `captured`


def capture(ranks: OneDevice, device: torch.device) -> dict:
    """Returns the states of all processes with their roles, the same on every process, for a checkpoint."""
    own = dict(zip(KINDS, captured(device), strict=False)) | {"data_rank": ranks.data_rank}
    return {"random_states": ranks.all_gather(own), "strategy": type(ranks).__name__}


def restore(saved: Mapping, ranks: OneDevice, device: torch.device, window: int) -> None:
    """Restores the states. Args: saved: the result of `capture`, with other keys; window: the number of windows
    done."""
    every = saved["random_states"]
    every = [every | {"data_rank": 0}] if isinstance(every, dict) else every  # written when there was only one
    if not _same(every, saved.get("strategy"), ranks):
        log.info(
            "resume=: dropout masks will differ from an unbroken run, because the checkpoint has the random states of "
            f"{quantity(len(every), 'process')} ({saved.get('strategy')}), which do not match this run."
        )
        if not ranks.several:  # with several, each process has seeded itself
            torch.manual_seed(torch.initial_seed() + window)
        return
    own: dict[str, Tensor] = every[ranks.rank]
    restored([own[kind] for kind in KINDS if kind in own], device)


def _same(every: list[dict], strategy: str | None, ranks: OneDevice) -> bool:
    """Returns whether each process has a saved state of the same data and the same shard of the model. The strategy
    names the shard, unless processes differ by their data alone."""
    data_ranks, saved_ranks = ranks.all_gather(ranks.data_rank), [state["data_rank"] for state in every]
    return saved_ranks == data_ranks and (strategy == type(ranks).__name__ or len({*data_ranks}) == len(data_ranks))
