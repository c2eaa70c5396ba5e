"""Predicts which attention kernel torch selects on a card, for any dtype, compute capability and head size. `attend.py`
traces the memory of the predicted kernel.

The flash, memory-efficient and cuDNN kernels save no tensor with (tokens, tokens) elements per head. If none of these
three kernels supports a call, torch uses the math kernel, which saves several tensors of this size.

CPU builds of torch lack the code that selects a CUDA kernel, so this module implements the rules of torch 2.11 to 2.13.
The rules come from cuda/sdp_utils.cpp and sdp_utils_cpp.h in aten/src/ATen/native/transformers; comments and docstrings
name all other sources. On a card, tests/plan/test_attention.py compares the predictions with `torch._fused_sdp_choice`.
On an H200 with torch 2.11, all predictions agreed.
"""

from dataclasses import dataclass, replace

import torch

FLASH, EFFICIENT, CUDNN, MATH = "flash", "efficient", "cuDNN", "math"
LATER_THAN_2_11 = torch.__version__ >= (2, 12)
SHORT = (torch.float16, torch.bfloat16)
SUPPORTED = 12.1  # newest compute capability that the fused kernels support (check_sm_version, cutlassB.h)
# Compute capabilities for which torch prefers cuDNN (check_prefer_cudnn_attention) if cuDNN is newer than 9.15, as in
# torch's wheels for CUDA 13. With the older cuDNN in wheels for CUDA 12, torch uses the flash kernel. Both kernels need
# about the same memory.
PREFER_CUDNN = (9.0, 10.0, 10.3)
# dtype -> override that makes attention compute in this dtype; the most preferred override comes first
COMPUTES_IN = {torch.bfloat16: "precision=bf16", torch.float16: "precision=16", torch.float32: "precision=32"}


@dataclass(frozen=True)
class AttentionCall:
    """The properties of a call of `F.scaled_dot_product_attention` on which torch's selection of a kernel depends.

    Args:
        dtype: dtype of query, key and value, after autocast.
        head: head size of query and key.
        value: head size of value.
        grouped: whether several query heads share a key and value head.
        square: whether the number of keys is equal to the number of queries.
        trains: whether the call needs a backward pass.
        plain: whether query, key and value have four dimensions, the last of which is contiguous.
    """

    dtype: torch.dtype
    head: int
    value: int
    grouped: bool = False
    mask: bool = False  # whether a mask tensor was passed (`is_causal` is not a mask tensor)
    causal: bool = True
    square: bool = True
    dropout: float = 0.0
    trains: bool = True
    plain: bool = True


def kernel(call: AttentionCall, capability: float) -> str:
    """Returns the name of the kernel that select_sdp_backend would return: the first kernel in the order of
    sdp_priority_order (ATen/Context.h) that supports the call. The math kernel comes last and supports every call."""
    able = {CUDNN: _cudnn, FLASH: _flash, EFFICIENT: _efficient}
    order = (CUDNN, FLASH, EFFICIENT) if capability in PREFER_CUDNN else (FLASH, EFFICIENT)
    return next((name for name in order if call.plain and able[name](call, capability)), MATH)


def _flash(call: AttentionCall, capability: float) -> bool:
    """Returns whether flash attention supports the call, as can_use_flash_attention does. The head size need not be a
    multiple of 8, because torch pads it (attention.cpp)."""
    if call.dtype not in SHORT or not 8.0 <= capability <= SUPPORTED or call.mask:  # check_for_attn_mask
        return False
    if call.head != call.value or call.head > 256 or (call.causal and not call.square):
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    if call.trains and (8.6 <= capability <= 8.9 or capability >= 12.0):
        return call.head <= 192 or (call.head > 224 and not call.dropout)
    return True


def _efficient(call: AttentionCall, capability: float) -> bool:
    """Returns whether memory-efficient attention supports the call, as can_use_mem_efficient_attention does. Up to
    torch 2.14, check_batch_size_and_num_heads_dense refuses grouped heads. Later versions may accept them, but this has
    not been tested on a card. So for grouped heads this function returns False with any version of torch: in doubt, the
    math kernel is predicted, which needs more memory."""
    dtypes = (torch.float32, *SHORT) if capability >= 8.0 else (torch.float32, torch.float16)
    if call.dtype not in dtypes or not 5.0 <= capability <= SUPPORTED or call.grouped:
        return False
    multiple = _alignment(call.dtype, capability)
    return call.head % multiple == 0 and call.value % multiple == 0


def _alignment(dtype: torch.dtype, capability: float) -> int:
    """Returns the number by which the head sizes must be divisible, as minimum_gemm_alignment does."""
    if dtype in SHORT and capability >= 7.0:
        return 8
    return 4 if capability >= 8.0 else 1


def _cudnn(call: AttentionCall, capability: float) -> bool:
    """Returns whether cuDNN attention supports the call, as can_use_cudnn_attention does.

    torch 2.11 accepts any dropout probability, and for compute capability 9.0 head sizes up to 256. Later versions
    accept only a dropout probability that is a multiple of 1/16 (check_cudnn_dropout). With some versions of cuDNN,
    later versions of torch also accept head sizes up to 256, but for head sizes above 128 this function still returns
    False: the flash kernel, which is predicted instead, needs about the same memory.
    """
    if call.dtype not in SHORT or not 8.0 <= capability <= SUPPORTED:
        return False
    if call.dropout * 16 % 1 and LATER_THAN_2_11:
        return False
    largest = 256 if capability == 9.0 and not LATER_THAN_2_11 else 128
    return call.head % 8 == call.value % 8 == 0 and max(call.head, call.value) <= largest


def advice(call: AttentionCall, capability: float) -> str | None:
    """Returns a sentence that says why torch uses the math kernel, and which override avoids the kernel or reduces its
    memory. None: torch does not use the math kernel for the call."""
    if kernel(call, capability) != MATH:
        return None
    obstacles = [f"heads of {call.head} in {str(call.dtype).removeprefix('torch.')}"]
    obstacles += ["keys and values that several heads share"] * call.grouped + ["a mask"] * call.mask
    return (
        f"With {', '.join(obstacles)}, torch has no fused attention for compute capability {capability} and takes its "
        "math kernel, which stores (tokens, tokens) scores for each head, as eager attention does: type "
        f"{_cure(call, capability)}."
    )


def _cure(call: AttentionCall, capability: float) -> str:
    for dtype, override in COMPUTES_IN.items():
        if kernel(replace(call, dtype=dtype), capability) != MATH:
            return override
    return (
        "a smaller seq_len or batch_size, or gradient_checkpointing=every_layer to store the scores of one "
        "layer at a time; no precision helps"
    )
