"""Counts the FLOPs of an operator, and the bytes that the operator reads and writes. From these two numbers,
`cost/machine.py` estimates how many seconds the operator takes."""

from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lowmem.system.torch_private import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GROUPED_PRODUCTS,
    OpOverload,
    schema,
    storage_key,
    tree_leaves,
)


class Work(NamedTuple):
    """The work of one operator."""

    dtype: torch.dtype  # dtype of the first tensor that the operator reads, or else of the first that it writes
    flops: int  # FLOPs of matrix products, convolutions and attention; 0 for all other operators
    # Bytes read plus bytes written. A tensor that is read and changed in place counts twice. Every tensor counts in
    # full, even the table of a lookup.
    moved: int


class Touched(NamedTuple):
    """The names of the arguments that an operator reads, and of the arguments that it changes in place."""

    read: frozenset[str]
    changed: frozenset[str]


def work_of(func, args: tuple, kwargs: dict | None, out: object) -> Work | None:
    """Returns the work of an operator. None: the operator moves no data, because it is a view, an allocation or a
    query."""
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
    count = _COUNTS.get(func) or flop_registry.get(func.overloadpacket)
    if count is not None:
        flops = count(*args, **(kwargs or {}), out_val=out)
    return Work((read or changed or outputs)[0].dtype, flops, moved)


def _tensors(value: object) -> list[Tensor]:
    """Returns the tensors in a nested value, without duplicates."""
    return list({id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements in memory. Elements that an expanded dimension repeats count once.

    The result depends on shape, strides and dtype, and not on the size of the storage, because `shapes.py` caches work
    by shape, strides and dtype.
    """
    distinct = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(distinct, tensor.numel()) * tensor.element_size()


@cache
def _allocates(func: OpOverload) -> bool:
    return "empty" in schema(func).name.split("::")[1].split("_")


@cache
def _touched(func: OpOverload) -> tuple[list[str], Touched]:
    """Returns the names of all arguments of an operator in order, and the sets of arguments that the operator reads and
    that it changes."""
    name = schema(func).name.split("::")[1]
    arguments = schema(func).arguments
    changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    read = {a.name for a in arguments if not a.is_out}
    if name.startswith("_fused_"):
        changed.discard("grads")  # fused optimizers change gradients only if a loss scale is passed
    if name.removeprefix("_foreach_") in _OVERWRITE or name.endswith("_like") or name.startswith("new_"):
        read.discard("self")
    return [a.name for a in arguments], Touched(frozenset(read), frozenset(changed))


# operators that overwrite a tensor without reading it
_OVERWRITE = ("copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_", "exponential_")


def _attention(query: Tensor, key: Tensor, *_, **__) -> int:
    """Returns the FLOPs of attention: for each head, two matrix products of (queries x keys x head size), with 2 FLOPs
    per multiply-add. A causal mask does not reduce the count."""
    b, heads, t, d = query.shape
    return 4 * b * heads * t * key.shape[-2] * d


def _attention_backward(_, query: Tensor, key: Tensor, *__, **___) -> int:
    """Returns the FLOPs of the backward pass of attention: five matrix products instead of two."""
    return 5 * _attention(query, key) // 2


def _grouped_products(a: Tensor, b: Tensor, *_, **__) -> int:
    """Returns the FLOPs of the matrix products of a mixture's experts. A factor has three dimensions (experts, rows,
    columns) if each expert has a matrix of its own. It has two dimensions if its rows or columns are divided among the
    experts.
    """
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    each = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * each * rows * inner * columns


# Formulas for attention replace torch's own for all kernels, because torch has none for the CPU kernels. For grouped
# products torch has no formula.
_COUNTS = {
    **dict.fromkeys(ATTENTION, _attention),
    **dict.fromkeys(ATTENTION_BACKWARD, _attention_backward),
    GROUPED_PRODUCTS: _grouped_products,
}
