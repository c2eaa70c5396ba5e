"""LoRA on a base model whose matrices are stored in 4 bits: 0.52 bytes per parameter.

Published weights are quantized while they are loaded (`nf4_loading.py`), random initial weights after they are
initialized (`nf4.py`). The LoRA matrices (`lora.py`) are trained on top of the quantized weights, and compensate for
part of the quantization error. The price: each matrix is dequantized for each product, forward and backward, and the
adapter fits only this quantized base. Source: Dettmers et al. 2023, arXiv 2305.14314.
"""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowmem.techniques.adapter.lora import LoRA, experts_in_4_bits
from lowmem.techniques.adapter.nf4 import quantize
from lowmem.techniques.adapter.nf4_loading import NF4WhileLoading


class QLoRA(LoRA):
    """LoRA on a quantized base. Args and Raises: see `LoRA`. Also refused: a model that has no matrix to quantize."""

    in_4_bits = True

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin:
        return NF4WhileLoading(_packs_experts(path))

    def __call__(self, model: PreTrainedModel) -> None:
        quantize(model, _packs_experts(self.path))
        super().__call__(model)


def _packs_experts(path: str | None) -> bool:
    return path is None or experts_in_4_bits(path)
