"""A linear layer whose matrix is stored in 4 bits: 0.52 bytes per parameter instead of 2 or 4.

Each block of 64 elements is divided by its largest, and each element is then rounded to one of NF4's 16 values, which
cut a normal distribution into equal shares. The scales, one per block, are themselves stored in 8 bits, with one scale
per 256 of them (double quantization). For each product, forward and backward, the matrix is dequantized into the
product's dtype and dropped again, so that autograd saves nothing of it. It costs that work, and a rounding by some 9 %
of each weight's size. So the matrix cannot be trained, only what is added to its product. Source: Dettmers et al. 2023,
arXiv 2305.14314.

The arithmetic is bitsandbytes', the layer is not. bitsandbytes' layer repacks its matrix when it is evaluated on a CPU
with AVX512-BF16, after which all gradients through it are silently wrong; it stores its scales where neither a ledger
nor a trace sees them; and on a CPU it reads a matrix whose rows are not a multiple of 64 in wrong blocks. Here blocks
run over the flat matrix, padded with zeros, which a CPU also reads up to ten times as fast.

Fused experts are packed too, expert by expert, to the codes of unfused matrices.
"""

import logging
import math
from collections.abc import Sequence

import bitsandbytes  # noqa: F401  (whose operators torch knows by name from then on)
import torch
import torch.nn.functional as F
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem.model.experts import fused_experts
from lowmem.model.linear_layers import linear_layers
from lowmem.model.trainable import Packed, packed, parameters
from lowmem.system.errors import Refused
from lowmem.techniques.adapter import stacks

log = logging.getLogger(__name__)

ops = torch.ops.bitsandbytes
BLOCK = 64  # elements per scale
BLOCKS = 256  # scales per second-level scale
with torch.device("cpu"):  # read once: a trace would count the hundreds of numbers for every matrix
    SCALES = create_dynamic_map().tolist()  # the 256 values of a scale in 8 bits
PIECE = 1 << 22  # elements that are quantized at once: on a CPU it takes some 20 bytes each


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
        for name, tensor in quantized(matrix).items():
            self.register_buffer(name, tensor)
        self.bias = layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @property
    def packed_elements(self) -> int:
        """Returns the number of elements of the matrix, which is not a parameter any more."""
        return self.out_features * self.in_features

    @property
    def largest(self) -> float:
        return _scales(self).max().item()

    @property
    def weight(self) -> Tensor:
        """Returns (out, in) in the dtype in which it was loaded, dequantized at each call."""
        matrix = self.dequantized(self.dtype)
        matrix._is_hf_initialized = True  # else transformers draws numbers for GPT-2's matrices after loading
        return matrix

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns (out, in) in another dtype."""
        return _dequantized(self, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x.to(stacks.dtype_of_products(x)), self)

    def unpacked(self, dtype: torch.dtype, device: str | None = None) -> nn.Linear | Conv1D:
        """Returns a layer of the kind from which this one was made, with the dequantized matrix in `dtype`; with
        device="meta" it has no memory yet."""
        return self.as_found(self.linear(dtype, device))

    def linear(self, dtype: torch.dtype, device: str | None = None) -> nn.Linear:
        """Returns an ordinary layer. Args: see `unpacked`."""
        with torch.device("meta"):  # allocates and initializes nothing, since the weights are replaced
            layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, dtype=dtype)
        matrix = layer.weight if device == "meta" else self.dequantized(dtype)
        layer.weight, layer.bias = nn.Parameter(matrix, requires_grad=False), self.bias
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
        return F.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


class NF4Stack(nn.Module, Packed):
    """Fused experts (experts, rows, columns), each quantized like the matrix of an `NF4Linear`, to the same codes.

    The codes and scales of an expert are padded to whole blocks of scales, so that one call dequantizes all experts.
    """

    transposed = False

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype, self.packed_elements = experts.shape, experts.dtype, experts.numel()
        elements = experts[0].numel()
        self.padded = -(-elements // (BLOCK * BLOCKS)) * BLOCK * BLOCKS  # elements of one expert
        # Expert by expert, so that no second copy of the stack is made.
        codes, scales = zip(*(_in_codes(F.pad(e.flatten(), (0, self.padded - elements))) for e in experts), strict=True)
        scales, own = torch.stack(scales), -(-elements // BLOCK)
        # The mean of a row may be summed in another order than that of a matrix alone.
        mean = torch.stack([of_expert.mean() for of_expert in scales[:, :own]])[:, None]  # (experts, 1)
        centred = (scales - mean).index_fill_(1, torch.arange(own, scales.shape[1], device=scales.device), 0.0)
        for name, tensor in {"codes": torch.cat(codes), **_scales_in_codes(centred.flatten()), "mean": mean}.items():
            self.register_buffer(name, tensor)

    @property
    def largest(self) -> float:
        return _scales(self).max().item()

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns (experts, rows, columns) in `dtype`."""
        count, rows, columns = self.shape
        flat = _dequantized(self, (count, self.padded), dtype)
        return flat[:, : rows * columns].reshape(self.shape)


