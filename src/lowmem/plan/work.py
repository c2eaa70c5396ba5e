"""What an operator does, as numbers that a machine turns into seconds: floating-point operations and bytes moved."""

from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem.internals import ATTENTION, ATTENTION_BACKWARD, OpOverload, schema, storage_key, tree_leaves

MAPPED = 32 << 20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: whatever is smaller is found in memory that was freed


class Work(NamedTuple):
    """Of one operator."""

    dtype: torch.dtype  # of the products
    flops: int  # of matrix products and attention; 0: the operator reads and writes
    moved: int  # bytes read and written; what is changed in place, both
    fresh: int = 0  # bytes in new tensors so large that malloc asks the system for each, page by page


class Touched(NamedTuple):
    """Names of an operator's arguments."""

    read: frozenset[str]
    changed: frozenset[str]


def work_of(func, args: tuple, kwargs: dict | None, out: object) -> Work | None:
    """None: a view, an allocation, or a question about a tensor, which moves nothing."""
    if _allocates(func):
        made = _tensors(out)
        return Work(made[0].dtype, 0, 0, fresh) if (fresh := _fresh(made)) else None
    names, touched = _touched(func)
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    changed = _tensors([value for name, value in given.items() if name in touched.changed])
    read = _tensors([value for name, value in given.items() if name in touched.read])
    there = {storage_key(t) for t in (*read, *changed)}
    made = [t for t in _tensors(out) if storage_key(t) not in there]
    moved = sum(map(_bytes, (*read, *changed, *made)))
    if not moved or not (changed or made):
        return None
    flops = 0
    count = _ATTENTION.get(func) or flop_registry.get(func.overloadpacket)
    if count is not None:
        flops = count(*args, **(kwargs or {}), out_val=out)
    return Work((read or changed or made)[0].dtype, flops, moved, _fresh(made))


def _tensors(value: object) -> list[Tensor]:
    """Each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def _fresh(made: list[Tensor]) -> int:
    return sum(size for size in map(_bytes, made) if size >= MAPPED)


def _bytes(tensor: Tensor) -> int:
    """What of it lies in memory: an expanded one repeats what is there. Its storage is not asked: work is kept by shape
    and strides (`shapes.py`), and what is expanded may be a part of more."""
    there = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(there, tensor.numel()) * tensor.element_size()


@cache
def _allocates(func: OpOverload) -> bool:
    return "empty" in schema(func).name.split("::")[1].split("_")


@cache
def _touched(func: OpOverload) -> tuple[list[str], Touched]:
    """(names of its arguments, what it does with them)."""
    name = schema(func).name.split("::")[1]
    arguments = schema(func).arguments
    changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    read = {a.name for a in arguments if not a.is_out}
    if name.startswith("_fused_"):
        changed.discard("grads")  # which a loss scale would change, and none is handed over
    if name.removeprefix("_foreach_") in _OVERWRITE or name.endswith("_like") or name.startswith("new_"):
        read.discard("self")
    return [a.name for a in arguments], Touched(frozenset(read), frozenset(changed))


# What was in the tensor that these change makes no difference.
_OVERWRITE = ("copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_", "exponential_")


def _attention(query: Tensor, key: Tensor, *_, **__) -> int:
    """(B, heads, T, D): two products of T x T x D, half of them behind the diagonal of a causal model but computed."""
    b, heads, t, d = query.shape
    return 4 * b * heads * t * key.shape[-2] * d


def _attention_backward(_, query: Tensor, key: Tensor, *__, **___) -> int:
    """Five products instead of two."""
    return 5 * _attention(query, key) // 2


# The same count for every kernel; torch has none of a CPU's.
_ATTENTION = dict.fromkeys(ATTENTION, _attention) | dict.fromkeys(ATTENTION_BACKWARD, _attention_backward)
