"""Defines the base class of adapters."""

from transformers import PreTrainedModel


class Adapter:
    """A function of a model that puts weights beside its own. Its attributes are read before a model exists."""

    # True if none of the model's own weights is trained. Those of the adapter stay in fp32, where the model's may have
    # 16 bits, unless there are masters.
    freezes_base = False
    in_4_bits = False  # True if the base is quantised
    breaks_graphs = False  # True if torch.compile cannot follow its layers

    def __call__(self, model: PreTrainedModel) -> None:
        """Changes the model in place."""
        raise NotImplementedError
