"""Creates the optimizer of a model from the class that a yaml of conf/optim names, and changes the optimizer in place.

For every class:

- Parameter groups are formed by role, so that weight decay applies only to matrices and embeddings.
- A resume restores state in the dtype in which it was saved. Settings in the yaml, except lr, are not restored: the
  values of the resuming run apply.
- If the yaml has `embedding_bits`, each group has the key `state_bits`. Its value is `embedding_bits` for the embedding
  group, and 8 for all other groups.

For bitsandbytes' optimizers also:

- Adam, Lion and AdEMAMix apply weight decay before the update on every device, as torch's AdamW does.
- `state_bits` sets the bits of a group's state. Parameters with fewer than 4096 elements keep 32-bit state.
- An 8-bit second moment is not rounded to zero, except in a block of zeros.
- 8-bit Adam and Lion have a fast step on a CPU (`bitsandbytes_cpu.py`).
- A resume restores state to paged memory if the first step would have allocated it there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.ledger import plain_tensors
from lowmem.model.trainable import trainable
from lowmem.system.process import page_out
from lowmem.system.torch_private import is_traceable_wrapper_subclass
from lowmem.techniques.optim.bitsandbytes_cpu import in_one_pass

BUFFERS = ("state1", "state2")  # keys of the state tensors that bitsandbytes' paged optimizers keep in paged memory
DECOUPLED = ("adam", "lion", "ademamix")  # bitsandbytes' update rules with decoupled weight decay
PAGED_FROM = 100_000  # minimum number of elements of a parameter with paged state (bitsandbytes' `get_state_buffer`)


Restored = Callable[[Optimizer, nn.Parameter], None]  # called after the state of a parameter has been restored


def itself(p: nn.Parameter) -> nn.Parameter:
    return p


def nothing(*_: object) -> None:
    pass


class MakeOptimizer:
    """A factory: calling it with (model, master, restored) creates an optimizer. `master` maps a parameter of the model
    to the parameter that the optimizer updates. The optimizer calls `restored` after it has restored the state of a
    parameter.

    Args:
        make: creates the optimizer from parameter groups: the class that the yaml names, or a partial of this class.
        embedding_bits: `state_bits` of the embedding group; None: groups do not have the key `state_bits`.
    """

    def __init__(self, make: Callable[[list[dict]], Optimizer], embedding_bits: int | None = None) -> None:
        self.make, self.embedding_bits = make, embedding_bits

    def __call__(
        self,
        model: nn.Module,
        master: Callable[[nn.Parameter], nn.Parameter] = itself,
        restored: Restored = nothing,
    ) -> Optimizer:
        groups = [group | {"params": list(map(master, group["params"]))} for group in parameter_groups(model)]
        if self.embedding_bits is not None:
            groups = [
                group | {"state_bits": self.embedding_bits if group["role"] == "embedding" else 8} for group in groups
            ]
        optimizer = self.make(groups)
        is_of_bitsandbytes = hasattr(optimizer, "get_config")
        if is_of_bitsandbytes:
            _hold_state_in_the_groups_bits(optimizer)
            _decay_before_the_update(optimizer)
            _hold_no_second_moment_of_zero(optimizer)
            in_one_pass(optimizer)
        _restore_in_saved_dtypes(optimizer, restored)
        named = getattr(self.make, "keywords", {})  # theirs: `make` may be a partial
        _extend_load_state_dict(optimizer, named, restored if is_of_bitsandbytes else nothing)
        return optimizer

    @property
    def name(self) -> str:
        """Returns the name of the optimizer's class. Checkpoints store this name."""
        return getattr(self.make, "func", self.make).__qualname__  # theirs: `make` may be a partial


def parameter_groups(model: nn.Module) -> list[dict]:
    """Returns the trainable parameters in one group per role. Roles without parameters have no group.

    Matrices and embeddings have weight decay; vectors (norms, biases) do not. The head is in the embedding group, tied
    or not, because its rows belong to tokens. The biases of fused experts are 2-D tensors (experts, columns), so they
    are recognized as vectors by their names.
    """
    by_token = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    by_token |= {id(head.weight)} if head is not None else set()
    groups = {
        "matrix": {"params": [], "role": "matrix"},
        "embedding": {"params": [], "role": "embedding"},
        "vector": {"params": [], "role": "vector", "weight_decay": 0.0},
    }
    for name, p in trainable(model):
        vector = len(p.shape) < 2 or name.endswith("bias")
        groups["vector" if vector else "embedding" if id(p) in by_token else "matrix"]["params"].append(p)
    return [group for group in groups.values() if group["params"]]


def _hold_state_in_the_groups_bits(optimizer: Optimizer) -> None:
    """Makes bitsandbytes use each group's `state_bits`. bitsandbytes' own overrides are not used, because a global
    table stores them by id(parameter): in a sweep, a parameter of the next job may have the id of a freed parameter."""
    theirs = optimizer.get_config

    def get_config(gindex: int, pindex: int, group: dict) -> dict:
        return theirs(gindex, pindex, group) | ({"optim_bits": group["state_bits"]} if "state_bits" in group else {})

    optimizer.get_config = get_config


def _decay_before_the_update(optimizer: Optimizer) -> None:
    """Makes bitsandbytes apply decoupled weight decay before the update on every device, as AdamW does. Does nothing if
    the update rule is not in DECOUPLED. Without this change, bitsandbytes' CUDA kernels multiply the weight by 1 - lr *
    decay after the update (issue 2010), and the kernels of 32-bit Lion add the decay to the gradient (issue 1992)."""
    if optimizer.optimizer_name not in DECOUPLED:
        return
    theirs = optimizer.update_step

    def update_step(group: dict, p: nn.Parameter, gindex: int, pindex: int) -> None:
        if decay := group["lr"] * group["weight_decay"]:
            p.mul_(1 - decay)
        theirs(group | {"weight_decay": 0.0}, p, gindex, pindex)

    optimizer.update_step = update_step


