"""Broadcasts a loaded model from rank 0, tensor by tensor; each rank keeps only its shard of each tensor.

    1. all ranks build the modules (`Divided.building`): rank 0 with weights, other ranks on the meta device, without
       memory for the weights
    2. rank 0 detaches its weights (`detach_weights`); now the model is on the meta device on all ranks
    3. the strategy shards the meta model (`lay_out`), and each rank allocates its shards (`allocate_on`)
    4. rank 0 broadcasts one full tensor at a time and frees it; each rank copies its shard (`receive_weights`)

So each rank needs memory for its shards and one full tensor. Rank 0 also needs memory for the full model, unless its
weights stay pages of memory-mapped files, which the operating system can evict (`model/loading.py`). Files in the run's
dtype usually stay mapped. Files with fewer bits per weight can stay mapped if the strategy's `widens` is True and the
run trains no adapter. Rank 0 then broadcasts the weights in the dtype of the files, and each rank converts its shard
while copying it. Randomly initialized weights are not mapped. Loading takes longer, by the time that it takes to
broadcast the full model once.

torch's `set_model_state_dict(broadcast_from_rank0=True)` also sends tensor by tensor, but rank 0 keeps the full model
in memory, in addition to its shards, until the last tensor is sent. torch's function omits non-persistent buffers, and
supports neither modules of other pipeline stages nor fused matrices.
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
    """Runs a function on rank 0, and returns its result on all ranks. In a memory plan, runs the function on the traced
    rank. All ranks must call this function. Raises: Refused: on all ranks, if `work` raised Refused on rank 0."""
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
    """Replaces all parameters and buffers of rank 0's model by meta tensors with the dtypes of the run. Returns:
    a dict from names to the original tensors; a tied parameter has one entry."""
    numbers = {}
    for name, p in model.named_parameters():
        detached = nn.Parameter(torch.empty_like(p, device="meta", dtype=ranks.sent_as(p)), p.requires_grad)
        torch.utils.swap_tensors(p, detached)  # keeps the parameter object, so tied parameters stay tied
        numbers[name] = detached.detach()
    for name, holder, key, buffer in buffers(model):
        setattr(holder, key, torch.empty_like(buffer, device="meta", dtype=ranks.sent_as(buffer)))
        numbers[name] = buffer
    return numbers


def allocate_on(model: nn.Module, device: torch.device, elsewhere: Container[nn.Module] = ()) -> None:
    """Allocates memory for this rank's shards and buffers, without setting values. The parameters stay the same Python
    objects.

    Args:
        model: the model, on the meta device.
        device: device of the shards.
        elsewhere: modules whose own tensors, not counting tensors of submodules, exist only on other ranks. These
            tensors stay on the meta device.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # submodules before their parents: `to_empty` of a block makes fully_shard adopt the new memory of all its
        # parameters
        for module in reversed([*model.modules()]):
            if module not in elsewhere:
                module.to_empty(device=device, recurse=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@torch.no_grad()
def receive_weights(model: nn.Module, numbers: Numbers, ranks: OneDevice) -> None:
    """Broadcasts the weights and buffers of rank 0. Copies this rank's shards of the weights, and the buffers, into the
    model. Args: numbers: on rank 0 the result of `detach_weights`, which this call empties; ignored on other ranks."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {name: buffer for name, _, _, buffer in buffers(model)}
    for name, full in _arriving(numbers, ranks):
        tensor = tensors[name]
        if not tensor.is_meta:  # a meta tensor belongs to another pipeline stage
            shard = ranks.shard_of(tensor, full) if isinstance(tensor, nn.Parameter) else full
            (tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor).copy_(shard)


def _check(model: nn.Module, ranks: OneDevice) -> None:
    """Checks that this rank's parameters have the names, shapes and dtypes of rank 0's parameters. The parameters can
    differ, because loading weights can change the model on rank 0, for example by untying a weight. Raises: Refused:
    only on ranks other than 0."""
    ours = {name: (p.shape, ranks.sent_as(p)) for name, p in model.named_parameters()}
    theirs = ranks.broadcast(ours)  # rank 0's parameters
    if differing := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
        raise Refused(
            f"strategy: {differing[0]} of {type(model).__name__} differs between the stored weights and the model's "
            "architecture, so the weights cannot be loaded in shards. Type strategy=ddp."
        )


def _arriving(numbers: Numbers, ranks: OneDevice) -> Iterator[tuple[str, Tensor]]:
    """Broadcasts rank 0's tensors one by one. Yields: (name, full tensor) on every rank, in host memory and in the
    dtype that the tensor has on rank 0."""
    sent = [(name, full.shape, full.dtype) for name, full in numbers.items()]
    for name, shape, dtype in ranks.broadcast(sent):
        full = torch.empty(shape, dtype=dtype) if ranks.rank else numbers.pop(name).contiguous()
        if full.numel():
            dist.broadcast(full.view(-1).view(torch.uint8), 0)
        yield name, full


def buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yields (full name, module, name in the module, buffer) for all buffers, including non-persistent buffers. If
    several modules share a buffer, it is yielded once for each of them."""
    for path, holder in model.named_modules():
        for key, buffer in list(holder.named_buffers(recurse=False, remove_duplicate=False)):
            yield f"{path}.{key}".lstrip("."), holder, key, buffer


def shard_and_send(
    model: nn.Module, ranks: OneDevice, lay_out: Callable[[], Container[nn.Module] | None], device: torch.device
) -> None:
    """Shards the model, and fills the shards of all ranks with rank 0's weights. The method `shard` of a strategy calls
    this function.

    Args:
        model: the model; on rank 0 with weights, on other ranks on the meta device.
        ranks: the strategy.
        lay_out: shards the meta model, and returns the argument `elsewhere` of `allocate_on`; None if all modules are
            on this rank.
        device: device of the shards.

    Raises:
        Refused: this rank's parameters differ from the parameters of rank 0, or `lay_out` raised Refused.
    """
    _check(model, ranks)
    numbers = {} if ranks.rank else detach_weights(model, ranks)
    elsewhere = lay_out()
    allocate_on(model, device, elsewhere or ())
    receive_weights(model, numbers, ranks)
    # other state that only rank 0 has: the loaded generation config, and the random state after initialization
    model.generation_config = ranks.broadcast(getattr(model, "generation_config", None))
    torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
