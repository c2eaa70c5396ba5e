"""Stores the matrices of linear layers and fused experts in 4 bits: 0.52 bytes per parameter instead of 2 or 4.

Each block of 64 elements is divided by its scale, the largest magnitude of its elements, and each quotient is rounded
to one of the 16 values of NF4, which are quantiles of a normal distribution. The scales are stored in 8 bits, after
their mean is subtracted, with one second-level scale per 256 scales (double quantization). Each product of a linear
layer, in forward and in backward, dequantizes the matrix to the product's dtype and then frees the dequantized copy;
autograd does not save it. The price is the time to dequantize, and a rounding error whose RMS is about 9 % of the RMS
of the weights. Quantized matrices are frozen; LoRA trains additional matrices (`lora.py`). Source: Dettmers et al.
2023, arXiv 2305.14314.

This module uses bitsandbytes' operators, but not its layer, for four reasons:

- On a CPU with AVX512-BF16, an evaluation makes the layer repack its matrix. Afterwards, all gradients through the
  layer are silently wrong.
- The layer stores its scales outside of its parameters and buffers, where neither the memory ledger nor a trace finds
  them.
- On a CPU, the layer misplaces the blocks of a matrix whose row length is not a multiple of 64. This module flattens
  the matrix, pads it with zeros, and divides the result into blocks.
- A CPU dequantizes this module's layout up to ten times as fast as the layout of the layer.

Fused experts are quantized one by one, so that each expert gets the codes that a separate matrix would get.
"""

import logging
import math
from collections.abc import Sequence

import bitsandbytes  # noqa: F401  (registers its operators in torch.ops)
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
with torch.device("cpu"):  # computed only once, because a trace would count the temporary tensors of each call
    # index: 8-bit code of a scale; value: (scale - mean scale) / second-level scale
    SCALES = create_dynamic_map().tolist()
PIECE = 1 << 22  # elements that are quantized at once; on a CPU each element needs about 20 bytes of temporary memory


class NF4Linear(nn.Linear, Packed):
    """A linear layer from (..., in) to (..., out) whose matrix is stored in 4 bits.

    Args:
        layer: the layer to quantize: an nn.Linear, or a Conv1D as in GPT-2, whose matrix is (in, out). The new layer
            takes over this layer's bias, and freezes it.
    """

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        nn.Module.__init__(self)  # the constructor of nn.Linear would allocate a matrix
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
        """Returns the number of elements of the matrix before quantization."""
        return self.out_features * self.in_features

    @property
    def largest(self) -> float:
        return _scales(self).max().item()

    @property
    def weight(self) -> Tensor:
        """Dequantizes the matrix at each access. Returns it as (out, in), in the dtype that it had before
        quantization."""
        matrix = self.dequantized(self.dtype)
        matrix._is_hf_initialized = True  # otherwise transformers would initialize GPT-2's matrices again after loading
        return matrix

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix (out, in) in `dtype`."""
        return _dequantized(self, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x.to(stacks.dtype_of_products(x)), self)

    def unpacked(self, dtype: torch.dtype, device: str | None = None) -> nn.Linear | Conv1D:
        """Returns a frozen layer with the dequantized matrix: a Conv1D if the original layer was a Conv1D, otherwise an
        nn.Linear.

        Args:
            dtype: dtype of the matrix.
            device: "meta": the matrix is a meta tensor, without values; None: the matrix is on the device of this
                layer.
        """
        return self.as_found(self.linear(dtype, device))

    def linear(self, dtype: torch.dtype, device: str | None = None) -> nn.Linear:
        """Returns a frozen nn.Linear with the dequantized matrix. Args: see `unpacked`."""
        with torch.device("meta"):  # without allocation or initialization, since the weights are replaced below
            layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, dtype=dtype)
        matrix = layer.weight if device == "meta" else self.dequantized(dtype)
        layer.weight, layer.bias = nn.Parameter(matrix, requires_grad=False), self.bias
        return layer

    def as_found(self, layer: nn.Linear) -> nn.Linear | Conv1D:
        """Returns `layer`, converted to a Conv1D if the original layer was a Conv1D."""
        if not self.transposed:
            return layer
        with torch.device("meta"):
            turned = Conv1D(self.out_features, self.in_features)
        turned.weight, turned.bias = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False), layer.bias
        return turned


class _Product(torch.autograd.Function):
    """The product of x and the dequantized matrix, plus the bias. For backward it saves only a reference to the layer,
    which then dequantizes the matrix again."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.dequantized(x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


