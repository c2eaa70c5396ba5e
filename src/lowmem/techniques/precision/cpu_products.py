"""Speeds up 16-bit matrix products on CPUs that have no instructions for 16-bit products.

On such a CPU, torch computes a 16-bit product in a plain loop, which takes 10 to 100 times as long as an fp32 product
(pytorch issue 146508). So `BasePrecision.convert_module` replaces torch's CPU kernels until the end of the run. The
replacements convert the inputs to fp32, multiply and add in fp32, and round the result once, as the 16-bit instructions
do. They are registered at the CPU dispatch key, below autocast, autograd and memory trackers. So forward, backward and
recomputation use them, and saved tensors still have 16 bits. The price is temporary memory during each product: fp32
copies of its inputs, and its fp32 result.

A dispatch mode could also replace the kernels, but would add a Python call to every operator.
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
# Maps each operator to the number of results that are rounded to 16 bits, counted from the first result. The second
# result of attention, the log-sum-exp, stays in fp32.
PRODUCTS = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), 1),
    **dict.fromkeys((aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out), 1),
    ATTENTION_ON_CPU: 1,
    ATTENTION_BACKWARD_ON_CPU: 3,
}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def has_units(dtype: torch.dtype) -> bool:
    """Returns True if this CPU has matrix instructions for `dtype`, or if `dtype` is neither fp16 nor bf16."""
    return dtype not in NAMES or cpu_multiplies_in(NAMES[dtype])


@contextmanager
def widened(dtype: torch.dtype, device: str) -> Iterator[bool]:
    """Context manager that replaces torch's CPU kernels for matrix products in `dtype`, in all threads. Does nothing if
    the device is not a CPU, or if `has_units(dtype)` is True. Yields: True if the kernels were replaced."""
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
    """Returns torch's own kernel. The result of the first call is cached, because after the replacement `get_kernel`
    returns the new kernel."""
    return get_kernel(product, "CPU").call_boxed


def _wide(product: OpOverload, dtype: torch.dtype) -> Callable:
    """Returns the replacement of a kernel. If the first input is in `dtype`, the replacement calls torch's kernel with
    fp32 copies of the inputs, and rounds the results. Otherwise it passes the inputs to torch's kernel unchanged."""
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
