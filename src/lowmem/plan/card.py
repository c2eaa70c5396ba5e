"""What a CUDA device does otherwise than a CPU, so that a run can be planned for a card where there is none.

Each difference names its source in torch. What cannot be known without the card is a margin, and the plan says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.optim.build import MakeOptimizer


@contextmanager
def kernels(on_card: bool) -> Iterator[None]:
    """Dropout and attention as CUDA computes them.

    Dropout: aten/src/ATen/native/cuda/Dropout.cu keeps a mask of one byte per element; on a CPU autograd keeps the
    noise in the input's dtype (aten/src/ATen/native/Dropout.cpp).
    Attention with dropout: the flash and memory-efficient kernels draw their mask again in backward
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); on a CPU torch falls back to products of (B, heads, T, T).
    """

    if not on_card:
        yield
        return
    attention = F.scaled_dot_product_attention

    def without_dropout(*args, dropout_p: float = 0.0, **kwargs) -> Tensor:
        return attention(*args, **kwargs)

    with patch.object(F, "dropout", _dropout), patch.object(F, "scaled_dot_product_attention", without_dropout):
        yield


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.ops.aten.native_dropout(input, p, True)[0] if training and p > 0 else input


def foreach(make: MakeOptimizer) -> MakeOptimizer:
    """torch.optim steps all tensors of a group at once on a card unless told otherwise, and on a CPU one by one
    (`_default_to_fused_or_foreach` in torch/optim/optimizer.py): one more copy of the gradients or the parameters."""

    def on_card(groups: list[dict]):
        optimizer = make.make(groups)
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer

    return MakeOptimizer(on_card, make.embedding_bits)
