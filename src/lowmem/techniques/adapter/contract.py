"""Defines the base class of adapters."""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin


class Adapter:
    """Base class of adapters: callables that add trained weights to a model. The class attributes are read before a
    model exists."""

    # True: only the adapter is trained, and none of the model's own weights. Unless there are masters, the adapter's
    # weights are then stored in fp32, even if the precision stores the model's weights in 16 bits.
    freezes_base = False
    in_4_bits = False  # True: the base weights are quantized
    breaks_graphs = False  # True: torch.compile cannot trace the layers of the adapter

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin | None:
        """Returns the `quantization_config` with which transformers loads published weights; None: they are not
        quantized. Args: path: the folder of an existing adapter; None: a new adapter."""
        return None

    def __call__(self, model: PreTrainedModel) -> None:
        """Adds the adapter to the model, in place."""
        raise NotImplementedError
