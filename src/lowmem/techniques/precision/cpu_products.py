"""Computes 16-bit matrix products on a CPU without instructions for them: inputs are converted to fp32, multiplied and
summed in fp32, and the result is rounded once, as these instructions do.

Without the instructions torch uses a plain loop that is 10 to 100 times slower than fp32 (pytorch issue 146508). So
during a run torch's CPU kernels are replaced at the CPU dispatch key, below autocast, autograd and memory trackers.
Forward, backward and recomputation use these kernels, and saved tensors still have 16 bits. The fp32 copies exist
during one operator; a CPU with the instructions does not need this temporary memory.

A dispatch mode could do the same, but would add a Python call to every operator.
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
# Product -> number of results to round: the second result of attention, the log-sum-exp, is always fp32.
PRODUCTS = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), 1),
    **dict.fromkeys((aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out), 1),
    ATTENTION_ON_CPU: 1,
    ATTENTION_BACKWARD_ON_CPU: 3,
}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def has_units(dtype: torch.dtype) -> bool:
    """Returns True if this CPU has matrix instructions for `dtype`."""
    return dtype not in NAMES or cpu_multiplies_in(NAMES[dtype])


@contextmanager
def widened(dtype: torch.dtype, device: str) -> Iterator[bool]:
    """Context manager that replaces torch's CPU kernels for matrix products in `dtype`, in all threads, if this CPU
    needs it. Yields: True if they were replaced."""
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
    """Returns torch's own kernel (cached). The first call must be before the kernel is replaced."""
    return get_kernel(product, "CPU").call_boxed


def _wide(product: OpOverload, dtype: torch.dtype) -> Callable:
    """Returns the replacement kernel, which calls torch's kernel in fp32."""
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
