"""Finds the transformer blocks of a model: the items of its outermost `nn.ModuleList` or `nn.Sequential` that is not
empty. Activation checkpointing, compilation, streaming and sharding work on these blocks."""

from torch import nn
from transformers import PreTrainedModel

from lowmem.system.errors import Refused


def blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the transformer blocks of a model, in order. For a multimodal model, returns the blocks of its text
    decoder.

    Raises:
        Refused: the model has no list of blocks.
    """
    level = [_text_decoder(model)]
    while level:  # breadth first, because a block may contain a list of experts
        for module in level:
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
                return list(module)
        level = [child for module in level for child in module.children()]
    raise Refused(
        f"gradient_checkpointing, compile, weights, strategy: {type(model).__name__} has no list of transformer "
        "blocks. Type gradient_checkpointing=none compile=none weights=resident (strategy=ddp for several devices). To "
        "save memory, type loss=chunked or a smaller batch_size."
    )


def stack_of(model: nn.Module) -> list[nn.Module]:
    """Returns the model's blocks, or an empty list for a model without a list of blocks."""
    try:
        return blocks(model)
    except Refused:
        return []


def _text_decoder(model: nn.Module) -> nn.Module:
    if not isinstance(model, PreTrainedModel):
        return model
    decoder = model.get_decoder()
    # in some models "decoder" is the name of the head's linear layer
    return decoder if isinstance(decoder, PreTrainedModel) else model
