"""LoRA beside matrices that are stored in 4 bits: 0.52 bytes per parameter remain of a model's own weights.

The base is quantized while it is loaded (`nf4_loading.py`); a random start, once it has been drawn (`nf4.py`). LoRA
(`lora.py`) is trained beside it, and recovers a part of what 4 bits took from it. It costs that each matrix is
dequantized for each product, forward and backward, and that the adapter fits this base alone. Source: Dettmers et al.
2023, arXiv 2305.14314.
"""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowmem.techniques.adapter.lora import LoRA, experts_in_4_bits
from lowmem.techniques.adapter.nf4 import quantize
from lowmem.techniques.adapter.nf4_loading import NF4WhileLoading


class QLoRA(LoRA):
    """LoRA on a quantized base. Args and Raises: see `LoRA`; a model without a matrix to quantize is
    refused too."""

    in_4_bits = True

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin:
        return NF4WhileLoading(_packs_experts(path))

    def __call__(self, model: PreTrainedModel) -> None:
        quantize(model, _packs_experts(self.path))
        super().__call__(model)


def _packs_experts(path: str | None) -> bool:
    return path is None or experts_in_4_bits(path)
