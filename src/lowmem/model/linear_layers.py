"""Finds the linear layers of a model that can be adapted or quantized to 4 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem.model.experts import routers
from lowmem.model.trainable import Packed

# Relative tolerance for a matrix product in 16 bits. If a layer computes something else, the relative difference is
# about 1.
TOLERANCE = 0.02


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Returns, by name, the linear layers that compute only a matrix product, plus a bias if they have one. Excludes
    the head, routers, and layers that share the embedding's matrix."""
    head, tokens, no_layers = model.get_output_embeddings(), model.get_input_embeddings().weight, routers(model)
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
        and layer is not head
        and name not in no_layers
        and not _holds(layer, tokens)
        and _is_product(layer)
    }


def _holds(layer: nn.Module, weight: Tensor) -> bool:
    """Returns True if `weight` is one of the module's own parameters. Does not read `layer.weight`, which would
    dequantize a 4-bit matrix."""
    return any(p is weight for p in layer.parameters(recurse=False))


@torch.no_grad()
def _is_product(layer: nn.Linear | Conv1D) -> bool:
    """Returns True if a layer computes only a matrix product, plus a bias if it has one. A subclass of nn.Linear with
    its own `forward`, which may compute something else, such as a grouped matrix product, is tested with a vector."""
    if isinstance(layer, Packed | Conv1D) or type(layer).forward is nn.Linear.forward:
        return True
    weight = layer.weight
    x = torch.linspace(-1, 1, layer.in_features, dtype=weight.dtype, device=weight.device)[None]
    expected = F.linear(x, weight, layer.bias)
    try:
        found = layer(x)
        if weight.is_meta:  # plans build models whose weights have no values
            return found.shape == expected.shape
        return torch.allclose(found, expected, atol=TOLERANCE * float(expected.abs().max()))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
