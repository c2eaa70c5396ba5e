"""Selective activation checkpointing: saves the results of expensive operators, and recomputes the results of all
others.

In a typical block, matrix products and attention take nearly all of the time, but their results are only about a third
of the bytes of activations. torch's checkpoint runs the forward pass and the recomputation in two dispatch modes:

    forward          Keep        appends the results of expensive operators to a queue
    recomputation    HandBack    returns the results from the queue, in order, instead of running the operators

A model may change a result in place (Gemma 3n adds to a product). If the recomputation took the changed result from the
queue, the change would be applied twice. So a result is recomputed if its own block or later code of the model has
changed it. To detect changes, `Keep` watches for operators of the block that write to a result's memory. It also
records the version counters of those tensors in the block that share memory with a result. Later code that changes the
result increments one of these counters. torch's `create_selective_checkpoint_contexts` compares only the version
counter of the product. The output of a linear layer shares the product's memory, but has a separate version counter, so
torch's comparison misses changes to this output. Results in host memory (`SentResult`) are copies, so changes after the
copy do not matter.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from lowmem.system.random_state import generators
from lowmem.system.torch_private import (
    ATTENTION,
    OpOverload,
    TorchDispatchMode,
    schema,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from lowmem.techniques.gradient_checkpointing.boundary import Boundary

aten = torch.ops.aten
# not in this list: aten._grouped_mm, the product of mixtures of experts, whose results are recomputed
EXPENSIVE = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *ATTENTION,
)

_paused = ContextVar("paused", default=False)


@contextmanager
def paused() -> Iterator[None]:
    """Context manager in which `Keep` saves no results, and `HandBack` takes no results from the queue. `slices.py`
    enters this context to compute slices in a forward pass, because its own backward pass recomputes them, outside of
    the recomputation of the block."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


class KeptResult:
    """A saved result of an operator, with version counters of tensors that share its memory."""

    def __init__(self, func: OpOverload, args: tuple, kwargs: dict, out: object) -> None:
        self.func, self._out = func, tree_map_only(Tensor, _alias, out)
        self._seen: list[tuple[Tensor, int]] = []  # (tensor, its version counter when `see` was called)
        self.changed = False  # True: an operator of the block has changed the result in place
        self._generator = _drew_from(func, args, kwargs)
        self._random_state = self._generator.get_state() if self._generator is not None else None

    def see(self, tensor: Tensor) -> None:
        """Records the version counter of a tensor that shares memory with the result."""
        alias = _alias(tensor)
        self._seen.append((alias, alias._version))

    def out(self) -> object | None:
        """Returns the result. Returns None, and drops the result, if it was changed in place."""
        if self.changed or any(tensor._version != version for tensor, version in self._seen):
            self._out, self._seen = None, []
        return self._out

    def hand_back(self) -> object | None:
        """Returns what `out` returns. If the operator need not run again, but drew random numbers in the forward pass,
        sets its generator to the state after these numbers."""
        if (out := self.out()) is not None and self._generator is not None:
            self._generator.set_state(self._random_state)
        return out


class SentResult(KeptResult):
    """A saved result whose tensors are stored by `send`, for example in host memory. Args: send: stores a tensor, and
    returns its `Boundary`."""

    def __init__(self, func: OpOverload, args: tuple, kwargs: dict, out: object, send: Callable) -> None:
        super().__init__(func, args, kwargs, tree_map_only(Tensor, partial(OffloadedTensor, send=send), out))

    def see(self, tensor: Tensor) -> None:
        """Does nothing, because changes to the tensor do not reach the stored copy."""

    def out(self) -> object:
        return self._out

    def hand_back(self) -> object:
        return tree_map_only(OffloadedTensor, OffloadedTensor.fetch, super().hand_back())


class OffloadedTensor:
    """A tensor that `send` stores. The results of attention are transposed tensors, and `fetch` must restore their
    strides. So the tensor is stored with its dimensions in descending order of strides."""

    def __init__(self, tensor: Tensor, send: Callable[[Tensor], Boundary]) -> None:
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        self._back = [order.index(dimension) for dimension in range(tensor.dim())]
        self._boundary = send(tensor.permute(order).contiguous())

    def fetch(self) -> Tensor:
        return self._boundary.fetch().permute(self._back)


