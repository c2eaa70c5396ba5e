"""Gradient checkpointing: keep a block's input instead of its interior, and compute the interior again in backward.

Saves the activations inside the blocks (one boundary of batch x tokens x width per block stays); costs one more
forward pass, about a third of the step. Source: Chen et al. 2016, arXiv 1604.06174.
"""

import warnings

from transformers import PreTrainedModel

from lowmem.errors import Refused


def none(model: PreTrainedModel) -> None:
    """Keep every activation, as models do unless told otherwise."""


def every_layer(model: PreTrainedModel) -> None:
    """Each transformer block keeps its input alone. Active in training mode only."""
    if not model.supports_gradient_checkpointing:
        raise Refused(
            f"gradient_checkpointing=every_layer: {type(model).__name__} does not mark its blocks for it. "
            "Type gradient_checkpointing=none, and loss=chunked or a smaller batch_size to save memory."
        )
    with warnings.catch_warnings():  # its new name, activation_checkpointing_enable, is younger than our range
        warnings.simplefilter("ignore", FutureWarning)
        # Non-reentrant: works with frozen inputs, and frees the graph as backward walks it.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
