"""16-bit products on a CPU without units for them: widened to fp32, multiplied and added there, and rounded once on the
way out. That is what such units do.

Without them torch multiplies in a plain loop, which takes 10 to 100 times as long as fp32 (pytorch issue 146508). So
for as long as a run lasts its kernels for a CPU are replaced, at the very bottom: autocast, autograd and whoever tracks
memory stand above them. Forward, backward and what is computed again in backward come through here, and what is saved
in between has 16 bits. The wide copies live for one operator: scratch inside it, that a CPU with units does not need.
A dispatch mode could do the same, and would cost a call of Python for every operator, product or not.
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
# Each with how many of its results are rounded: attention's second, the log-sum-exp, is fp32 in any dtype.
PRODUCTS = {
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), 1),
    **dict.fromkeys((aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out), 1),
    ATTENTION_ON_CPU: 1,
    ATTENTION_BACKWARD_ON_CPU: 3,
}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def has_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in `dtype`."""
    return dtype not in NAMES or cpu_multiplies_in(NAMES[dtype])


@contextmanager
def widened(dtype: torch.dtype, device: str) -> Iterator[bool]:
    """Around a whole run: its products in `dtype`, in every thread, are widened if they have to be. Yields: whether."""
    if device != "cpu" or has_units(dtype):
        yield False
        return
    with replaced_kernels() as ours:
        with warnings.catch_warnings(action="ignore"):  # torch says that a kernel is replaced
            for product in PRODUCTS:
                ours.impl(product, _wide(product, dtype), "CPU", with_keyset=True)
        yield True


@cache
def _native(product: OpOverload) -> Callable:
    """torch's own kernel: asked for once, before any is replaced."""
    return get_kernel(product, "CPU").call_boxed


def _wide(product: OpOverload, dtype: torch.dtype) -> Callable:
    """The kernel that stands in the place of torch's own, and calls it."""
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
