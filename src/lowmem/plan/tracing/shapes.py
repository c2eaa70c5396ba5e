"""Defines the fake tensor mode of traced runs: operators return tensors with a shape and a storage, but without memory.

torch's FakeTensorMode infers the outputs of an operator from the shapes of its arguments. The same operators are called
with the same shapes in every similar block, for every parameter of one shape, and in every trace of a search. So
`ShapeMode` caches descriptions of the outputs by operator and argument shapes; creating outputs from these descriptions
takes a sixth of the time of shape inference. Some calls are not cached: for example if an argument is a constant
tensor, if the output shapes depend on values, or if the call resizes an argument.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowmem.memory import tracker
from lowmem.plan.tracing import traffic
from lowmem.plan.tracing.operator_cost import Work, work_of
from lowmem.plan.tracing.traffic import Collective
from lowmem.system.torch_private import (
    ADDS_IN_PARTS,
    ASKS_FOR_DEVICE,
    COMPARES,
    GROUPED_PRODUCTS,
    MAKES_OF_NUMBERS,
    NONZERO,
    READ_A_NUMBER,
    SPLIT,
    WAITS,
    FakeTensor,
    LeanFakeTensorMode,
    OpOverload,
    schema,
    storage_key,
    tree_leaves,
)

# Number of experts that are traced if a mixture calls its experts one by one. Three experts are enough to trace both
# kinds of gradient sums: two gradients are added, and then a gradient is added to a sum.
EXPERTS = 3
# Maximum number of operators of a trace, per micro-batch of the traced window: four times the number for GPT-2 XL. On
# fake tensors, a loop that depends on values might never end without this limit.
OPERATORS = 250_000
PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)
NOT_BY_SHAPE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class TraceTooLong(Exception):
    """A trace has too many operators, and might never end."""


class OutputSpec(NamedTuple):
    """Describes a tensor that an operator returns. An equal tensor can be created from this description."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    view_of: int | None = None  # index of the tensor argument whose storage this tensor shares; None: a new storage


class Known(NamedTuple):
    """The cached result of an operator, for arguments of given shapes."""

    makes: tuple[OutputSpec | None, ...]  # the returned tensors; None stands for a returned None
    kind: type | None  # tuple or list if the operator returns several tensors, otherwise None
    yields: int | None  # index of the tensor argument that is changed in place and returned; None: see `makes`
    work: Work | None


_known: dict[tuple, Known] = {}  # the cache: (operator, shapes of arguments, ...) -> result


