"""A linear layer whose matrix is stored in 4 bits: 0.52 bytes per parameter instead of 2 or 4.

Each block of 64 elements is divided by its largest, and each element is then rounded to one of NF4's 16 values, which
cut a normal distribution into equal shares. The scales, one per block, are themselves stored in 8 bits, with one scale
per 256 of them (double quantisation). For each product, forward and backward, the matrix is dequantised into the
product's dtype and dropped again, so that autograd saves nothing of it. It costs that work, and a rounding by some 9 %
of each weight's size. So the matrix cannot be trained, only what is added to its product. Source: Dettmers et al. 2023,
arXiv 2305.14314.

The arithmetic is bitsandbytes', the layer is not. bitsandbytes' layer repacks its matrix when it is evaluated on a CPU
with AVX512-BF16, after which all gradients through it are silently wrong; it stores its scales where neither a ledger
nor a trace sees them; and on a CPU it reads a matrix whose rows are no multiple of 64 in wrong blocks. Here blocks run
over the flat matrix, padded with zeros, which a CPU also reads up to ten times as fast.
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
BLOCK = 64  # elements per scale
BLOCKS = 256  # scales per second-level scale
PIECE = 1 << 22  # elements that are quantised at once: on a CPU it takes some 20 bytes each


class NF4Linear(nn.Linear, Packed):
    """Computes x (..., in) -> (..., out) like the layer from which it is made, up to the rounding to 4 bits.

    Args:
        layer: an nn.Linear, or GPT-2's Conv1D, whose matrix is transposed. Its bias is taken over, and is not trained.
    """

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        nn.Module.__init__(self)  # nn.Linear's would first allocate a matrix
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
        """Returns the number of the matrix's elements; it is no parameter any more."""
        return self.out_features * self.in_features

    @property
    def weight(self) -> Tensor:
        """Returns (out, in) in the dtype in which it was loaded, dequantised at each call."""
        return self.dequantised(self.dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns (out, in) in another dtype."""
        scales = ops.dequantize_blockwise(self.scales, self.scales_of_scales, self.table, BLOCKS, torch.float32)
        blocks = ops.dequantize_4bit(self.codes, scales.add_(self.mean), BLOCK, "nf4", (len(scales), BLOCK), dtype)
        return blocks.flatten()[: self.packed_elements].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return _Product.apply(x, self)

    def linear(self, dtype: torch.dtype) -> nn.Linear:
        """Returns an ordinary layer with the dequantised matrix in `dtype`."""
        with torch.device("meta"):  # no random weights are drawn, only to be replaced
            layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight, layer.bias = nn.Parameter(self.dequantised(dtype), requires_grad=False), self.bias
        return layer

    def as_found(self, layer: nn.Linear) -> nn.Linear | Conv1D:
        """Returns `layer` as the kind of layer from which this one was made."""
        if not self.transposed:
            return layer
        with torch.device("meta"):
            turned = Conv1D(self.out_features, self.in_features)
        turned.weight, turned.bias = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False), layer.bias
        return turned


class _Product(torch.autograd.Function):
    """The product with the matrix; it saves the layer, and no tensor."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantised(gradient.dtype), None


def quantised(matrix: Tensor) -> dict[str, Tensor]:
    """Quantises a matrix of n elements. Returns: codes (n / 2, 1), two per byte; scales (n / 64,) in 8 bits, with their
    own scales, the table of their 256 values, and their mean."""
    flat = F.pad(matrix.flatten(), (0, -matrix.numel() % BLOCK))
    pieces = [ops.quantize_4bit(piece, BLOCK, "nf4", torch.uint8) for piece in flat.split(PIECE)]
    codes, scales = (torch.cat(each) for each in zip(*pieces, strict=True))
    mean = scales.mean()
    with torch.device("cpu"):  # bitsandbytes reads values there
        table = create_dynamic_map().to(matrix.device)
    small, scales_of_scales = ops.quantize_blockwise(scales - mean, table, BLOCKS)
    return {"codes": codes, "scales": small, "scales_of_scales": scales_of_scales, "table": table, "mean": mean}


def quantise(model: PreTrainedModel) -> None:
    """Quantises every matrix of the model, one after the other, except embeddings, the head, and routers, whose choice
    of experts would change. It runs on the host wherever the model will be trained, so that the same weights get the
    same codes everywhere.

    Raises:
        Refused: a model without such a matrix.
    """
    names = [name for name, module in model.named_modules() if _fits(model, name, module)]
    if not names:
        raise Refused(
            f"adapter=qlora: {type(model).__name__} has no linear layers to quantize to 4 bits. Type adapter=lora."
        )
    count = 0
    for name in names:  # the layer is looked up by name, so that nothing else refers to it once it is replaced
        layer = NF4Linear(model.get_submodule(name))
        model.set_submodule(name, layer)
        count += layer.packed_elements
    log.info(
        f"adapter=qlora: quantized {len(names)} matrices to 4 bits, {count:,} of {parameters(model):,} parameters."
    )


def _fits(model: PreTrainedModel, name: str, module: nn.Module) -> bool:
    """Returns True if a layer can be replaced: a subclass may compute more than a product, and a tied matrix is an
    embedding's."""
    alone = module is not model.get_output_embeddings() and not is_router(name)
    return type(module) in (nn.Linear, Conv1D) and alone and module.weight is not model.get_input_embeddings().weight