def _hold_no_second_moment_of_zero(optimizer: Optimizer) -> None:
    """Among the 256 values that bitsandbytes uses for second moments, replaces zero by a small value, on every device.
    If the second moment of an element were rounded to zero, but its first moment m were not, its update would be lr * m
    / eps, thousands of times lr. Second moments that are exactly zero get the small value too, which makes later
    updates of these elements slightly smaller; only in a block of zeros they stay zero."""
    optimizer.fill_qmap()
    _replace_zero(optimizer.name2qmap["udynamic"])


def _replace_zero(scale: Tensor | None) -> None:
    if scale is not None:
        scale[0] = scale[1] / 2


def _extend_load_state_dict(optimizer: Optimizer, named: Iterable[str], restored: Restored) -> None:
    """Makes `load_state_dict` keep this run's settings, such as a weight decay that the user typed for the resume;
    torch would restore the saved settings. Also makes it restore bitsandbytes' paged state to paged memory, and replace
    zero in restored scales of second moments.

    Args:
        optimizer: changed in place.
        named: names of the settings that the yaml contains. `lr` is restored, and then set by the schedule. Settings
            that the yaml does not contain are restored too, since they may belong to the state.
        restored: called for each parameter with state, after the states of all parameters have been restored.
    """
    theirs = optimizer.load_state_dict
    kept = {*named} - {"lr", "params"}
    own = [{name: group[name] for name in kept if name in group} for group in optimizer.param_groups]

    def load_state_dict(state_dict: dict) -> None:
        if getattr(optimizer, "is_paged", False):
            _restore_paged(optimizer, theirs, state_dict)
        else:
            theirs(state_dict)
        for state in optimizer.state.values():  # in a checkpoint of an earlier version, the scale may contain zero
            _replace_zero(state.get("qmap2"))
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            group.update(settings)
        for p in optimizer.state:
            restored(optimizer, p)

    optimizer.load_state_dict = load_state_dict


def _restore_in_saved_dtypes(optimizer: Optimizer, restored: Restored) -> None:
    """Makes an optimizer restore each tensor of its state in the dtype in which the tensor was saved.

    torch casts restored state to the parameter's dtype: fp32 moments of a 16-bit weight would lose half of their bits,
    and 8-bit codes of an fp32 weight would become fp32 numbers, four times as large. So torch restores only the groups,
    and hooks restore the tensors. torchao's issue 3314 describes this problem. bitsandbytes' own `load_state_dict`
    keeps the dtypes of its state, and does not call hooks.

    Args:
        optimizer: changed in place.
        restored: called after the state of a parameter has been restored.
    """
    saved: dict = {}

    def before(_, state_dict: dict) -> dict:
        saved.update(state_dict["state"])
        return state_dict | {"state": {}}

    def after(optimizer: Optimizer) -> None:
        owners = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        for index, state in saved.items():
            group, p = owners[index]
            optimizer.state[p] = {key: _placed(key, value, group, p) for key, value in _each(state)}
            restored(optimizer, p)
        saved.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _each(state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yields the items of a mapping one at a time, since the mapping may load each value on access. If a value is
    memory-mapped from a file, its pages are released before the next value is loaded."""
    for key, value in state.items():
        yield key, value
        page_out(plain_tensors(value) if isinstance(value, Tensor) else ())


def pageable(optimizer: Optimizer) -> list[Tensor]:
    """Returns the state tensors of a paged optimizer that may be in paged memory; empty for other optimizers. The
    caller must check further conditions: a tensor is paged only if its parameter is on a card and has at least
    PAGED_FROM elements."""
    if not getattr(optimizer, "is_paged", False):
        return []
    return [state[key] for state in optimizer.state.values() for key in BUFFERS if key in state]


def _restore_paged(optimizer: Optimizer, theirs: Callable, state_dict: dict) -> None:
    """Restores the state of a paged optimizer. Each state tensor is allocated as in the first step, paged or not.

    On a card, bitsandbytes itself restores paged state as ordinary tensors, for which the card may have too little
    memory (issues 782 and 1381). On a CPU, it would try to restore paged state of a run on a card to paged memory,
    which fails.

    Args:
        optimizer: the optimizer, with parameters on their final device.
        theirs: bitsandbytes' `load_state_dict`.
        state_dict: the saved state.
    """
    theirs(state_dict, move_to_device=False)
    for p, state in optimizer.state.items():
        for key, saved in state.items():  # one by one: each saved tensor is freed after its copy
            if key in BUFFERS:
                state[key] = optimizer.get_state_buffer(p, dtype=saved.dtype).copy_(saved)
            elif isinstance(saved, Tensor):
                state[key] = saved.to(p.device)


def _placed(key: str, value: object, group: dict, p: nn.Parameter) -> object:
    """Returns a copy of a state tensor on the parameter's device, or a value of another type unchanged. A step count is
    copied to the host instead, unless a fused or capturable optimizer reads it on the device."""
    if not isinstance(value, Tensor):
        return value
    counts_on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return _copied(value, torch.device("cpu") if counts_on_host else p.device)


def _copied(value: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a tensor on a device. For a wrapper subclass, the inner tensors are copied, because `Tensor.to`
    ignores `copy=True` for torchao's 4-bit state if this state is already on the device."""
    if not is_traceable_wrapper_subclass(value):
        return value.to(device, copy=True)
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}  # a DTensor's mesh is not a tensor
    copies = {name: _copied(part, device) if isinstance(part, Tensor) else part for name, part in parts.items()}
    return type(value).__tensor_unflatten__(copies, context, value.shape, value.stride())
