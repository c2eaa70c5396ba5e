"""LoRA beside matrices that are stored in 4 bits: 0.52 bytes per parameter remain of a model's own weights.

The base is quantised when the model is built (`nf4.py`). LoRA (`lora.py`) is trained beside it, and recovers a part of
what 4 bits took from it. It costs that each matrix is dequantised for each product, forward and backward, and that the
adapter fits this base alone. Source: Dettmers et al. 2023, arXiv 2305.14314.
"""

from transformers import PreTrainedModel

from lowmem.techniques.adapter.lora import LoRA, experts_in_4_bits
from lowmem.techniques.adapter.nf4 import quantise


class QLoRA(LoRA):
    """LoRA on a quantised base. Args and Raises: see `LoRA`; a model without a matrix to quantise is
    refused too."""

    in_4_bits = True

    def __call__(self, model: PreTrainedModel) -> None:
        quantise(model, with_experts=self.path is None or experts_in_4_bits(self.path))
        super().__call__(model)
