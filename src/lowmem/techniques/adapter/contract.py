"""Defines the base class of adapters."""

from transformers import PreTrainedModel


class Adapter:
    """A function of a model that puts weights beside its own. Its attributes are read before a model exists."""

    # True if only the adapter is trained, and none of the model's own weights. Unless there are masters, the adapter's
    # weights are then stored in fp32, also if the precision stores the model's in 16 bits.
    freezes_base = False
    in_4_bits = False  # True if the base is quantised
    breaks_graphs = False  # True if torch.compile cannot follow its layers

    def __call__(self, model: PreTrainedModel) -> None:
        """Changes the model in place."""
        raise NotImplementedError
