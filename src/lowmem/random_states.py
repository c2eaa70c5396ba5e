"""What dropout draws: a resumed run goes on drawing where it stopped, if as many processes go on as stopped.

With another number of them, or divided otherwise, there is no state of each to go on from: then all draw anew, seeded
with the seed, the step and the number of the data that a process reads. The masks are others than in the unbroken run,
and as good ones; everything else is the same to the bit.
"""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from lowmem.strategy.one_device import OneDevice

log = logging.getLogger(__name__)


def capture(ranks: OneDevice, device: torch.device) -> dict:
    """What a checkpoint holds, the same from every process: each's state, and who they are."""
    own = {"cpu": torch.get_rng_state(), "data_rank": ranks.data_rank}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    return {"random_states": ranks.all_gather(own), "strategy": type(ranks).__name__}


def restore(saved: Mapping, ranks: OneDevice, device: torch.device, window: int) -> None:
    """Args: saved: what `capture` returned, with whatever else; window: how many are done."""
    every = saved["random_states"]
    every = [every | {"data_rank": 0}] if isinstance(every, dict) else every  # of before there were several
    if not _same(every, saved.get("strategy"), ranks):
        log.info(f"resume=: dropout is drawn anew: that run had {len(every)} processes of {saved.get('strategy')}.")
        if not ranks.several:  # several have seeded themselves, each its own
            torch.manual_seed(torch.initial_seed() + window)
        return
    own: dict[str, Tensor] = every[ranks.rank]
    torch.set_rng_state(own["cpu"])
    if device.type == "cuda" and "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], device)


def _same(every: list[dict], strategy: str | None, ranks: OneDevice) -> bool:
    """Whether each process goes on with what one drew for the same data, and for the same part of the model: that is
    told by the strategy, or there are no parts but by data."""
    here, there = ranks.all_gather(ranks.data_rank), [one["data_rank"] for one in every]
    return there == here and (strategy == type(ranks).__name__ or len({*here}) == len(here))
