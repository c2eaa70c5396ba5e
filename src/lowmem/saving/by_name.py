"""Converts between the shards of a process and the full tensors of a checkpoint, by parameter name.

A strategy that divides the model saves a checkpoint as a folder, every other strategy as a file, and every strategy can
load both. (Exception: `optimizer_state` refuses some files of earlier versions.) The weights and the optimizer state in
a checkpoint are full tensors in the model's original layout, so another strategy or another number of processes can
load them. Who calls this module:

    saving a folder             `AtomicCheckpointIO`: tensors_and_rest
    loading a folder            `AtomicCheckpointIO`: load
    saving either kind          `CausalLM`: stepped; the checkpoint stores the names
    loading weights             `CausalLM`: load_weights, if the model is divided or the checkpoint is a folder
    loading optimizer state     `CausalLM`: optimizer_state, with every strategy

The shards of a process are plain tensors (`OneDevice.local` in `techniques/strategy/contract.py`); in a pipeline they
are the full parameters of the process's stage. When saving, each shard becomes a piece of the full tensor. When
loading, each process reads its shards from the file or the folder.

If tensor parallelism shards a fused layer (such as query, key and value in one matrix), a shard is not a contiguous
part of the full tensor, so `as_dtensor` gathers the full tensor on every process. When a folder is loaded, one such
tensor exists at a time. When saving, all gathered tensors are kept until the checkpoint is written. Loading a folder
communicates only for these gathers, and loading a file does not communicate.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowmem.model.trainable import checkpoint_state
from lowmem.saving import checkpoint_folder
from lowmem.step.fp32_halves import joined
from lowmem.system.errors import Refused
from lowmem.techniques.optim.build import parameter_groups
from lowmem.techniques.strategy.contract import OneDevice

log = logging.getLogger(__name__)

WEIGHTS, STATE = "weights/", "optimizer/"


def stepped(module: LightningModule) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) for all trained parameters, in the order in which the optimizer numbers its state."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [(names[id(p)], p) for group in parameter_groups(module.model) for p in group["params"]]


def local_data(tensor: Tensor, ranks: OneDevice) -> Tensor:
    """Returns a buffer, or this process's shard of a parameter, as a plain tensor, without copying."""
    if isinstance(tensor, DTensor):
        return tensor.detach().to_local()
    return (ranks.local(tensor) if isinstance(tensor, nn.Parameter) else tensor).detach()


# --- saved -----------------------------------------------------------------------------------------------------------


def tensors_and_rest(checkpoint: dict, module: LightningModule) -> tuple[dict[str, Tensor], dict]:
    """Separates weights and optimizer state from the rest of a checkpoint. All processes must call this function.

    Returns:
        Two arguments of `checkpoint_folder.save`: `tensors`, the weights, buffers and tensors of the optimizer state by
        name; and `content`, the checkpoint without these tensors. `content` may have other tensors, such as random
        states.
    """
    tied, numbered, (optimizer,) = _tied(module), stepped(module), checkpoint["optimizer_states"]
    tensors = dict(_weights(checkpoint["state_dict"], module, tied))
    plain: dict[str, dict] = {}
    for (name, p), state in ((numbered[number], state) for number, state in optimizer["state"].items()):
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{STATE}{name}/{key}"] = module.ranks.as_dtensor(p, value) if value.dim() else value
            else:
                plain.setdefault(name, {})[key] = value
    everyone = {name: state for of_rank in module.ranks.all_gather(plain) for name, state in of_rank.items()}
    content = checkpoint | {"state_dict": {}, "tied": tied}
    return tensors, content | {"optimizer_states": [optimizer | {"state": everyone}]}


def _weights(state_dict: Mapping[str, Tensor], module: LightningModule, tied: dict) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(module.named_parameters())
    for name, tensor in state_dict.items():
        if tensor.is_meta:  # another process has this tensor
            continue
        if name in parameters:
            p = parameters[name]
            # save the shard that the optimizer updates, because `tensor` may not share its memory
            yield WEIGHTS + name, module.ranks.as_dtensor(p, local_data(p, module.ranks))
        elif name not in tied:  # a buffer
            yield WEIGHTS + name, tensor


def _tied(module: LightningModule) -> dict[str, str]:
    """Returns a mapping from each additional name of a tied parameter to the parameter's first name."""
    first_names = {id(p): name for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first_names[id(p)] for name, p in every if name != first_names[id(p)]}


