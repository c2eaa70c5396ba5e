"""Defines the base class of adapters."""

from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin


class Adapter:
    """A function of a model that puts weights beside its own. Its attributes are read before a model exists."""

    # True if only the adapter is trained, and none of the model's own weights. Unless there are masters, the adapter's
    # weights are then stored in fp32, also if the precision stores the model's in 16 bits.
    freezes_base = False
    in_4_bits = False  # True if the base is quantized
    breaks_graphs = False  # True if torch.compile cannot follow its layers

    @classmethod
    def while_loading(cls, path: str | None) -> QuantizationConfigMixin | None:
        """Returns the `quantization_config` with which transformers loads published weights. Args: path: the adapter's
        folder, if it has one."""
        return None

    def __call__(self, model: PreTrainedModel) -> None:
        """Changes the model in place."""
        raise NotImplementedError
