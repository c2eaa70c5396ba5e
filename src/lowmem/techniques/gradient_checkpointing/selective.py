"""Selective checkpointing: keeps the results of a block's expensive operators, and recomputes the cheap rest.

Matrix products and attention are nearly all of a block's time and about a third of its activations. There are two
dispatch modes for torch's checkpoint: one keeps results in the forward pass, the other returns them in the
recomputation. A model may change a result in place (Gemma 3n adds to a product): the kept result would be changed
twice. So whatever was changed, in its block or after it, is recomputed. torch's own
`create_selective_checkpoint_contexts` compares only the version of the product, which misses changes to the output of a
linear layer: that is the same memory, with a version counter of its own. A result may also wait in host memory: it is
copied there at once, so that nobody changes it.
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
EXPENSIVE = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *ATTENTION,
)

_paused = ContextVar("paused", default=False)


@contextmanager
def paused() -> Iterator[None]:
    """Keeps nothing during a pass that is recomputed by itself."""
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)


class KeptResult:
    """An operator's result, and all tensors that were seen to share its memory."""

    def __init__(self, func: OpOverload, args: tuple, kwargs: dict, out: object) -> None:
        self.func, self._out = func, tree_map_only(Tensor, _alias, out)
        self._seen: list[tuple[Tensor, int]] = []  # (tensor, its version)
        self.changed = False  # True: changed in its block
        self._generator = _drew_from(func, args, kwargs)
        self._random_state = self._generator.get_state() if self._generator is not None else None

    def see(self, tensor: Tensor) -> None:
        alias = _alias(tensor)
        self._seen.append((alias, alias._version))

    def out(self) -> object | None:
        """Returns the result; None if it was changed in place."""
        if self.changed or any(tensor._version != version for tensor, version in self._seen):
            self._out, self._seen = None, []
        return self._out

    def hand_back(self) -> object | None:
        """Does the same, and advances the random numbers as if the operator had run."""
        if (out := self.out()) is not None and self._generator is not None:
            self._generator.set_state(self._random_state)
        return out


class SentResult(KeptResult):
    """An operator's result, whose tensors wait elsewhere. Args: send: puts a tensor there."""

    def __init__(self, func: OpOverload, args: tuple, kwargs: dict, out: object, send: Callable) -> None:
        super().__init__(func, args, kwargs, tree_map_only(Tensor, partial(Sent, send=send), out))

    def see(self, tensor: Tensor) -> None:
        """Does nothing: a copy stays as it is."""

    def out(self) -> object:
        return self._out

    def hand_back(self) -> object:
        return tree_map_only(Sent, Sent.fetch, super().hand_back())


class Sent:
    """A tensor that waits elsewhere, in the order of its memory: attention's results are transposed."""

    def __init__(self, tensor: Tensor, send: Callable[[Tensor], Boundary]) -> None:
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        self._back = [order.index(dimension) for dimension in range(tensor.dim())]
        self._boundary = send(tensor.permute(order).contiguous())

    def fetch(self) -> Tensor:
        return self._boundary.fetch().permute(self._back)


class Mode(TorchDispatchMode):
    """The base class of both modes. Args: results: those kept, in order; operators: whose results are kept."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, results: deque[KeptResult], operators: Collection[OpOverload]) -> None:
        super().__init__()
        self.results, self.operators = results, operators

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # an ordinary dispatch mode silently turns torch.compile off


class Keep(Mode):
    """The mode of the forward pass: fills `results`. Args: keep: makes each of them."""

    def __init__(
        self, results: deque[KeptResult], operators: Collection[OpOverload], keep: Callable[..., KeptResult]
    ) -> None:
        super().__init__(results, operators)
        self._keep = keep
        self._by_storage: dict[int, KeptResult] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in _written(func, args, kwargs or {}):  # some operators do not count it as a change: `_foreach_mul_`
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
            result.out()  # a result that was changed already is not kept until backward
        return super().__exit__(*exception)


class HandBack(Mode):
    """The mode of the recomputation: empties `results`."""

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
        self.results.clear()  # the end of a block is not recomputed, and a second pass must not get its results
        return super().__exit__(*exception)


def contexts() -> tuple[Keep, HandBack]:
    """Returns the modes of one forward pass of a block and of its recomputation."""
    results: deque[KeptResult] = deque()
    return Keep(results, EXPENSIVE, KeptResult), HandBack(results, EXPENSIVE)


def attention_contexts(send: Callable[[Tensor], Boundary]) -> tuple[Keep, HandBack]:
    """Returns the modes of a block of which attention's results alone are kept, elsewhere. Args: send: puts a tensor
    there."""
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
    """Returns the generator from which attention with dropout draws on CUDA: unless it is advanced, the next dropout
    would draw the same numbers."""
    values = dict(zip((argument.name for argument in schema(func).arguments), args, strict=False)) | kwargs
    if not values.get("dropout_p"):
        return None
    return generators(args[0].device)[-1]


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor with the same memory and version counter, but without the graph, which would own what is kept
    for it."""
    with enable_reentrant_dispatch():  # inside a dispatch mode, detaching would start another version counter
        return tensor.detach()
