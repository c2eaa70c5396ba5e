"""Makes a trace on a CPU allocate the tensors that a run on CUDA allocates, so that a machine without a card can plan
for a card.

Dropout, attention, autocast and torch.optim allocate different tensors on a CPU than on CUDA. For a trace, `kernels`
replaces the first three, and `foreach` changes the optimizers of torch.optim.
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

# Operators of language models that autocast computes in fp32 on CUDA, but not on a CPU (AT_FORALL_FP32 and
# _FP32_SET_OPT_DTYPE in aten/src/ATen/autocast_mode.h). `_autocast` skips operators that the installed torch does not
# cast on CUDA, such as rms_norm in torch 2.11.
IN_FP32 = (
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "exp", "expm1", "log", "log1p", "rsqrt", "reciprocal"),
    *("softplus", "layer_norm", "rms_norm", "group_norm", "logsumexp"),
)
# operators that autocast on CUDA computes in fp32 by setting their argument `dtype`
SUMS_IN_FP32 = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")


@contextmanager
def kernels(on_card: bool, capability: float | None = None) -> Iterator[Attend | None]:
    """Context manager in which dropout, attention and autocast allocate the same tensors as on CUDA.

    On CUDA, dropout saves a mask of one byte per element (aten/src/ATen/native/cuda/Dropout.cu). On a CPU, autograd
    saves the noise in the dtype of the input (aten/src/ATen/native/Dropout.cpp).

    Args:
        on_card: True: the run is planned for a card. False: nothing is replaced.
        capability: the card's compute capability; None: the compute capability of this machine's card, or of the
            reference card (`cards.REFERENCE`) if this machine has none.

    Yields:
        The replacement of torch's attention; None if `on_card` is False.
    """

    if not on_card:
        yield None
        return
    attend = Attend(capability or _capability())
    with patch.object(F, "scaled_dot_product_attention", attend), _dropout(), _autocast():
        yield attend


def workspaces(run: Run, capability: float | None) -> tuple[int, int]:
    """Returns the bytes of cuBLAS workspaces that a run's first forward pass allocates, and the bytes that the first
    backward pass allocates.

    Each thread that computes matrix products has a separate workspace: the training thread computes the forward pass,
    and autograd's thread the backward pass. With weights.order=by_layer, each micro-batch has a thread that computes
    both passes, in training and in evaluations. Then the first value is for the threads of all micro-batches of the
    largest window, and the second value is for the training thread, which computes windows and groups of a single
    micro-batch. Pipelines get the same values as by_layer.
    """
    size = cards.workspace(capability or _capability(), bool(run.deterministic))
    return (run.windows.largest if run.overlaps else 1) * size, size


def _capability() -> float:
    card = cards.here() if torch.cuda.is_available() else cards.named(cards.REFERENCE)
    return card.capability


@contextmanager
def _dropout() -> Iterator[None]:
    """Context manager that replaces dropout at the Autograd dispatch key, so that composite operators, such as math
    attention, also use the replacement."""

    def on_card(input: Tensor, p: float, train: bool) -> Tensor:
        return torch.ops.aten.native_dropout(input, p, True)[0] if train and p > 0 else input

    with replaced_kernels("AutogradCPU") as ours:
        ours.impl("dropout", on_card)
        yield


@contextmanager
def _autocast() -> Iterator[None]:
    """Context manager that replaces operators at the Autocast dispatch key, so that the recomputation in backward also
    uses the replacements."""
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
        if has_dtype or not _has_16_bits(input):
            return op(input, *args, **kwargs)
        return op(input, *(arg for arg in args if arg is not None), **kwargs | {"dtype": torch.float32})


def _widened(value: object) -> object:
    return value.float() if _has_16_bits(value) else value


def _has_16_bits(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def foreach(make: MakeOptimizer) -> MakeOptimizer:
    """Returns a factory of optimizers that use torch.optim's foreach implementation, which is the default on CUDA but
    not on a CPU (`_default_to_fused_or_foreach` in torch/optim/optimizer.py). The temporary tensors of foreach take
    about the same memory as the parameters. Optimizers keep their implementation if `foreach` is set, or `fused` is
    True."""

    def on_card(groups: list[dict]):
        optimizer = make.make(groups)
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer

    return MakeOptimizer(on_card, make.embedding_bits)
