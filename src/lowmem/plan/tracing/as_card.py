"""Makes a CPU compute as a CUDA device does, so that a run can be planned for a card on a machine without one.

Each difference names its source in torch. Where only the card could tell, a margin is added, and the plan says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.config import cards
from lowmem.config.settle import Run
from lowmem.plan.tracing.attend import Attend
from lowmem.system.torch_private import has_kernel, replaced_kernels
from lowmem.techniques.optim.build import MakeOptimizer

# Operators of language models that CUDA's autocast computes in fp32 and a CPU's in 16 bits (AT_FORALL_FP32 and
# _FP32_SET_OPT_DTYPE in aten/src/ATen/autocast_mode.h). Not every torch has them all: 2.11 leaves rms_norm in 16 bits.
IN_FP32 = (
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "exp", "expm1", "log", "log1p", "rsqrt", "reciprocal"),
    *("softplus", "layer_norm", "rms_norm", "group_norm", "logsumexp"),
)
SUMS_IN_FP32 = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")  # by their `dtype`


@contextmanager
def kernels(on_card: bool, capability: float | None = None) -> Iterator[Attend | None]:
    """Replaces dropout, attention and autocast by what CUDA computes. Args: capability: of the card; None: of this
    machine's card, or else of the reference. Yields: the replacement of torch's attention, if there is one.

    Dropout: aten/src/ATen/native/cuda/Dropout.cu keeps a mask of one byte per element; on a CPU autograd keeps the
    noise in the input's dtype (aten/src/ATen/native/Dropout.cpp).
    """

    if not on_card:
        yield None
        return
    attend = Attend(capability or _capability())
    with patch.object(F, "scaled_dot_product_attention", attend), _dropout(), _autocast():
        yield attend


def workspaces(run: Run, capability: float | None) -> tuple[int, int]:
    """Returns the bytes of cuBLAS's workspaces that are taken in forward, and in backward. Each thread that multiplies
    has its own: the loop's and torch's for backward; by layer one for each micro-batch, and the loop's for evaluations.
    """
    size = cards.workspace(capability or _capability(), bool(run.deterministic))
    return (run.windows.largest if run.overlaps else 1) * size, size


def _capability() -> float:
    card = cards.here() if torch.cuda.is_available() else cards.named(cards.REFERENCE)
    return card.capability


@contextmanager
def _dropout() -> Iterator[None]:
    """Registers dropout at autograd's level, below Python, so that composed operators such as math attention use it."""

    def on_card(input: Tensor, p: float, train: bool) -> Tensor:
        return torch.ops.aten.native_dropout(input, p, True)[0] if train and p > 0 else input

    with replaced_kernels("AutogradCPU") as ours:
        ours.impl("dropout", on_card)
        yield


@contextmanager
def _autocast() -> Iterator[None]:
    """Registers casts at autocast's level, below Python, so that a forward pass repeated in backward uses them too."""
    with replaced_kernels("AutocastCPU") as ours:
        for name in (name for name in (*IN_FP32, *SUMS_IN_FP32) if has_kernel(name, "AutocastCUDA")):
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            ours.impl(name, partial(_with_dtype if name in SUMS_IN_FP32 else _cast, op))
        yield


def _cast(op: Callable, *args, **kwargs) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return op(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})


def _with_dtype(op: Callable, input: Tensor, *args, **kwargs) -> Tensor:
    has_dtype = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
    with torch.autocast("cpu", enabled=False):
        if has_dtype or _widened(input) is input:
            return op(input, *args, **kwargs)
        return op(input, *(arg for arg in args if arg is not None), **kwargs | {"dtype": torch.float32})


def _widened(value: object) -> object:
    is_short = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_short else value


def foreach(make: MakeOptimizer) -> MakeOptimizer:
    """Makes torch.optim step all tensors of a group at once, its default on a card but not on a CPU
    (`_default_to_fused_or_foreach` in torch/optim/optimizer.py): that takes one more copy of gradients or parameters.
    """

    def on_card(groups: list[dict]):
        optimizer = make.make(groups)
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer

    return MakeOptimizer(on_card, make.embedding_bits)
