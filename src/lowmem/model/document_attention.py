"""Computes attention in packed rows document by document, without a mask of (T, T).

A model asks transformers for a mask: which tokens does each token see? In a packed row it sees its own document up to
itself, and for that the first tokens of all documents say enough: (documents + 1,) numbers in place of (B, 1, T, T).
At 1 x 32k tokens that is 2 GiB less in 16 bits, and the work of attention grows with the documents' lengths, and not
with that of the row. A document gets the numbers that it has alone.

On a card one kernel computes all documents, if products have 16 bits: `torch.nn.attention.varlen`, from compute
capability 8.0 on. In fp32, with dropout, on older cards and on a CPU, documents take turns. Layers that see less than
their document (a sliding window that is shorter than the row) get the mask, converted to numbers once for all layers:
torch's attention takes it as booleans, and would convert it in every layer and store each copy for the backward pass.
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

# Names of attention in transformers' configs.
BY_DOCUMENT = "lowmem_by_document"
MASKED = "lowmem_masked"  # always with the mask


def mask_of_numbers(*args, dtype: torch.dtype, **kwargs) -> Tensor | None:
    """Returns the mask, (B, 1, T, T), in the dtype of the products: 0 where attention may look, else minus infinity or
    the lowest number."""
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
    """Returns what `attend` takes as its mask: the first tokens of documents, a mask of numbers, or None if each row is
    one document. transformers calls it with the arguments of `sdpa_mask`."""
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
    """Returns where documents begin: at each token that does not see the one before it. The mask itself is asked, which
    reads the device, unless the loader has counted the documents and the mask does nothing but separate them.

    Returns:
        (documents + 1,) int32, the first tokens in the rows laid end to end, and the end; None if a token does not see
        its document from the first token on, or sees what follows.
    """
    if (known := known_first_tokens(mask_function, tokens)) is not None:
        pinned = device.type == "cuda"  # from other memory a copy to a card waits for the card
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
    """Computes a layer's attention. Args: query: (B, heads, T, D); key, value: (B, heads or fewer, T, D);
    attention_mask: what `first_tokens_or_mask` returned. Returns: (B, T, heads, D), and no weights."""
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
    """Returns whether torch's kernel for sequences of several lengths takes a call. Args: query: (tokens, heads, D)."""
    head = query.shape[-1]
    shapes = head == value.shape[-1] <= 256 and head % 8 == 0
    return shapes and not dropout and has_kernel(query.dtype, query.device)


@cache
def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether torch has a kernel for sequences of several lengths."""
    short = dtype in (torch.float16, torch.bfloat16)
    return short and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _at_once(query: Tensor, key: Tensor, value: Tensor, first: Tensor, longest: int, scaling: float | None) -> Tensor:
    """Computes all documents. Args: longest: tokens of a row; a document has no more. Which has most would have to come
    from the card first."""
    from torch.nn.attention.varlen import varlen_attn

    # from torch 2.12 on it asks to be told that keys are fewer
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]}
    grouped = grouped if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return varlen_attn(query, key, value, first, first, longest, longest, scale=scaling, window_size=(-1, 0), **grouped)


def lengths_of(first: Tensor, tokens: int) -> list[int]:
    """Returns the tokens of each document, `tokens` altogether. If the host does not know them, the first layer reads
    them for all. A trace by shape, which has no numbers, replaces it."""
    if not hasattr(first, "counted_first"):
        first.counted_first = first.tolist()
    return [end - start for start, end in pairwise(first.counted_first)]


def _in_turn(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], dropout: float, scaling: float | None
) -> Tensor:
    """Computes one document after the other. Keys and values that several queries share are repeated, since torch's
    fused kernels for fp32 and for older cards take no fewer of them."""
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
    """Returns the dtype to which autocast would cast the inputs of torch's own attention."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


hand_on_first_tokens()
AttentionInterface.register(BY_DOCUMENT, attend)
AttentionMaskInterface.register(BY_DOCUMENT, first_tokens_or_mask)
AttentionInterface.register(MASKED, sdpa_attention_forward)
AttentionMaskInterface.register(MASKED, mask_of_numbers)
