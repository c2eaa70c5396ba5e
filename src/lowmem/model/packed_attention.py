"""Separates documents that share a row: it makes one mask for all layers, and checks that no document sees another.

Given position ids, transformers separates documents by a mask (B, 1, T, T), unless it gets a mask or a cache: both make
it ignore the boundaries without a warning. torch's attention takes that mask as booleans, converts it to numbers in
every layer and stores each copy for the backward pass: at 4 x 2048 tokens and 16 layers 1 GiB in fp32. Converted once,
it is the same tensor for all layers, 64 MiB.

No list says which models hand the positions on to their masks. Some do not, and layers that run along the row (state
spaces, linear attention) know no boundary at all. So each model is tested before its first step, in the run's
precision: which tokens a document's logits depend on, and whether they are those that it has alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lowmem.system.errors import Refused
from lowmem.system.torch_private import attention_taken

SHARED = "lowmem_packed"  # the attention's name in transformers' configs
LOOKED_AT = 64  # tokens of a row: more than a rule that sets in at a length is likely to leave out
SAME = 1e-4  # of the largest logit: other kernels differ by less, lost positions by a hundred times as much
ROUNDINGS = 8  # tolerated instead, if so many exceed SAME in the coarsest dtype


def numbers_once(*args, dtype: torch.dtype, **kwargs) -> Tensor | None:
    """Returns the mask, (B, 1, T, T), in the dtype of the products: 0 where attention may look, else minus infinity or
    the lowest number."""
    if (mask := sdpa_mask(*args, dtype=dtype, **kwargs)) is None:
        return None
    if torch.is_autocast_enabled(mask.device.type):
        dtype = torch.get_autocast_dtype(mask.device.type)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


AttentionInterface.register(SHARED, sdpa_attention_forward)
AttentionMaskInterface.register(SHARED, numbers_once)


def share_mask(model: PreTrainedModel) -> None:
    """Shares the mask if the model really uses torch's attention. A model without it would accept the name and lose its
    own additions (GPT-OSS its sinks); the mask of its `eager` consists of numbers already."""
    if attention_taken(model) == "sdpa":
        model.set_attn_implementation(SHARED)


@contextmanager
def own_mask(model: PreTrainedModel) -> Iterator[None]:
    """Undoes `share_mask` inside the `with`: a model may need a mask of booleans."""
    taken = attention_taken(model)
    model.set_attn_implementation("sdpa" if taken == SHARED else taken)
    try:
        yield
    finally:
        model.set_attn_implementation(taken)


def keeps_apart(model: PreTrainedModel, input_ids: Tensor) -> bool:
    """Returns whether documents of a row have the logits that they have alone. Args: input_ids: (B, T), T at least
    4."""
    tokens = input_ids.shape[1]
    lengths = [tokens // 4, tokens // 3, tokens - tokens // 4 - tokens // 3]
    places = torch.cat([torch.arange(length, device=input_ids.device) for length in lengths])
    packed = {"input_ids": input_ids, "position_ids": places.expand_as(input_ids)}
    with torch.no_grad(), own_mask(model):
        alone = [model(input_ids=document, use_cache=False).logits for document in input_ids.split(lengths, dim=1)]
    return _sees_nothing_before(model, packed, lengths) and _same(model, packed, torch.cat(alone, dim=1))


def _same(model: PreTrainedModel, packed: dict[str, Tensor], alone: Tensor) -> bool:
    with torch.no_grad():
        in_row = model(**packed, use_cache=False).logits.float()
    coarsest = max(torch.finfo(dtype).eps for dtype in (alone.dtype, _computed_in(model, alone.device.type)))
    tolerance = max(SAME, ROUNDINGS * coarsest) * alone.abs().max().item()
    return torch.allclose(in_row, alone.float(), rtol=0.0, atol=tolerance, equal_nan=True)


def _computed_in(model: PreTrainedModel, device: str) -> torch.dtype:
    dtype = model.get_input_embeddings().weight.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def _sees_nothing_before(model: PreTrainedModel, packed: dict[str, Tensor], lengths: list[int]) -> bool:
    """Returns whether no document depends on an earlier one: the gradient is exactly zero there, in any precision."""
    embedded: list[Tensor] = []

    def caught(_, __, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    hook = model.get_input_embeddings().register_forward_hook(caught)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # an evaluation has inference mode on and gradients off
            packed = {name: tensor.clone() for name, tensor in packed.items()}
            logits = model(**packed, use_cache=False).logits.float()  # (B, T, V)
    finally:
        hook.remove()
    boundaries = [lengths[0], lengths[0] + lengths[1]]
    return bool(embedded) and not any(_depends(logits, embedded[0], boundary) for boundary in boundaries)


def _depends(logits: Tensor, embedded: Tensor, boundary: int) -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        behind = logits[:, boundary:].logsumexp(-1).sum()
    gradient = torch.autograd.grad(behind, embedded, retain_graph=True)[0]  # (B, T, H)
    return bool(gradient[:, :boundary].any())


def verify(model: PreTrainedModel, input_ids: Tensor) -> None:
    """Tests a model. Args: input_ids: (B, T), a few real tokens.

    Raises:
        Refused: the model mixes documents of a row.
    """
    if not keeps_apart(model, input_ids):
        raise Refused(
            f"data.packing=documents: in {type(model).__name__} documents of a row see each other, whatever position "
            "ids it gets, so training would mix them. Type data.packing=padded."
        )