def pack_experts(experts: nn.Module, names: Sequence[str]) -> None:
    """Quantizes stacks of this module's experts in place. Args: names: of 3-D parameters."""
    for name in names:
        stack = NF4Stack(getattr(experts, name).detach())
        delattr(experts, name)
        experts.add_module(name + stacks.NF4, stack)
    stacks.read_when_used(experts, names)


def _scales(layer: nn.Module) -> Tensor:
    """Returns the fp32 scales of a layer's blocks, which are the largest magnitudes in them."""
    scales = ops.dequantize_blockwise(layer.scales, layer.scales_of_scales, layer.table, BLOCKS, torch.float32)
    return scales.view(layer.mean.numel(), -1).add_(layer.mean).flatten()


def _dequantized(layer: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the first elements of a layer's blocks in this shape."""
    scales = _scales(layer)
    blocks = ops.dequantize_4bit(layer.codes, scales, BLOCK, "nf4", (len(scales), BLOCK), dtype)
    return blocks.flatten()[: math.prod(shape)].view(shape)


def quantized(matrix: Tensor) -> dict[str, Tensor]:
    """Quantizes a matrix of n elements. Returns: codes (n / 2, 1), two per byte; scales (n / 64,) in 8 bits, with their
    own scales, the table of their 256 values, and their mean."""
    codes, scales = _in_codes(F.pad(matrix.flatten(), (0, -matrix.numel() % BLOCK)))
    mean = scales.mean()
    return {"codes": codes, **_scales_in_codes(scales - mean), "mean": mean}


def _in_codes(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes (n / 2, 1) and fp32 scales (n / 64,) of n elements."""
    pieces = [ops.quantize_4bit(piece, BLOCK, "nf4", torch.uint8) for piece in flat.split(PIECE)]
    codes, scales = (torch.cat(each) for each in zip(*pieces, strict=True))
    return codes, scales


def _scales_in_codes(centred: Tensor) -> dict[str, Tensor]:
    table = torch.tensor(SCALES, dtype=torch.float32, device=centred.device)
    small, scales_of_scales = ops.quantize_blockwise(centred, table, BLOCKS)
    return {"scales": small, "scales_of_scales": scales_of_scales, "table": table}


def quantize(model: PreTrainedModel, with_experts: bool = True) -> None:
    """Quantizes every matrix of the model that is not quantized yet, one after the other, except embeddings, the head,
    and routers, whose choice of experts would change. It runs on the host wherever the model will be trained, so that
    the same weights get the same codes everywhere.

    Args:
        with_experts: also experts that are fused into one tensor.

    Raises:
        Refused: a model without such a matrix.
    """
    for name in [name for name, layer in linear_layers(model).items() if not isinstance(layer, NF4Linear)]:
        # the layer is looked up by name, so that nothing else refers to it once it is replaced
        model.set_submodule(name, NF4Linear(model.get_submodule(name)))
    for name, keys in fused_experts(model).items() if with_experts else ():
        pack_experts(model.get_submodule(name), keys)
    if not packed(model):
        raise Refused(
            f"adapter=qlora: {type(model).__name__} has no linear layers to quantize to 4 bits. Type adapter=lora."
        )
    matrices, experts = (sum(isinstance(one, kind) for one in model.modules()) for kind in (NF4Linear, NF4Stack))
    count, total = sum(packed(model)), parameters(model)
    and_stacks = f" and {experts} stacks of experts" if experts else ""
    log.info(
        f"adapter=qlora: quantized {matrices} matrices{and_stacks} to 4 bits, {count:,} of {total:,} parameters "
        f"({count / total:.0%})."
    )
