"""How a model that only rank 0 has in numbers comes to ranks that each hold a part of it.

All build the same modules: rank 0 with their numbers, the others on the meta device, where tensors have shapes and no
memory. Then nothing of rank 0's has memory either, so that an engine divides what weighs nothing; each rank gets memory
for its own parts; and one whole tensor after the other comes from rank 0, which lets go of it. In host memory there is
the model once, on rank 0, and elsewhere a part and one tensor. It costs the time of one model over the link.
"""

from collections.abc import Callable, Container, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowmem.system.errors import Refused
from lowmem.techniques.strategy.contract import OneDevice

Numbers = dict[str, Tensor]


def on_rank_0(ranks: OneDevice, work: Callable[[], object]) -> object:
    """What only a model with numbers shows, on all ranks; it may be that the model is refused."""
    shown = None
    if ranks.builds:
        try:
            shown = work()
        except Refused as error:
            shown = error
    if isinstance(shown := ranks.broadcast(shown), Refused):
        raise shown
    return shown


def detach_weights(model: nn.Module) -> Numbers:
    """Each parameter, a tied one once, and each buffer, by name; in their place the model has them without memory."""
    numbers = {}
    for name, p in model.named_parameters():
        holds = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        torch.utils.swap_tensors(p, holds)  # whoever knows the parameter, and where it is tied, knows it still
        numbers[name] = holds.detach()
    for name, holder, key, buffer in buffers(model):
        setattr(holder, key, torch.empty_like(buffer, device="meta"))
        numbers[name] = buffer
    return numbers


def allocate_on(model: nn.Module, device: torch.device, elsewhere: Container[nn.Module] = ()) -> None:
    """Memory without numbers for what this rank has of it; a parameter keeps its identity. Args: elsewhere: modules
    whose own tensors only other ranks have."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for part in reversed([*model.modules()]):  # an engine looks at all of a block once the block's turn has come
            if part not in elsewhere:
                part.to_empty(device=device, recurse=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@torch.no_grad()
def receive_weights(model: nn.Module, numbers: Numbers, ranks: OneDevice) -> None:
    """Args: numbers: those of `detach_weights` on rank 0, which are used up; other ranks do not look at theirs."""
    here = dict(model.named_parameters(remove_duplicate=False))
    here |= {name: buffer for name, _, _, buffer in buffers(model)}
    for name, full in _arriving(numbers, ranks):
        held = here[name]
        if not held.is_meta:  # a block of another stage
            part = ranks.shard_of(held, full) if isinstance(held, nn.Parameter) else full
            (held.detach().to_local() if isinstance(held, DTensor) else held).copy_(part)


def _check(model: nn.Module, ranks: OneDevice) -> None:
    """Published weights may make another model than their architecture alone: one that they untie, say."""
    ours = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    theirs = ranks.broadcast(ours)  # each looks by itself: rank 0 finds itself in order
    if differing := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
        raise Refused(
            f"strategy: {type(model).__name__} has another {differing[0]} with its weights than without them, so "
            "that it cannot be loaded in parts. Type strategy=ddp."
        )


def _arriving(numbers: Numbers, ranks: OneDevice) -> Iterator[tuple[str, Tensor]]:
    """On every rank one whole tensor after the other, in host memory."""
    for name, shape, dtype in ranks.broadcast([(name, full.shape, full.dtype) for name, full in numbers.items()]):
        full = torch.empty(shape, dtype=dtype) if ranks.rank else numbers.pop(name).contiguous()
        if full.numel():
            dist.broadcast(full.view(-1).view(torch.uint8), 0)
        yield name, full


def buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, module, its name there, buffer), also of those that no checkpoint holds. One of several modules' comes as
    often: each gets its own."""
    for path, holder in model.named_modules():
        for key, buffer in list(holder.named_buffers(recurse=False, remove_duplicate=False)):
            yield f"{path}.{key}".lstrip("."), holder, key, buffer


def shard_and_send(
    model: nn.Module, ranks: OneDevice, lay_out: Callable[[], Container[nn.Module] | None], device: torch.device
) -> None:
    """Rank 0's numbers in every rank's parts. Args: lay_out: an engine's, of a model on the meta device: it returns the
    modules whose own tensors only other ranks have, if there are any; device: of the parts."""
    _check(model, ranks)
    numbers = {} if ranks.rank else detach_weights(model)
    elsewhere = lay_out()
    allocate_on(model, device, elsewhere or ())
    receive_weights(model, numbers, ranks)
    # what else only rank 0 has read or drawn
    model.generation_config = ranks.broadcast(getattr(model, "generation_config", None))
    torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
