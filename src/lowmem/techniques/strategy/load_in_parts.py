"""Sends a model that only rank 0 has loaded to ranks that each keep a shard of it.

All ranks build the same modules: rank 0 with weights, the others on the meta device, where tensors have shapes and no
memory. Then rank 0 detaches its weights, so that an engine shards a model without memory; each rank allocates its
shards; and rank 0 sends one full tensor after the other and frees it. Published weights of fewer bits than the run's
stay pages of their files on rank 0, which the system may drop, are sent in those bits, and are widened as each rank
copies its shard. So each rank has its shards and one tensor, and rank 0 has the full model only if it was drawn or is
read in the run's dtype. It costs the time to send the model once.

torch's `set_model_state_dict(broadcast_from_rank0=True)` sends tensor by tensor, too, but rank 0 holds the full model
until the last one is sent, beside its shards. It leaves out buffers that no checkpoint holds, and knows neither the
blocks of a pipeline's other stages nor fused matrices.
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
    """Returns on all ranks the result of work on rank 0's loaded model, or raises its refusal on all."""
    result = None
    if ranks.builds:
        try:
            result = work()
        except Refused as error:
            result = error
    if isinstance(result := ranks.broadcast(result), Refused):
        raise result
    return result


def detach_weights(model: nn.Module, ranks: OneDevice) -> Numbers:
    """Detaches parameters (a tied one once) and buffers, and returns them by name. The model keeps tensors without
    memory in their place, in the run's dtype."""
    numbers = {}
    for name, p in model.named_parameters():
        detached = nn.Parameter(torch.empty_like(p, device="meta", dtype=ranks.sent_as(p)), p.requires_grad)
        torch.utils.swap_tensors(p, detached)  # references to the parameter, and its ties, stay valid
        numbers[name] = detached.detach()
    for name, holder, key, buffer in buffers(model):
        setattr(holder, key, torch.empty_like(buffer, device="meta", dtype=ranks.sent_as(buffer)))
        numbers[name] = buffer
    return numbers


def allocate_on(model: nn.Module, device: torch.device, elsewhere: Container[nn.Module] = ()) -> None:
    """Allocates memory for what this rank has of the model; parameters keep their identity. Args: elsewhere: modules
    whose own tensors only other ranks have."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # reversed: an engine allocates all of a block when it reaches the block's own module
        for module in reversed([*model.modules()]):
            if module not in elsewhere:
                module.to_empty(device=device, recurse=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@torch.no_grad()
def receive_weights(model: nn.Module, numbers: Numbers, ranks: OneDevice) -> None:
    """Receives the weights that rank 0 sends. Args: numbers: what `detach_weights` returned on rank 0, and is used up
    here; other ranks ignore theirs."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: buffer for name, _, _, buffer in buffers(model)}
    for name, full in _arriving(numbers, ranks):
        tensor = tensors[name]
        if not tensor.is_meta:  # a block of another stage
            shard = ranks.shard_of(tensor, full) if isinstance(tensor, nn.Parameter) else full
            (tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor).copy_(shard)


def _check(model: nn.Module, ranks: OneDevice) -> None:
    """Checks that all ranks have the same modules: published weights may differ from their architecture, for example
    untie one."""
    ours = {name: (p.shape, ranks.sent_as(p)) for name, p in model.named_parameters()}
    theirs = ranks.broadcast(ours)  # each rank looks by itself; rank 0 has nothing to compare
    if differing := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
        raise Refused(
            f"strategy: {differing[0]} of {type(model).__name__} differs between the stored weights and the model's "
            "architecture, so the weights cannot be loaded in shards. Type strategy=ddp."
        )


def _arriving(numbers: Numbers, ranks: OneDevice) -> Iterator[tuple[str, Tensor]]:
    """Yields one full tensor after the other, in host memory and in rank 0's dtype, on every rank."""
    sent = [(name, full.shape, full.dtype) for name, full in numbers.items()]
    for name, shape, dtype in ranks.broadcast(sent):
        full = torch.empty(shape, dtype=dtype) if ranks.rank else numbers.pop(name).contiguous()
        if full.numel():
            dist.broadcast(full.view(-1).view(torch.uint8), 0)
        yield name, full


def buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yields (name, module, its name in the module, buffer), also of buffers that no checkpoint holds. A buffer that
    several modules share is listed for each of them, and each gets its own."""
    for path, holder in model.named_modules():
        for key, buffer in list(holder.named_buffers(recurse=False, remove_duplicate=False)):
            yield f"{path}.{key}".lstrip("."), holder, key, buffer


def shard_and_send(
    model: nn.Module, ranks: OneDevice, lay_out: Callable[[], Container[nn.Module] | None], device: torch.device
) -> None:
    """Shards the model and sends rank 0's weights into every rank's shards. Args: lay_out: shards a model on the meta
    device, and returns the modules whose own tensors only other ranks have, if there are any; device: of the shards."""
    _check(model, ranks)
    numbers = {} if ranks.rank else detach_weights(model, ranks)
    elsewhere = lay_out()
    allocate_on(model, device, elsewhere or ())
    receive_weights(model, numbers, ranks)
    # other state that only rank 0 has read or drawn
    model.generation_config = ranks.broadcast(getattr(model, "generation_config", None))
    torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
