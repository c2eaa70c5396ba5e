"""Computes attention on fake tensors so that it needs as much memory as a kernel on a card: saved tensors, and
temporary memory in backward. `as_card.py` replaces torch's attention by `Attend` to trace runs for a card.

`Attend` calls torch's operator for the kernel that `attention.py` predicts. Shape inference and autograd of the
operator work without a card, so the saved tensors are exact. The temporary memory inside a kernel's backward is not
visible as tensors. Its size is computed by formulas from torch's sources, and tensors of this size are kept alive while
the backward runs.

Three kinds of temporary memory are not counted:

- the buffers of the flash kernel if, for short rows, it splits the keys in forward (2 x multiprocessors x 64 x head
  size x 4 bytes: 8 MiB on an H100 with a head size of 128);
- the workspace of cuDNN's plans, whose size is not documented;
- the mask of masked rows in the softmax of the math kernel (a quarter of the bytes of the scores; the backward of the
  math kernel needs more).
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
        self.advice: str | None = None  # how to avoid the math kernel in the first training call that uses it
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
        """Computes attention with the arguments of `F.scaled_dot_product_attention`. Args: query: (B, heads, T, D);
        key, value: (B, heads or fewer, T, D)."""
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
    """Casts a tensor as autocast does for attention: to autocast's 16-bit dtype (AT_FORALL_LOWER_PRECISION_FP in
    ATen/autocast_mode.h)."""
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
    """Calls flash attention. Pads head sizes to a multiple of 8, as pad_last_dim in attention.cpp does."""
    short = -call.head % 8
    padded = [F.pad(t, (0, short)) if short else t for t in (query, key, value)]
    out = ATTENTION_FLASH(*padded, call.dropout, call.causal, scale=scale)[0]
    _while_backward(out, flash_scratch(query, key))
    return out[..., : call.head] if short else out


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall, scale: float | None
):
    """Calls memory-efficient attention. Pads the last dimension of a mask to a multiple of 8, as preprocess_mask in
    attention.cpp does."""
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
    cuda/flash_attn/flash_api.cpp allocates them: the gradient of the query in fp32, and a sum for each row. Grouped
    heads also need the gradients of keys and values for every query head, in the query's dtype, before these gradients
    are summed."""
    batch, heads, tokens, size = query.shape
    padded, rows = _up(size, 8), _up(tokens, 128)
    expanded = query.element_size() * batch * heads * key.shape[-2] * padded
    summed = 4 * batch * heads * rows
    return [summed * _up(padded, 32 if padded <= 128 else 64), summed, *[expanded] * 2 * (key.shape[1] < heads)]


def efficient_scratch(query: Tensor) -> list[int]:
    """Returns the bytes of the temporary tensors in the backward of memory-efficient attention, as
    _efficient_attention_backward in cuda/attention_backward.cu allocates them: a sum for each row, and a workspace.

    The workspace is workspace_size of cuda/mem_eff_attention/kernel_backward.h, for the largest tiles that a card may
    use. It has the gradient of the query in fp32, and for 16-bit heads larger than 64 also the gradients of keys and
    values for each split of the rows. The fp32 product from which the sums are computed is not counted, because the
    workspace is at least as large.
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
    cudnn-frontend allocates them: the gradient of the query and a sum for each row, in fp32. With grouped heads, cuDNN
    is assumed to need as much additional memory as flash."""
    batch, heads, tokens, size = query.shape
    expanded = query.element_size() * batch * heads * key.shape[-2] * size
    summed = 4 * batch * heads * tokens
    return [summed * size, summed, *[expanded] * 2 * (key.shape[1] < heads)]
