"""Defines the base class of adapters: the callables that `adapter=` applies to a model before training."""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin


class Adapter:
    """Base class of adapters: callables that add trained weights to a model. Other code reads the class attributes
    before a model exists."""

    # True: only the adapter is trained, and the model's own weights are frozen. The adapter's weights are then stored
    # in fp32, even if the precision stores the model's weights in 16 bits. With masters, the adapter's weights have 16
    # bits too, and only their masters are in fp32.
    freezes_base = False
    in_4_bits = False  # True: the base weights are quantized
    breaks_graphs = False  # True: torch.compile cannot trace the layers of the adapter

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin | None:
        """Returns the `quantization_config` with which transformers loads published weights; None: the weights are not
        quantized. Args: path: the folder of an existing adapter; None: a new adapter."""
        return None

    def __call__(self, model: PreTrainedModel) -> None:
        """Adds the adapter to the model, in place."""
        raise NotImplementedError
