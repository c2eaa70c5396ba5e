"""Whether two runs ended in the same: every tensor to the bit, whatever it is nested in."""

import torch

from lowmem.checkpoint import complete
from lowmem.memory.ledger import parts


def last(run):
    """What the newest checkpoint of a run folder holds of the training itself."""
    saved = torch.load(complete(run / "checkpoints")[-1], weights_only=True)
    elsewhere = ("loops", "callbacks", "pytorch-lightning_version", "epoch", "hparams_name", "hyper_parameters")
    return {key: value for key, value in saved.items() if key not in elsewhere}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and all(map(torch.equal, parts(one), parts(other)))
    return one == other
