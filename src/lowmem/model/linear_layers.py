"""Finds the linear layers of a model that an adapter or 4 bits may change, its routers, and its fused experts.

transformers stores the experts of one block as stacks of matrices: 3-D parameters (experts, rows, columns) of one
module. A router computes one score per expert and token. A small change of its weights sends tokens to other experts,
so routers are never adapted or quantized.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ROUTERS = ("gate", "shared_expert_gate")  # names of routers; so is every name that contains "router"
TOLERANCE = 0.02  # of a product in 16 bits; a layer that computes more differs by the size of its result


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Return the linear layers that compute a product and nothing else, by name. The head, routers, and layers that
    share the embedding's matrix are left out."""
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


def fused_experts(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of modules that hold stacks of experts, each with the names of its 3-D parameters."""
    stacks = {
        name: [key for key, p in module.named_parameters(recurse=False) if p.dim() == 3]
        for name, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
    }
    return {name: keys for name, keys in stacks.items() if keys}


def routers(model: nn.Module) -> set[str]:
    """Return the names of linear layers that belong to a router.

    A layer belongs to a router if its name or the name of a module around it is a router's, or if it stands beside the
    experts and has one output per expert.
    """
    experts = {}
    for name, keys in fused_experts(model).items():
        experts[name.rpartition(".")[0]] = getattr(model.get_submodule(name), keys[0]).shape[0]
    return {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
        and (
            any(part in ROUTERS or "router" in part for part in name.split("."))
            or experts.get(name.rpartition(".")[0]) == _outputs(layer)
        )
    }


def _outputs(layer: nn.Linear | Conv1D) -> int:
    return layer.nf if isinstance(layer, Conv1D) else layer.out_features


def _holds(layer: nn.Module, weight: Tensor) -> bool:
    """Return True if a module has this weight among its parameters. Reading `weight` would dequantize a 4-bit
    matrix."""
    return any(p is weight for p in layer.parameters(recurse=False))


@torch.no_grad()
def _is_product(layer: nn.Linear | Conv1D) -> bool:
    """Return True if a layer computes x W + b. A subclass may compute more, such as products in groups."""
    if type(layer) is Conv1D or type(layer).forward is nn.Linear.forward or not isinstance(layer, nn.Linear):
        return True
    weight = layer.weight
    x = torch.linspace(-1, 1, layer.in_features, dtype=weight.dtype, device=weight.device)[None]
    expected = F.linear(x, weight, layer.bias)
    try:
        found = layer(x)
        return torch.allclose(found, expected, atol=TOLERANCE * float(expected.abs().max()))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
