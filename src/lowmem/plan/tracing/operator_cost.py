"""Counts an operator's floating-point operations and moved bytes, which a machine's rates turn into seconds."""

from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem.system.torch_private import ATTENTION, ATTENTION_BACKWARD, OpOverload, schema, storage_key, tree_leaves


class Work(NamedTuple):
    """Holds the work of one operator."""

    dtype: torch.dtype  # of the products
    flops: int  # of matrix products and attention; 0: the operator only reads and writes
    moved: int  # bytes read and written; a tensor changed in place counts twice


class Touched(NamedTuple):
    """Holds the names of the arguments that an operator reads and changes."""

    read: frozenset[str]
    changed: frozenset[str]


def work_of(func, args: tuple, kwargs: dict | None, out: object) -> Work | None:
    """Returns the work of an operator; None: a view, an allocation or a query, which move nothing."""
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
    """Returns the bytes that a tensor has in memory: an expanded tensor repeats fewer elements.

    The size of its storage does not count: work is cached by shape and strides (`shapes.py`), and the storage may be
    larger than the tensor.
    """
    distinct = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(distinct, tensor.numel()) * tensor.element_size()


@cache
def _allocates(func: OpOverload) -> bool:
    return "empty" in schema(func).name.split("::")[1].split("_")


@cache
def _touched(func: OpOverload) -> tuple[list[str], Touched]:
    """Returns (names of an operator's arguments, which of them it reads and changes)."""
    name = schema(func).name.split("::")[1]
    arguments = schema(func).arguments
    changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    read = {a.name for a in arguments if not a.is_out}
    if name.startswith("_fused_"):
        changed.discard("grads")  # only a loss scale would change them, and none is passed
    if name.removeprefix("_foreach_") in _OVERWRITE or name.endswith("_like") or name.startswith("new_"):
        read.discard("self")
    return [a.name for a in arguments], Touched(frozenset(read), frozenset(changed))


# These overwrite their tensor without reading it.
_OVERWRITE = ("copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_", "exponential_")


def _attention(query: Tensor, key: Tensor, *_, **__) -> int:
    """Counts two products of T x T x D for (B, heads, T, D); the half that a causal mask hides is computed too."""
    b, heads, t, d = query.shape
    return 4 * b * heads * t * key.shape[-2] * d


def _attention_backward(_, query: Tensor, key: Tensor, *__, **___) -> int:
    """Counts five products instead of two."""
    return 5 * _attention(query, key) // 2


# Every kernel counts the same; torch has no formula for a CPU's.
_ATTENTION = dict.fromkeys(ATTENTION, _attention) | dict.fromkeys(ATTENTION_BACKWARD, _attention_backward)
