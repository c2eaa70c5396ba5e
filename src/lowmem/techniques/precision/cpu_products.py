"""Computes 16-bit products on a CPU that has no units for them: widened to fp32, multiplied and added there, and
rounded once at the end. Such units do the same.

Without them torch multiplies in a plain loop, which takes 10 to 100 times as long as fp32 (pytorch issue 146508). So
while a run lasts, torch's CPU kernels are replaced at the lowest level: autocast, autograd and trackers of memory work
above them. Forward, backward and recomputation all use these kernels, and tensors saved in between have 16 bits. The
wide copies live for one operator; a CPU with units does not need this scratch memory.

A dispatch mode could do the same, and would cost a Python call for every operator, product or not.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.library import get_kernel

from lowmem.system.torch_private import (
    ATTENTION_BACKWARD_ON_CPU,
    ATTENTION_ON_CPU,
    OpOverload,
    cpu_multiplies_in,
    replaced_kernels,
)

aten = torch.ops.aten
# Maps each product to the number of its results to round: attention's second result, the log-sum-exp, is always fp32.
PRODUCTS = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), 1),
    **dict.fromkeys((aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out), 1),
    ATTENTION_ON_CPU: 1,
    ATTENTION_BACKWARD_ON_CPU: 3,
}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def has_units(dtype: torch.dtype) -> bool:
    """Returns True if this CPU multiplies in `dtype`."""
    return dtype not in NAMES or cpu_multiplies_in(NAMES[dtype])


@contextmanager
def widened(dtype: torch.dtype, device: str) -> Iterator[bool]:
    """Widens the products of a run in `dtype`, in every thread, if this CPU needs it. Yields: True if it does."""
    if device != "cpu" or has_units(dtype):
        yield False
        return
    with replaced_kernels() as ours:
        with warnings.catch_warnings(action="ignore"):  # torch warns that a kernel is replaced
            for product in PRODUCTS:
                ours.impl(product, _wide(product, dtype), "CPU", with_keyset=True)
        yield True


@cache
def _native(product: OpOverload) -> Callable:
    """Returns torch's own kernel; it is looked up once, before any is replaced."""
    return get_kernel(product, "CPU").call_boxed


def _wide(product: OpOverload, dtype: torch.dtype) -> Callable:
    """Returns the kernel that replaces torch's own, and calls it."""
    native = _native(product)

    def wide(value: object) -> object:
        return value.float() if isinstance(value, Tensor) and value.dtype == dtype else value

    def kernel(keys: torch.DispatchKeySet, *args, **kwargs):
        if args[0].dtype != dtype:
            return native(keys, *args, **kwargs)
        result = native(keys, *map(wide, args), **{key: wide(value) for key, value in kwargs.items()})
        if "out" in kwargs:
            return kwargs["out"].resize_(result.shape).copy_(result)
        if isinstance(result, Tensor):
            return result.to(dtype)
        return tuple(t.to(dtype) if i < PRODUCTS[product] else t for i, t in enumerate(result))

    return kernel
