"""Saves and restores the random states of dropout, so that a resumed run draws the same numbers as an unbroken run.

If the number of processes or the sharding has changed, the saved states do not fit. Then each process is seeded with
the seed, the step and the index of its data. Dropout masks then differ from the unbroken run's; everything else is
equal to the bit.
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
    """Returns the states of all processes with their data ranks, for a checkpoint; the result is equal on every
    process."""
    own = dict(zip(KINDS, captured(device), strict=False)) | {"data_rank": ranks.data_rank}
    return {"random_states": ranks.all_gather(own), "strategy": type(ranks).__name__}


def restore(saved: Mapping, ranks: OneDevice, device: torch.device, window: int) -> None:
    """Restores the states.

    Args:
        saved: the result of `capture`, which may have further keys.
        window: the number of completed windows.
    """
    every = saved["random_states"]
    # an earlier version saved a single process
    every = [every | {"data_rank": 0}] if isinstance(every, dict) else every
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
    """Returns whether each process has a saved state for its data and its shard of the model. The strategy's name
    stands for the sharding; it does not matter if processes differ in their data alone."""
    data_ranks, saved_ranks = ranks.all_gather(ranks.data_rank), [state["data_rank"] for state in every]
    return saved_ranks == data_ranks and (strategy == type(ranks).__name__ or len({*data_ranks}) == len(data_ranks))
