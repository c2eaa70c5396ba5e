"""Defines the base class of adapters, which `adapter=` adds to a model after the model is loaded."""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin


class Adapter:
    """Base class of adapters: callables that add trained weights to a model. The class attributes are read before the
    model is loaded."""

    # True: only the adapter is trained, and the model's own weights are frozen. The adapter's weights are in fp32 even
    # if the precision stores the model's weights in 16 bits. With fp32 masters (bf16-master, 16-master), the adapter's
    # weights on the device have 16 bits, and their masters are in fp32.
    freezes_base = False
    in_4_bits = False  # True: the matrices of the base model are quantized to 4 bits
    breaks_graphs = False  # True: torch.compile cannot trace the layers of the adapter

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin | None:
        """Returns the `quantization_config` with which transformers loads published weights, or None if the weights are
        not quantized. Args: path: the folder of an existing adapter; None: a new adapter."""
        return None

    def __call__(self, model: PreTrainedModel) -> None:
        """Adds the adapter to the model, in place."""
        raise NotImplementedError