# --- read ------------------------------------------------------------------------------------------------------------


def load(folder: Path) -> dict:
    """Returns the checkpoint in a folder, with the keys that `tensors_and_rest` received and the key `tied`.

    The values of weights and optimizer state stay in the folder. Each process reads its shards from two
    `CheckpointTensors`: `state_dict`, with the weights and buffers, and the value of the key `stored` in the only dict
    of `optimizer_states`, with the tensors of the optimizer state.
    """
    content, stored = checkpoint_folder.load(folder)
    for name, first_name in content["tied"].items():
        if WEIGHTS + first_name not in stored.tensors:  # the weight is frozen, so the checkpoint does not contain it
            continue
        stored.tensors[WEIGHTS + name] = stored.tensors[WEIGHTS + first_name]
        own = f"{STATE}{first_name}/"
        keys = [key.removeprefix(own) for key in stored.tensors if key.startswith(own)]
        stored.tensors |= {f"{STATE}{name}/{key}": stored.tensors[own + key] for key in keys}
    (optimizer,) = content["optimizer_states"]
    optimizer = optimizer | {"stored": stored.under(STATE)}
    return content | {"state_dict": stored.under(WEIGHTS), "optimizer_states": [optimizer]}


@torch.no_grad()
def load_weights(module: LightningModule, state_dict: Mapping[str, Tensor], rests: Mapping[str, Tensor]) -> None:
    """Loads a checkpoint's weights and buffers into this process's shards, one by one. All processes must call this
    function.

    Args:
        module: the module to fill.
        state_dict: name -> saved tensor: `CheckpointTensors` for a folder, otherwise the tensors of a file.
        rests: name -> lower 16 bits of the fp32 numbers of a weight, if the checkpoint stores the upper and lower bits
            separately.
    """
    parameters, tied = dict(module.named_parameters()), _tied(module)
    for name, tensor in checkpoint_state(module).items():
        if name not in tied and not tensor.is_meta:
            p, rest = parameters.get(name, tensor), rests.get(name)
            shard = local_data(p, module.ranks)
            _fill(shard, p, name, state_dict, module.ranks, lambda upper, rest=rest: _with_rest(upper, rest))


def _with_rest(upper: Tensor, rest: Tensor | None) -> Tensor:
    return upper if rest is None else joined(upper, rest)


def _fill(
    shard: Tensor,
    p: Tensor,
    name: str,
    tensors: Mapping[str, Tensor],
    ranks: OneDevice,
    widened: Callable[[Tensor], Tensor] = lambda saved: saved,
) -> None:
    """Copies this process's shard of a saved tensor into `shard`.

    Args:
        shard: receives the values.
        p: the parameter or buffer to which the saved tensor belongs. The tensor is sharded in the same way as `p`.
        name: name of the saved tensor.
        tensors: name -> saved tensor: `CheckpointTensors` for a folder, otherwise the tensors of a file.
        ranks: the strategy that shards the tensor.
        widened: converts a tensor of a file before the tensor is sharded: joins the upper half of a weight with its
            lower half. Not called for a folder, which stores no halves.
    """
    if not isinstance(tensors, checkpoint_folder.CheckpointTensors):
        shard.copy_(ranks.shard_of(p, widened(tensors[name])))
        return
    placed = ranks.as_dtensor(p, shard)
    tensors.read(name, placed)
    read = placed.to_local() if isinstance(placed, DTensor) else ranks.shard_of(p, placed)
    if read.data_ptr() != shard.data_ptr():  # `as_dtensor` has returned a copy instead of the shard's own memory
        shard.copy_(read)


