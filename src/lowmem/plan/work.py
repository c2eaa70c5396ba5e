"""What an operator does, as numbers that a machine turns into seconds: floating-point operations and bytes moved."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem.internals import ATTENTION, ATTENTION_BACKWARD, OpOverload, schema, tree_leaves


class Work(NamedTuple):
    """Of one operator."""

    dtype: torch.dtype  # of the products
    flops: int  # of matrix products and attention; 0: the operator reads and writes
    moved: int  # bytes read and written


def work_of(func, args: tuple, kwargs: dict | None, out: object) -> Work | None:
    """None: a view, or a question about a tensor, which moves nothing."""
    if _is_view(func):
        return None
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    tensors = {id(t): t for t in (*read, *written)}.values()
    moved = sum(t.numel() * t.element_size() for t in tensors)
    if not moved:
        return None
    flops = 0
    count = _ATTENTION.get(func) or flop_registry.get(func.overloadpacket)
    if count is not None:
        flops = count(*args, **(kwargs or {}), out_val=out)
    dtype = read[0].dtype if read else written[0].dtype
    return Work(dtype, flops, moved)


@cache
def _is_view(func: OpOverload) -> bool:
    returns = schema(func).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _attention(query: Tensor, key: Tensor, *_, **__) -> int:
    """(B, heads, T, D): two products of T x T x D, half of them behind the diagonal of a causal model but computed."""
    b, heads, t, d = query.shape
    return 4 * b * heads * t * key.shape[-2] * d


def _attention_backward(_, query: Tensor, key: Tensor, *__, **___) -> int:
    """Five products instead of two."""
    return 5 * _attention(query, key) // 2


# The same count for every kernel; torch has none of a CPU's.
_ATTENTION = dict.fromkeys(ATTENTION, _attention) | dict.fromkeys(ATTENTION_BACKWARD, _attention_backward)
