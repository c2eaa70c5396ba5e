"""Computes attention on fake tensors so that it needs as much memory as a kernel on a card, both for saved tensors and
for temporary tensors in backward. `as_card.py` replaces torch's attention by `Attend` to trace runs for a card.

`Attend` calls torch's operator for the kernel that `attention.py` predicts. Shape inference and autograd of the
operator work without a card, so the saved tensors are exact. The temporary memory inside a kernel's backward does not
consist of tensors that a trace can see. Formulas from the sources of torch and cudnn-frontend give its size, and
tensors of this size are kept alive while the backward runs.

The trace ignores some temporary memory:

- Flash attention splits the keys of short rows in forward, with buffers of 2 x multiprocessors x 64 x head size x
  4 bytes (8 MiB on an H100 with a head size of 128).
- The execution plans of cuDNN have a workspace, whose size is not documented.
- The softmax of the math kernel creates a mask to find fully masked rows. The mask takes a quarter of the bytes of the
  scores. The backward of the math kernel needs more temporary memory than this mask, so the mask does not raise the
  peak.
- The backward of memory-efficient attention allocates an fp32 product, see `efficient_scratch`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.plan.tracing.attention import CUDNN, EFFICIENT, FLASH, SHORT, AttentionCall, advice, kernel
from lowmem.system.torch_private import ATTENTION_CUDNN, ATTENTION_EFFICIENT, ATTENTION_FLASH, ATTENTION_MATH


class Attend:
    """A replacement of `F.scaled_dot_product_attention`. Args: capability: the card's compute capability."""

    def __init__(self, capability: float) -> None:
        self.capability = capability
        self.advice: str | None = None  # the result of `advice` for the first training call that uses the math kernel
        self._by_kernel = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn}

    def __call__(  # noqa: PLR0913
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes attention. Takes the arguments of `F.scaled_dot_product_attention`. Args: query: (B, heads, T, D);
        key, value: (B, heads of keys, T of keys, D), with fewer heads than `query` if heads are grouped."""
        query, key, value, mask = map(_by_autocast, (query, key, value, attn_mask))
        with torch.autocast("cpu", enabled=False):  # inputs are cast; operators run without autocast
            call = _call(query, key, value, mask, dropout_p, is_causal)
            if call.trains:
                self.advice = self.advice or advice(call, self.capability)
            compute = self._by_kernel.get(kernel(call, self.capability))
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype)  # convert_boolean_attn_mask, in attention.cpp
            if compute is None:
                return ATTENTION_MATH.decompose(
                    query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
                )[0]
            return compute(query, key, value, mask, call, scale)


def _by_autocast(tensor: Tensor | None) -> Tensor | None:
    """Casts a floating-point tensor to autocast's 16-bit dtype, as autocast does for attention
    (AT_FORALL_LOWER_PRECISION_FP in ATen/autocast_mode.h). A no-op if autocast is disabled."""
    if tensor is None or not tensor.is_floating_point() or not torch.is_autocast_enabled("cpu"):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> AttentionCall:
    tensors = (query, key, value)
    return AttentionCall(
        dtype=query.dtype,
        head=query.shape[-1],
        value=value.shape[-1],
        grouped=query.shape[-3] != key.shape[-3],
        mask=mask is not None,
        causal=causal,
        square=query.shape[-2] == key.shape[-2],
        dropout=dropout,
        trains=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        plain=all(t.dim() == 4 and t.stride(-1) == 1 for t in tensors),
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: None, call: AttentionCall, scale: float | None) -> Tensor:
    """Calls flash attention, and pads the head size to a multiple of 8, as pad_last_dim in attention.cpp does."""
    short = -call.head % 8
    padded = [F.pad(t, (0, short)) if short else t for t in (query, key, value)]
    out = ATTENTION_FLASH(*padded, call.dropout, call.causal, scale=scale)[0]
    _while_backward(out, flash_scratch(query, key))
    return out[..., : call.head] if short else out


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall, scale: float | None
):
    """Calls memory-efficient attention. The mask is stored with a last dimension padded to a multiple of 8, as
    preprocess_mask in attention.cpp does."""
    if mask is not None:
        short, shape = -mask.shape[-1] % 8, (*query.shape[:3], key.shape[2])
        mask = (F.pad(mask, (0, short))[..., : mask.shape[-1]] if short else mask).expand(shape)
    out = ATTENTION_EFFICIENT(query, key, value, mask, call.trains, call.dropout, call.causal, scale=scale)[0]
    _while_backward(out, efficient_scratch(query))
    return out


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall, scale: float | None
) -> Tensor:
    out = ATTENTION_CUDNN(query, key, value, mask, call.trains, call.dropout, call.causal, scale=scale)[0]
    _while_backward(out, cudnn_scratch(query, key))
    return out


def _while_backward(out: Tensor, scratch: list[int]) -> None:
    """Keeps temporary tensors alive while the backward of `out` runs. Args: scratch: the sizes of these tensors in
    bytes."""
    if out.grad_fn is None:
        return
    scratch_tensors: list[Tensor] = []

    def before(_: object) -> None:
        scratch_tensors.extend(torch.empty(size, dtype=torch.uint8) for size in scratch)

    def after(*_: object) -> None:
        scratch_tensors.clear()

    out.grad_fn.register_prehook(before)
    out.grad_fn.register_hook(after)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def flash_scratch(query: Tensor, key: Tensor) -> list[int]:
    """Returns the bytes of the temporary tensors in the backward of flash attention, as mha_bwd in
    cuda/flash_attn/flash_api.cpp allocates them: the gradient of the query and a sum for each row, both in fp32. With
    grouped heads, the kernel first computes the gradients of keys and values for every query head, in the query's
    dtype, and sums them later."""
    batch, heads, tokens, size = query.shape
    padded, rows = _up(size, 8), _up(tokens, 128)
    expanded = query.element_size() * batch * heads * key.shape[-2] * padded
    summed = 4 * batch * heads * rows
    return [summed * _up(padded, 32 if padded <= 128 else 64), summed, *[expanded] * 2 * (key.shape[1] < heads)]


def efficient_scratch(query: Tensor) -> list[int]:
    """Returns the bytes of the temporary tensors in the backward of memory-efficient attention, as
    _efficient_attention_backward in cuda/attention_backward.cu allocates them: a sum for each row, and a workspace.

    The size of the workspace is workspace_size in cuda/mem_eff_attention/kernel_backward.h, for the largest tiles that
    a card may use. It contains the gradient of the query in fp32. With a 16-bit dtype and a head size above 64, it also
    contains the gradients of keys and values for each split of the keys. The sums are computed from an fp32 product,
    which is not counted, because the workspace is at least as large.
    """
    batch, heads, tokens, size = query.shape
    many = 4 * batch * heads
    workspace = many * _up(tokens, 64 if size <= 64 else 128) * _up(size, 64)
    if query.dtype in SHORT and size > 64:
        splits = max(1, min(-(-tokens // 64), 200 // (batch * heads)))
        workspace += many * 2 * splits * 64 * _up(size, 128)
    return [many * tokens, workspace]


def cudnn_scratch(query: Tensor, key: Tensor) -> list[int]:
    """Returns the bytes of the temporary tensors in the backward of cuDNN attention, as CompositeSDPABackwardNode of
    cudnn-frontend allocates them: the gradient of the query and a sum for each row, both in fp32. With grouped heads,
    cuDNN is assumed to need the same additional memory as flash attention."""
    batch, heads, tokens, size = query.shape
    expanded = query.element_size() * batch * heads * key.shape[-2] * size
    summed = 4 * batch * heads * tokens
    return [summed * size, summed, *[expanded] * 2 * (key.shape[1] < heads)]