class LazyState(Mapping[str, object]):
    """The optimizer state of one parameter. Each access reads the value from the checkpoint again. With tensor
    parallelism and a folder, reading the state of a fused layer is a collective, so all processes must read the same
    values in the same order. `readers` maps each key to a function that returns the value."""

    def __init__(self, readers: dict[str, Callable[[], object]]) -> None:
        self.readers = readers

    def __getitem__(self, key: str) -> object:
        return self.readers[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


def optimizer_state(module: LightningModule, optimizer: Optimizer, checkpoint: dict) -> dict:
    """Returns this process's shard of the saved optimizer state, as the argument of the optimizer's `load_state_dict`.
    Also removes, from the learning rate schedules in `checkpoint`, the values of parameter groups that this process
    does not have. All processes must call this function, and read the result together (see `LazyState`).

    Raises:
        Refused: the optimizer state must be sharded, and this checkpoint of an earlier version lacks the parameter
            names that sharding needs.
    """
    (theirs,) = checkpoint["optimizer_states"]
    names = checkpoint["lowmem"].get("stepped")  # None: written on one device by an earlier version without this key
    ours = stepped(module)
    if "stored" not in theirs and not module.ranks.divides and names in (None, [name for name, _ in ours]):
        return theirs
    if "stored" not in theirs and names is None:
        raise Refused(
            "resume=: this checkpoint of an earlier version does not record which parameter each optimizer state "
            "belongs to, so it cannot be sharded. Resume it with strategy=auto, save a new checkpoint, and resume "
            "from the new one."
        )
    in_folder = "stored" in theirs
    readers_of = (
        _readers_from_folder(theirs) if in_folder else _readers_from_file(theirs, names, checkpoint["state_dict"])
    )
    here = ((number, name, p) for number, (name, p) in enumerate(ours) if not p.is_meta)
    state = {number: LazyState(readers_of(name, p, module.ranks)) for number, name, p in here}
    if hasattr(optimizer, "get_config"):  # an optimizer of bitsandbytes, which restores only dicts
        state = {number: dict(values) for number, values in state.items()}
    groups = {group["role"]: group for group in theirs["param_groups"]}
    own = optimizer.state_dict()["param_groups"]
    _keep_own_groups(checkpoint["lr_schedulers"], list(groups), [group["role"] for group in own])
    return {
        "state": {number: values for number, values in state.items() if values},
        "param_groups": [groups[group["role"]] | {"params": group["params"]} for group in own],
    }


# (name of a parameter, the parameter, the strategy) -> the argument `readers` of `LazyState`
ReadersOf = Callable[[str, nn.Parameter, OneDevice], dict[str, Callable[[], object]]]


def _readers_from_folder(theirs: dict) -> ReadersOf:
    stored, keys = theirs["stored"], {}
    for name, _, key in (full.rpartition("/") for full in stored):
        keys.setdefault(name, []).append(key)

    def read(full: str, p: nn.Parameter, ranks: OneDevice) -> Tensor:
        like = stored[full]
        # False if `p` is a plain parameter and its state has another shape, such as one scale per block
        laid_out_alike = isinstance(p, DTensor) or like.shape == p.shape
        undivided = not (ranks.divides and like.dim() and laid_out_alike)
        shard = (
            torch.empty_like(like, device="cpu")
            if undivided
            else torch.empty_like(local_data(p, ranks), dtype=like.dtype)
        )
        _fill(shard, p, full, stored, OneDevice() if undivided else ranks)
        return shard

    def readers(name: str, p: nn.Parameter, ranks: OneDevice) -> dict[str, Callable[[], object]]:
        plain = {key: partial(_itself, value) for key, value in theirs["state"].get(name, {}).items()}
        return plain | {key: partial(read, f"{name}/{key}", p, ranks) for key in keys.get(name, ())}

    return readers


def _readers_from_file(theirs: dict, names: list[str], weights: Mapping[str, Tensor]) -> ReadersOf:
    # A tied weight has one state and several names in `weights`, all with the address of the same mapped memory.
    names_by_memory: dict[int, str] = {weights[name].data_ptr(): name for name in names}
    state = {name: theirs["state"].get(number, {}) for number, name in enumerate(names)}

    def readers(name: str, p: nn.Parameter, ranks: OneDevice) -> dict[str, Callable[[], object]]:
        values = state[name if name in state else names_by_memory[weights[name].data_ptr()]]
        with_dimensions = {key for key, value in values.items() if isinstance(value, Tensor) and value.dim()}
        return {
            key: partial(ranks.shard_of, p, value) if key in with_dimensions else partial(_itself, value)
            for key, value in values.items()
        }

    return readers


def _itself(value: object) -> object:
    return value


def _keep_own_groups(schedules: list[dict], saved_roles: list[str], own_roles: list[str]) -> None:
    """Changes saved learning rate schedules in place: their lists with one value per saved parameter group keep only
    the values of the groups that this process has."""
    for schedule in schedules if saved_roles != own_roles else ():
        for key, value in schedule.items():
            if isinstance(value, list) and len(value) == len(saved_roles):
                schedule[key] = [value[saved_roles.index(role)] for role in own_roles]
