"""Computes attention in packed rows document by document, without a (T, T) mask if possible. transformers calls the
functions that this module registers; `packed_attention.py` selects them for a model.

In a packed row, a token attends only to its own document, up to and including itself. The start offsets of all
documents, a tensor of shape (documents + 1,), contain this information and replace the mask (B, 1, T, T). For one row
of 32k tokens, this saves a mask of 2 GiB in 16 bits. The cost of attention becomes quadratic in the length of each
document, instead of in the length of the row. Up to rounding, the result for a document equals its result in a separate
row.

    16 bits on a card of compute capability 8.0 or higher    one call of `torch.nn.attention.varlen`
    other cases: fp32, dropout, older cards, CPUs, and       one call of torch's SDPA per document
    head sizes that the kernel does not support
    a single document in each row                            one call of torch's SDPA without a mask
    masks that offsets cannot replace, such as a sliding     torch's SDPA with the mask
    window shorter than the row; compiled blocks; models
    that need a mask (`packed_attention.verify`)

A mask is converted from bool to floating point once for all layers that share it. With a bool mask, torch's SDPA would
convert the mask in every layer, and save each copy for backward.
"""

import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lowmem.system.torch_private import hand_on_first_tokens, known_first_tokens

# Names of attention implementations in transformers' registry.
BY_DOCUMENT = "lowmem_by_document"  # start offsets of documents if possible, otherwise a mask
MASKED = "lowmem_masked"  # a mask if one is needed, never start offsets


def mask_of_numbers(*args, dtype: torch.dtype, **kwargs) -> Tensor | None:
    """Returns a floating-point mask (B, 1, T, T) in the dtype of the matrix products: 0 for visible tokens, the lowest
    finite number for all other tokens. Returns None if no mask is needed. Args: see `sdpa_mask` of transformers."""
    if (mask := sdpa_mask(*args, dtype=dtype, **kwargs)) is None:
        return None
    dtype = by_autocast(dtype, mask.device.type)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def first_tokens_or_mask(  # noqa: PLR0913
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable,
    device: torch.device | str,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs,
) -> Tensor | None:
    """Returns the argument `attention_mask` for `attend`: the start offsets of documents, a floating-point mask, or
    None if no mask is needed, for example because each row is a single document. transformers calls this function with
    the arguments of `sdpa_mask`."""
    packed = not allow_is_causal_skip and q_length == kv_length and kwargs.get("attention_mask") is None
    if packed and not use_vmap and (local_size is None or local_size >= kv_length):
        first = first_tokens(mask_function, batch_size, q_length, torch.device(device))
        if first is not None:
            return first if len(first) > batch_size + 1 else None
    return mask_of_numbers(
        batch_size,
        q_length,
        kv_length,
        mask_function=mask_function,
        device=device,
        allow_is_causal_skip=allow_is_causal_skip,
        local_size=local_size,
        use_vmap=use_vmap,
        **kwargs,
    )


def first_tokens(mask_function: Callable, rows: int, tokens: int, device: torch.device) -> Tensor | None:
    """Returns the start offsets of documents, the cumulative sequence lengths of variable-length attention.

    A document starts at each token that does not see the token before it. Returns the loader's offsets if the loader
    knows them, and if the mask does nothing except causal masking within each document. Otherwise evaluates the mask
    function on the device, and the host waits for the result.

    Args:
        mask_function: transformers' mask function: (batch, head, query, key) indices -> True if the query sees the key.
        rows, tokens: B and T.
        device: the device of the result.

    Returns:
        (documents + 1,) int32: the index of each document's first token in the concatenated rows, and at the end B x T.
        None if offsets cannot replace the mask, because at least one token does not see the first token of its
        document, or sees the next token.
    """
    if (known := known_first_tokens(mask_function, tokens)) is not None:
        pinned = device.type == "cuda"  # pinned, because the host would wait for a copy from pageable memory
        first = torch.tensor(known, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True)
        first.counted_first = known
        return first
    row, token = torch.arange(rows, device=device)[:, None], torch.arange(tokens, device=device)
    head = torch.zeros((), dtype=torch.int64, device=device)
    later = token[1:].expand(rows, -1)
    begins = F.pad(~mask_function(row, head, later, later - 1), (1, 0), value=True)  # (B, T)
    first = torch.where(begins, token, 0).cummax(1).values
    complete = mask_function(row, head, token.expand(rows, -1), first).all()
    if not complete or mask_function(row, head, later - 1, later).any():
        return None
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=rows * tokens).int()


