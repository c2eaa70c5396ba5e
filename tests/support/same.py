"""Reads the last checkpoint of a run, and compares nested structures of tensors."""

import torch

from lowmem.memory.ledger import plain_tensors
from lowmem.saving.checkpoint import complete
from lowmem.step.fp32_halves import joined


def last(run):
    """Returns the training state in the newest checkpoint of a run folder, without Lightning's own entries. Weights
    that are stored in two halves are joined."""
    saved = torch.load(complete(run / "checkpoints")[-1], weights_only=True)
    state, rests = saved["state_dict"], saved.pop("rests", {})
    whole = {
        state[name].data_ptr(): joined(state[name], rest) for name, rest in rests.items()
    }  # address of a weight -> joined weight, so that tied weights stay tied
    saved["state_dict"] = {name: whole.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}
    elsewhere = ("loops", "callbacks", "pytorch-lightning_version", "epoch", "hparams_name", "hyper_parameters")
    return {key: value for key, value in saved.items() if key not in elsewhere}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and all(map(torch.equal, plain_tensors(one), plain_tensors(other)))
    return one == other