class ShapeMode(LeanFakeTensorMode):
    """A fake tensor mode that counts the work of each operator, and passes outputs to memory trackers. Data-dependent
    checks return True, and reading a number from a fake tensor returns a fixed number.

    Args:
        over_gloo: True: devices communicate over gloo (a run on CPUs); False: over NCCL.
    """

    def __init__(self, over_gloo: bool = False) -> None:
        super().__init__()
        self.over_gloo = over_gloo
        self.phase: str | None = None  # set by `Steady`; None: outside of the traced window, work is not counted
        self.work: Counter[tuple[str, Work]] = Counter()
        self.sent: Counter[tuple[str, Collective]] = Counter()  # by phase and collective: bytes of the full tensors
        self.operators = 0  # number of calls of operators, except in updates, which may call thousands per parameter
        self.micro_batches = 1  # number of micro-batches of a traced window
        self.spread = False  # whether tokens were assumed to be spread evenly over experts
        self._inside = False  # whether an operator is being computed; operators that it calls are not counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ASKS_FOR_DEVICE:  # tested first, because it is called as often as all other operators together
            return args[0].device
        if func is WAITS:  # torch's fake tensors would return a new tensor
            return args[0]
        if func.namespace == "profiler":  # annotations of torch.optim for the profiler
            return func(*args, **(kwargs or {}))
        if self._inside:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if func.namespace == "aten" and self.phase != "update":
            self.operators += 1
            if self.operators > OPERATORS * self.micro_batches:
                raise TraceTooLong(
                    f"more than {OPERATORS:,} operators, or a loop that ends only on certain tensor values"
                )
        if func is READ_A_NUMBER and isinstance(args[0], FakeTensor):
            return _yes(args[0].dtype)
        if func in COMPARES:
            return True
        if func is NONZERO:
            return self._used(args[0])
        if func is SPLIT and sum(args[1]) != args[0].shape[(args[2:] or (0,))[0]]:
            args = self._evenly(*args)
        self._inside = True
        try:
            out, work = self._computed(func, types, args, kwargs or {})
        finally:
            self._inside = False
        if out is NotImplemented:  # an argument is a DTensor, which calls the operator again with its local shard
            return out
        if self.phase is not None and work is not None:
            self.work[self.phase, work] += 1
        if self.phase is not None and (call := traffic.sent(func, args, out)) is not None:
            self.sent[self.phase, call[0]] += call[1]
        tracker.see(out)
        if func is ADDS_IN_PARTS and self.over_gloo:  # unlike NCCL, gloo copies the full tensor
            with self:
                torch.empty_like(args[1])
        return out

    def counting(self, phase: str, call: Callable) -> Callable:
        """Returns a wrapper that calls a function and counts its work in `phase`, even during another phase. Outside of
        the traced window, its work is not counted."""

        def counted(*args, **kwargs):
            before, self.phase = self.phase, self.phase and phase  # outside of the traced window it stays None
            try:
                return call(*args, **kwargs)
            finally:
                self.phase = before

        return counted

    def _used(self, mask: Tensor) -> Tensor:
        """Returns the indices that `nonzero` is assumed to find in a mask of a mixture of experts. For a mask (E,) over
        experts: EXPERTS indices, or E if there are fewer experts. For a mask (k, T) over tokens: 1 / EXPERTS of the
        k * T entries, as if the entries were spread evenly over EXPERTS experts."""
        self.spread = True
        rows = min(EXPERTS, mask.numel()) if mask.dim() == 1 else -(-mask.numel() // EXPERTS)
        with self:
            return mask.new_empty((rows, mask.dim()), dtype=torch.int64)

    def _evenly(self, tokens: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, list[int], int]:
        """Returns the arguments of a split into sizes that differ by at most one token. The given `sizes` cannot be
        used: the model read them from a tensor, and fake tensors have no values."""
        self.spread = True
        share, more = divmod(tokens.shape[dim], len(sizes))
        return tokens, [share + (i < more) for i in range(len(sizes))], dim

    def _computed(self, func, types, args: tuple, kwargs: dict) -> tuple[object, Work | None]:
        tensors: list[Tensor] = []
        key: list = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        plain = _noted(args, key, tensors) and (not kwargs or _noted(kwargs.values(), key, tensors))
        if plain:
            key += kwargs
            if len(numbers := [*map(id, tensors)]) > len({*numbers}):
                key += map(numbers.index, numbers)  # for example x * x, where both arguments are one tensor
            known = _known.get(key := tuple(key))
            if known is not None:
                return self._outputs(known, tensors), known.work
        if not plain and func not in MAKES_OF_NUMBERS and _is_real(args):
            return func(*args, **kwargs), None
        shapes = [tensor.shape for tensor in tensors]
        call = self._experts if func is GROUPED_PRODUCTS else super().__torch_dispatch__
        out = call(func, types, args, kwargs)
        if out is NotImplemented:
            return out, None
        work = work_of(func, args, kwargs, out)
        resized = shapes != [tensor.shape for tensor in tensors]  # the operator has resized an out= argument
        if plain and not resized and (known := _as_known(func, tensors, out, work)) is not None:
            _known[key] = known
        return out, work

    def _outputs(self, known: Known, tensors: list[Tensor]) -> object:
        if known.yields is not None:
            return tensors[known.yields]
        outputs = [spec and self._output(spec, tensors) for spec in known.makes]
        return outputs[0] if known.kind is None else known.kind(outputs)

    def _output(self, spec: OutputSpec, tensors: list[Tensor]) -> Tensor:
        if spec.view_of is None:
            meta = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        else:
            storage = tensors[spec.view_of].untyped_storage()
            meta = torch.empty(0, dtype=spec.dtype, device="meta").set_(storage, spec.offset, spec.shape, spec.stride)
        return self.holding(meta)

    def _experts(self, func, types, args: tuple, kwargs: dict) -> Tensor:
        """Computes the grouped matrix products of experts in bf16, because torch's shape inference supports only bf16.
        The result has the dtype of the first argument."""
        a, b, *rest = args
        with self:
            return func(a.bfloat16(), b.bfloat16(), *rest, **kwargs).to(a.dtype)


def _is_real(args: tuple) -> bool:
    """Returns True if a call has tensor arguments, and none of these tensors is fake. An example is the tensor of ranks
    of a device mesh."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(type(tensor) is Tensor for tensor in tensors)


def _noted(values, key: list, tensors: list[Tensor]) -> bool:
    """Appends a description of each argument to the cache key, and each fake tensor to `tensors`. Returns: False if the
    call cannot be cached."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return False
            if value.fake_device.type != "cpu":  # for example a meta tensor
                return False
            key += (value.dtype, value.shape, value.stride(), value.storage_offset())
            tensors.append(value)
        elif kind in PLAIN:
            key += (kind, value)  # with the type: 1 == 1.0, but the dtype of the result may differ
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _noted(value, key, tensors):
                return False
        else:
            return False
    return True


def _as_known(func: OpOverload, tensors: list[Tensor], out: object, work: Work | None) -> Known | None:
    """Returns the cache entry of a call. None: the call must not be cached, because its result could not be created
    again from the shapes of the arguments."""
    if func.namespace != "aten" or {*func.tags} & NOT_BY_SHAPE:
        return None
    if schema(func).is_mutable:
        written = [argument.name for argument in schema(func).arguments if argument.is_write]
        if out is None:  # the operator changes tensors in place and returns nothing
            return Known((None,), None, None, work)
        changed = next((number for number, tensor in enumerate(tensors) if tensor is out), None)
        return None if changed is None or len(written) > 1 else Known((), None, changed, work)
    several = isinstance(out, tuple | list)
    storages = {storage_key(t): number for number, t in enumerate(tensors)}
    makes = []
    for output in out if several else (out,):
        spec = None if output is None else _as_made(output, storages)
        if output is not None and spec is None:
            return None
        makes.append(spec)
        if spec is not None and spec.view_of is None:
            storages[storage_key(output)] = -1  # a further output in this storage could not be created again
    kind = list if isinstance(out, list) else tuple if several else None
    return Known(tuple(makes), kind, None, work)


def _as_made(output: object, storages: dict[int, int]) -> OutputSpec | None:
    plain = type(output) is FakeTensor and output.constant is None and output.layout is torch.strided
    if not plain or output.dtype.is_complex or output.requires_grad or output.fake_device.type != "cpu":
        return None
    view_of = storages.get(storage_key(output))
    if view_of == -1:
        return None
    spec = OutputSpec(output.shape, output.stride(), output.dtype, output.storage_offset(), view_of)
    if view_of is None:
        again = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        if spec.offset or again.untyped_storage().nbytes() != output.untyped_storage().nbytes():
            return None
    return spec


def _yes(dtype: torch.dtype) -> bool | float | int:
    return True if dtype == torch.bool else 0.5 if dtype.is_floating_point else 1