def attend(  # noqa: PLR0913
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes the attention of a layer. transformers calls this function.

    Args:
        module: the attention layer.
        query: (B, heads, T, D).
        key, value: (B, key-value heads, T, D).
        attention_mask: the result of `first_tokens_or_mask`.
        dropout: dropout probability.
        scaling: factor of the scores; None: 1 / sqrt(D).

    Returns:
        The output (B, T, heads, D), and None instead of the attention weights.
    """
    if attention_mask is None or attention_mask.dim() != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, tokens = query.shape[0], query.shape[2]
    dtype = by_autocast(query.dtype, query.device.type)
    flat = [tensor.to(dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]  # (B x T, heads, D)
    if takes_all_at_once(flat[0], flat[2], dropout):
        out = _at_once(*flat, attention_mask, tokens, scaling)
    else:
        lengths = lengths_of(attention_mask, rows * tokens)
        out = _in_turn(*flat, lengths, dropout, scaling)
    return out.unflatten(0, (rows, tokens)), None


def takes_all_at_once(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Returns True if torch's variable-length kernel supports these inputs. Args: query, value: (tokens, heads, D);
    dropout: dropout probability."""
    head = query.shape[-1]
    shapes = head == value.shape[-1] <= 256 and head % 8 == 0
    return shapes and not dropout and has_kernel(query.dtype, query.device)


@cache
def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if torch has a variable-length kernel for a dtype and device."""
    short = dtype in (torch.float16, torch.bfloat16)
    return short and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _at_once(query: Tensor, key: Tensor, value: Tensor, first: Tensor, longest: int, scaling: float | None) -> Tensor:
    """Computes the attention of all documents in one call.

    Args:
        query, key, value: (B x T, heads, D).
        first: start offsets of the documents.
        longest: an upper bound on the lengths of documents. `attend` passes the length of a row, because the host would
            have to wait for the exact maximum.
        scaling: see `attend`.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.12 and later need this argument for grouped-query attention
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]}
    grouped = grouped if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(query, key, value, first, first, longest, longest, scale=scaling, window_size=(-1, 0), **grouped)


def lengths_of(first: Tensor, tokens: int) -> list[int]:
    """Returns the length of each document. If the host does not know the offsets yet, reads them from the device, once
    for all layers. The planner replaces this function, because fake tensors have no values."""
    if not hasattr(first, "counted_first"):
        first.counted_first = first.tolist()
    return [end - start for start, end in pairwise(first.counted_first)]


def _in_turn(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], dropout: float, scaling: float | None
) -> Tensor:
    """Computes attention for one document after another. With grouped-query attention, keys and values are repeated,
    because torch's fused kernels for fp32 and for older cards need as many key-value heads as query heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    documents = zip(*(tensor.transpose(0, 1).split(lengths, 1) for tensor in (query, key, value)), strict=True)
    done = [
        F.scaled_dot_product_attention(*(tensor[None] for tensor in document), None, dropout, True, scale=scaling)
        for document in documents
    ]
    return torch.cat([heads[0].transpose(0, 1) for heads in done])


def by_autocast(dtype: torch.dtype, device: str) -> torch.dtype:
    """Returns autocast's dtype, to which torch casts the inputs of its own attention. Without autocast, returns
    `dtype`."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


hand_on_first_tokens()
AttentionInterface.register(BY_DOCUMENT, attend)
AttentionMaskInterface.register(BY_DOCUMENT, first_tokens_or_mask)
AttentionInterface.register(MASKED, sdpa_attention_forward)
AttentionMaskInterface.register(MASKED, mask_of_numbers)