class NF4Stack(nn.Module, Packed):
    """A stack of fused experts (experts, rows, columns), stored in 4 bits.

    Each expert has the codes that its matrix would have in an `NF4Linear`. The elements of each expert are padded to a
    multiple of 64 x 256, so that each second-level scale belongs to a single expert. Therefore one call can dequantize
    all experts.
    """

    transposed = False

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype, self.packed_elements = experts.shape, experts.dtype, experts.numel()
        elements = experts[0].numel()
        self.padded = -(-elements // (BLOCK * BLOCKS)) * BLOCK * BLOCKS  # elements of one expert, with padding
        # quantize the experts one by one: a padded copy of the full stack would double the memory
        codes, scales = zip(*(_in_codes(F.pad(e.flatten(), (0, self.padded - elements))) for e in experts), strict=True)
        scales, own = torch.stack(scales), -(-elements // BLOCK)
        # one call per expert: `mean` of a 2-D tensor may sum in a different order than `mean` of a vector
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
    """Quantizes stacks of a module with fused experts, in place. Args: names: names of the module's 3-D parameters to
    quantize."""
    for name in names:
        stack = NF4Stack(getattr(experts, name).detach())
        delattr(experts, name)
        experts.add_module(name + stacks.NF4, stack)
    stacks.read_when_used(experts, names)


def _scales(layer: nn.Module) -> Tensor:
    """Returns the dequantized scales of a layer as an fp32 tensor (blocks,). The scale of a block is the largest
    magnitude of its elements."""
    scales = ops.dequantize_blockwise(layer.scales, layer.scales_of_scales, layer.table, BLOCKS, torch.float32)
    return scales.view(layer.mean.numel(), -1).add_(layer.mean).flatten()


def _dequantized(layer: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Dequantizes a layer, drops the padding at the end, and returns a tensor of the given shape."""
    scales = _scales(layer)
    blocks = ops.dequantize_4bit(layer.codes, scales, BLOCK, "nf4", (len(scales), BLOCK), dtype)
    return blocks.flatten()[: math.prod(shape)].view(shape)


def quantized(matrix: Tensor) -> dict[str, Tensor]:
    """Quantizes a matrix. Its elements are flattened, and padded with zeros to n elements, where n is a multiple of 64.

    Returns:
        A dict of tensors: `codes` (n / 2, 1), two per byte; `scales` (n / 64,), in 8 bits; `scales_of_scales`, one
        second-level scale per 256 scales; `table` (256,), the values of SCALES; `mean` (), the mean scale, which was
        subtracted from the scales before their quantization.
    """
    codes, scales = _in_codes(F.pad(matrix.flatten(), (0, -matrix.numel() % BLOCK)))
    mean = scales.mean()
    return {"codes": codes, **_scales_in_codes(scales - mean), "mean": mean}


def _in_codes(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes (n / 2, 1) and fp32 scales (n / 64,) of n elements, where n is a multiple of 64."""
    pieces = [ops.quantize_4bit(piece, BLOCK, "nf4", torch.uint8) for piece in flat.split(PIECE)]
    codes, scales = (torch.cat(each) for each in zip(*pieces, strict=True))
    return codes, scales


def _scales_in_codes(centred: Tensor) -> dict[str, Tensor]:
    table = torch.tensor(SCALES, dtype=torch.float32, device=centred.device)
    small, scales_of_scales = ops.quantize_blockwise(centred, table, BLOCKS)
    return {"scales": small, "scales_of_scales": scales_of_scales, "table": table}


def quantize(model: PreTrainedModel, with_experts: bool = True) -> None:
    """Quantizes the linear layers (`linear_layers`) and fused experts of the model that are not quantized yet, one by
    one, in place. Embeddings, the head and routers are not quantized; a rounded router might choose other experts. The
    model must be on the host, because the codes must not depend on the device.

    Args:
        model: the model.
        with_experts: True: also quantize fused experts.

    Raises:
        Refused: the model has neither a matrix to quantize nor a quantized matrix.
    """
    for name in [name for name, layer in linear_layers(model).items() if not isinstance(layer, NF4Linear)]:
        # looked up by name: a list of layers would keep the unquantized layers in memory after they are replaced
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
