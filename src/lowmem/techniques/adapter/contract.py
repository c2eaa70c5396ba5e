"""Defines the base class of adapters (`adapter=`)."""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin


class Adapter:
    """Base class of adapters: callables that add trainable weights to a model. A run reads the class attributes before
    it loads the model."""

    # True: the model's own weights are frozen, and only the adapter is trained. The adapter's weights are in fp32 even
    # if the precision stores the model's weights in 16 bits. Exception: a precision with fp32 masters (bf16-master,
    # 16-master) stores the adapter's weights in 16 bits on the device, and their masters on the host.
    freezes_base = False
    in_4_bits = False  # True: the matrices of the base model are quantized to 4 bits
    breaks_graphs = False  # True: torch.compile cannot trace the layers of the adapter

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin | None:
        """Returns the `quantization_config` argument of from_pretrained for the base model, or None if the base model
        is not quantized. Args: path: the adapter folder that the run starts from; None: a new adapter."""
        return None

    def __call__(self, model: PreTrainedModel) -> None:
        """Adds the adapter to the model, in place."""
        raise NotImplementedError
