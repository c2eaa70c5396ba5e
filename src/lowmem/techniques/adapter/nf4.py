"""A linear layer whose matrix is held in 4 bits: 0.52 bytes a parameter instead of 2 or 4.

Each block of 64 elements is divided by its largest, and each element is then rounded to one of NF4's 16 values, which
cut a normal distribution into equal shares. The scales, one of each block, are themselves held in 8 bits, with a scale
to 256 of them (double quantisation). For each product the matrix is brought back into the product's dtype and dropped
again, forward and backward, so that autograd keeps nothing of it. It costs that work, and a rounding by some 9 % of
each weight's size. So the matrix cannot be trained, only what is added to its product. Source: Dettmers et al. 2023,
arXiv 2305.14314.

The arithmetic is bitsandbytes', the layer is not. Theirs repacks its matrix when it is evaluated on a CPU with
AVX512-BF16, and all gradients behind it are wrong from then on, without an error; holds its scales where neither a
ledger nor a trace sees them; and on a CPU reads a matrix whose rows are no multiple of 64 in wrong blocks. Here blocks
run over the flat matrix, filled up with zeros, which a CPU also reads up to ten times as fast.
"""

import logging

import bitsandbytes  # noqa: F401  (whose operators torch knows by name from then on)
import torch
import torch.nn.functional as F
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem.model.trainable import Packed, parameters
from lowmem.system.errors import Refused
from lowmem.techniques.adapter.lora import is_router

log = logging.getLogger(__name__)

ops = torch.ops.bitsandbytes
BLOCK = 64  # elements to a scale
BLOCKS = 256  # scales to a scale of theirs
PIECE = 1 << 22  # elements that are quantised at once: on a CPU it takes some 20 bytes each


class NF4Linear(nn.Linear, Packed):
    """x (..., in) -> (..., out), as the layer whose matrix it was made of, but for what 4 bits leave of that.

    Args:
        layer: an nn.Linear, or GPT-2's Conv1D, whose matrix lies the other way round. Its bias is taken over, and is
            not trained.
    """

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        nn.Module.__init__(self)  # whose own matrix would be allocated first
        self.transposed = isinstance(layer, Conv1D)
        matrix = layer.weight.detach().t() if self.transposed else layer.weight.detach()  # (out, in)
        self.out_features, self.in_features = matrix.shape
        self.dtype = matrix.dtype
        for name, tensor in quantised(matrix).items():
            self.register_buffer(name, tensor)
        self.bias = layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @property
    def packed_elements(self) -> int:
        """Of the matrix, which is no parameter any more."""
        return self.out_features * self.in_features

    @property
    def weight(self) -> Tensor:
        """(out, in), in the dtype that it was loaded in: made anew each time."""
        return self.dequantised(self.dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """(out, in)."""
        scales = ops.dequantize_blockwise(self.scales, self.scales_of_scales, self.table, BLOCKS, torch.float32)
        blocks = ops.dequantize_4bit(self.codes, scales.add_(self.mean), BLOCK, "nf4", (len(scales), BLOCK), dtype)
        return blocks.flatten()[: self.packed_elements].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return _Product.apply(x, self)

    def linear(self, dtype: torch.dtype) -> nn.Linear:
        """A layer of the same function, with what 4 bits have left of the matrix, in `dtype`."""
        with torch.device("meta"):  # its own start would be drawn for nothing
            layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight, layer.bias = nn.Parameter(self.dequantised(dtype), requires_grad=False), self.bias
        return layer

    def as_found(self, layer: nn.Linear) -> nn.Linear | Conv1D:
        """Of the kind that this one was made of."""
        if not self.transposed:
            return layer
        with torch.device("meta"):
            turned = Conv1D(self.out_features, self.in_features)
        turned.weight, turned.bias = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False), layer.bias
        return turned


class _Product(torch.autograd.Function):
    """Keeps the layer, and no tensor."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantised(gradient.dtype), None


def quantised(matrix: Tensor) -> dict[str, Tensor]:
    """Of a matrix of n elements: codes (n / 2, 1), two to a byte; scales (n / 64,) in 8 bits, with their own scales,
    the table of 256 values that they are of, and their mean."""
    flat = F.pad(matrix.flatten(), (0, -matrix.numel() % BLOCK))
    parts = [ops.quantize_4bit(piece, BLOCK, "nf4", torch.uint8) for piece in flat.split(PIECE)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    mean = scales.mean()
    with torch.device("cpu"):  # it reads its numbers
        table = create_dynamic_map().to(matrix.device)
    small, scales_of_scales = ops.quantize_blockwise(scales - mean, table, BLOCKS)
    return {"codes": codes, "scales": small, "scales_of_scales": scales_of_scales, "table": table, "mean": mean}


def quantise(model: PreTrainedModel) -> None:
    """Every matrix of the model, one after the other, but for its embeddings, its head, and routers, whose choice of
    experts would change. On the host, wherever it will be trained: the same weights are the same codes everywhere.

    Raises:
        Refused: a model without such a matrix.
    """
    names = [name for name, part in model.named_modules() if _fits(model, name, part)]
    if not names:
        raise Refused(
            f"adapter=qlora: {type(model).__name__} has no matrix in a layer of its own, which is what is held in 4 "
            "bits. Type adapter=lora."
        )
    count = 0
    for name in names:  # the layer is looked up by name, so that nothing else holds it once it is replaced
        layer = NF4Linear(model.get_submodule(name))
        model.set_submodule(name, layer)
        count += layer.packed_elements
    log.info(
        f"adapter=qlora: {len(names)} matrices, {count:,} of {parameters(model):,} parameters, are held in 4 bits."
    )


def _fits(model: PreTrainedModel, name: str, part: nn.Module) -> bool:
    """A subclass may do more than its product; a tied matrix is an embedding's."""
    alone = part is not model.get_output_embeddings() and not is_router(name)
    return type(part) in (nn.Linear, Conv1D) and alone and part.weight is not model.get_input_embeddings().weight