class Mode(TorchDispatchMode):
    """Base class of `Keep` and `HandBack`.

    Args:
        results: the queue of saved results.
        operators: operators whose results are saved.
    """

    supports_higher_order_operators = True  # otherwise torch raises an error for operators like flex attention

    def __init__(self, results: deque[KeptResult], operators: Collection[OpOverload]) -> None:
        super().__init__()
        self.results, self.operators = results, operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise this mode would silently disable torch.compile


class Keep(Mode):
    """The mode of the forward pass: appends results to the queue. Args: keep: creates a `KeptResult`."""

    def __init__(
        self, results: deque[KeptResult], operators: Collection[OpOverload], keep: Callable[..., KeptResult]
    ) -> None:
        super().__init__(results, operators)
        self._keep = keep
        self._by_storage: dict[int, KeptResult] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in _written(func, args, kwargs or {}):  # operators like `_foreach_mul_` do not increment versions
            if (result := self._by_storage.get(storage_key(tensor))) is not None:
                result.changed = True
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func in self.operators and not _paused.get():
            self.results.append(self._keep(func, args, kwargs or {}, out))
            self._by_storage |= dict.fromkeys(map(storage_key, tensors), self.results[-1])
        for tensor in tensors:
            if (result := self._by_storage.get(storage_key(tensor))) is not None:
                result.see(tensor)
        return out

    def __exit__(self, *exception):
        for result in self.results:
            result.out()  # frees the results that the block itself has changed
        return super().__exit__(*exception)


class HandBack(Mode):
    """The mode of the recomputation: takes results from the queue instead of running the operators. Runs an operator
    again if its result was changed in place."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.operators and not _paused.get():
            if not self.results or self.results[0].func is not func:
                raise RuntimeError(
                    f"gradient_checkpointing: the recomputation of a block called {func} where its forward pass did "
                    "not, or backward ran twice. Type gradient_checkpointing=every_layer."
                )
            if (out := self.results.popleft().hand_back()) is not None:
                return out
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception):
        self.results.clear()  # torch's early stop may end the recomputation before all results are read
        return super().__exit__(*exception)


def contexts() -> tuple[Keep, HandBack]:
    """Returns the mode of a block's forward pass and the mode of its recomputation. Both modes use the same queue."""
    results: deque[KeptResult] = deque()
    return Keep(results, EXPENSIVE, KeptResult), HandBack(results, EXPENSIVE)


def attention_contexts(send: Callable[[Tensor], Boundary]) -> tuple[Keep, HandBack]:
    """Like `contexts`, but saves only the results of fused attention, and stores them with `send`. Args: send: stores a
    tensor, and returns its `Boundary`."""
    results: deque[KeptResult] = deque()
    return Keep(results, ATTENTION, partial(SentResult, send=send)), HandBack(results, ATTENTION)


def _written(func: OpOverload, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """Yields the tensors that an operator changes in place."""
    if isinstance(func, OpOverload) and schema(func).is_mutable:
        arguments = schema(func).arguments
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [values[argument.name] for argument in arguments if argument.is_write and argument.name in values]
        yield from (leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor))


def _drew_from(func: OpOverload, args: tuple, kwargs: dict) -> torch.Generator | None:
    """Returns the generator from which an operator drew random numbers, or None if it drew none. Of the operators whose
    results are saved, only attention with dropout draws random numbers. If the recomputation skips such an operator, it
    must advance the generator. Otherwise the next dropout would not draw the same numbers as in the forward pass."""
    values = dict(zip((argument.name for argument in schema(func).arguments), args, strict=False)) | kwargs
    if not values.get("dropout_p"):
        return None
    return generators(args[0].device)[-1]


def _alias(tensor: Tensor) -> Tensor:
    """Returns a detached tensor that shares the memory and the version counter of `tensor`. It is detached because a
    reference to the autograd graph, which owns the saved results, would create a reference cycle."""
    with enable_reentrant_dispatch():  # inside a dispatch mode, detach() would create a new version counter
        return tensor.detach()
