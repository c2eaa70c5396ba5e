"""Saves the states of the random number generators in a checkpoint and restores them, so that a resumed run draws the
same random numbers, such as dropout masks, as a run without interruption.

The saved states are not restored if the number of processes or their data ranks have changed, or if the strategy has
changed and several processes read the same data. Then each process is seeded from the run's seed, the number of
completed windows and, with several processes, its data rank (in a pipeline also its rank). In this case the random
numbers differ from those of a run without interruption.
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
    """Returns the states and data ranks of all processes and the name of the strategy, for a checkpoint. All processes
    must call this function, and get equal results."""
    own = dict(zip(KINDS, captured(device), strict=False)) | {"data_rank": ranks.data_rank}
    return {"random_states": ranks.all_gather(own), "strategy": type(ranks).__name__}


def restore(saved: Mapping, ranks: OneDevice, device: torch.device, window: int) -> None:
    """Restores the states of a checkpoint, or seeds this process if the states do not match this run. All processes
    must call this function.

    Args:
        saved: the result of `capture`; further keys are ignored.
        ranks: the strategy.
        device: the device that computes.
        window: the number of completed windows.
    """
    every = saved["random_states"]
    # earlier versions saved the states of a single process
    every = [every | {"data_rank": 0}] if isinstance(every, dict) else every
    if not _same(every, saved.get("strategy"), ranks):
        log.info(
            "resume=: dropout masks will differ from an unbroken run, because the checkpoint has the random states of "
            f"{quantity(len(every), 'process')} ({saved.get('strategy')}), which do not match this run."
        )
        if not ranks.several:  # with several processes, `before_training` has already seeded each process
            torch.manual_seed(torch.initial_seed() + window)
        return
    own: dict[str, Tensor] = every[ranks.rank]
    restored([own[kind] for kind in KINDS if kind in own], device)


def _same(every: list[dict], strategy: str | None, ranks: OneDevice) -> bool:
    """Returns True if the saved states match this run: the processes have equal data ranks, in the same order, and
    either the strategy is the same or no two processes read the same data. All processes must call this function."""
    data_ranks, saved_ranks = ranks.all_gather(ranks.data_rank), [state["data_rank"] for state in every]
    return saved_ranks == data_ranks and (strategy == type(ranks).__name__ or len({*data_ranks}) == len(data_ranks))
