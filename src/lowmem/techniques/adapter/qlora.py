"""LoRA beside matrices that are held in 4 bits: what is left of a model's own weights is 0.52 bytes of each.

The base is quantised when the model is built (`nf4.py`), and LoRA (`lora.py`) is trained beside it, and makes up for a
part of what 4 bits took from it. It costs that each matrix is brought back for each product, forward and backward, and
that the adapter fits this base alone. Source: Dettmers et al. 2023, arXiv 2305.14314.
"""

from transformers import PreTrainedModel

from lowmem.techniques.adapter.lora import LoRA
from lowmem.techniques.adapter.nf4 import quantise


class QLoRA(LoRA):
    """model -> None. Args, Raises: those of `LoRA`, and a model without a matrix to quantise."""

    in_4_bits = True

    def __call__(self, model: PreTrainedModel) -> None:
        quantise(model)
        super().__call__(model)
