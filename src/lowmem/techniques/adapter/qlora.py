"""LoRA on a base model whose matrices are stored in 4 bits: 0.52 bytes per parameter.

Published weights are quantized while they are loaded (`nf4_loading.py`); randomly initialized weights are quantized
after initialization (`nf4.py`). The LoRA matrices (`lora.py`) are trained on the quantized base, so they compensate for
part of the quantization error. The price: each product dequantizes its matrix, in forward and in backward, and the
adapter fits only the base as it was quantized in training. Source: Dettmers et al. 2023, arXiv 2305.14314.
"""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowmem.techniques.adapter.lora import LoRA, experts_in_4_bits
from lowmem.techniques.adapter.nf4 import quantize
from lowmem.techniques.adapter.nf4_loading import NF4WhileLoading


class QLoRA(LoRA):
    """LoRA on a quantized base. Args and Raises: see `LoRA`; calling the object also raises Refused if the model has no
    matrix to quantize."""

    in_4_bits = True

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin:
        return NF4WhileLoading(_packs_experts(path))

    def __call__(self, model: PreTrainedModel) -> None:
        quantize(model, _packs_experts(self.path))
        super().__call__(model)


def _packs_experts(path: str | None) -> bool:
    """Returns True if this run quantizes fused experts: always for a new adapter (path=None); for an adapter folder
    only if the folder says that fused experts were quantized in training."""
    return path is None or experts_in_4_bits(path)
