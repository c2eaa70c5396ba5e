"""Counts the floating-point operations and moved bytes of an operator, which `cost/machine.py` converts to seconds."""

from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem.system.torch_private import ATTENTION, ATTENTION_BACKWARD, OpOverload, schema, storage_key, tree_leaves


class Work(NamedTuple):
    """The work of one operator."""

    dtype: torch.dtype  # dtype of the matrix products
    flops: int  # FLOPs of matrix products and attention; 0 for all other operators
    moved: int  # bytes read and written; a tensor that is changed in place counts twice


class Touched(NamedTuple):
    """The names of the arguments that an operator reads and changes."""

    read: frozenset[str]
    changed: frozenset[str]


def work_of(func, args: tuple, kwargs: dict | None, out: object) -> Work | None:
    """Returns the work of an operator; None: a view, an allocation or a query, which move no data."""
    if _allocates(func):
        return None
    names, touched = _touched(func)
    arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
    changed = _tensors([value for name, value in arguments.items() if name in touched.changed])
    read = _tensors([value for name, value in arguments.items() if name in touched.read])
    known = {storage_key(t) for t in (*read, *changed)}
    outputs = [t for t in _tensors(out) if storage_key(t) not in known]
    moved = sum(map(_bytes, (*read, *changed, *outputs)))
    if not moved or not (changed or outputs):
        return None
    flops = 0
    count = _ATTENTION.get(func) or flop_registry.get(func.overloadpacket)
    if count is not None:
        flops = count(*args, **(kwargs or {}), out_val=out)
    return Work((read or changed or outputs)[0].dtype, flops, moved)


def _tensors(value: object) -> list[Tensor]:
    """Returns the tensors in `value`, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements in memory, without the repeated elements of expanded dimensions.

    Computed from shape and strides instead of the storage, which may be larger; work is cached by shape and strides
    (`shapes.py`).
    """
    distinct = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(distinct, tensor.numel()) * tensor.element_size()


@cache
def _allocates(func: OpOverload) -> bool:
    return "empty" in schema(func).name.split("::")[1].split("_")


@cache
def _touched(func: OpOverload) -> tuple[list[str], Touched]:
    """Returns (names of all arguments of an operator, the names that it reads and changes)."""
    name = schema(func).name.split("::")[1]
    arguments = schema(func).arguments
    changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    read = {a.name for a in arguments if not a.is_out}
    if name.startswith("_fused_"):
        changed.discard("grads")  # only a loss scale would change them, and none is passed
    if name.removeprefix("_foreach_") in _OVERWRITE or name.endswith("_like") or name.startswith("new_"):
        read.discard("self")
    return [a.name for a in arguments], Touched(frozenset(read), frozenset(changed))


# Operators that overwrite their tensor without reading it.
_OVERWRITE = ("copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_", "exponential_")


def _attention(query: Tensor, key: Tensor, *_, **__) -> int:
    """Counts two matrix products of T x T x D for (B, heads, T, D), without savings for a causal mask."""
    b, heads, t, d = query.shape
    return 4 * b * heads * t * key.shape[-2] * d


def _attention_backward(_, query: Tensor, key: Tensor, *__, **___) -> int:
    """Counts five matrix products instead of two."""
    return 5 * _attention(query, key) // 2


# All kernels have one formula here; torch has none for the CPU kernels.
_ATTENTION = dict.fromkeys(ATTENTION, _attention) | dict.fromkeys(ATTENTION_BACKWARD, _attention_backward)
