"""Finds the experts of a mixture-of-experts model, and its routers.

transformers stores the experts of one block as stacks of matrices: 3-D parameters (experts, rows, columns) of one
module. A router computes one score per expert and token. A small change of its weights sends tokens to other experts,
so routers are never adapted or quantized.
"""

from torch import nn
from transformers.pytorch_utils import Conv1D

ROUTERS = ("gate", "shared_expert_gate")  # names of routers; so is every name that contains "router"


def fused_experts(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of modules that hold stacks of experts, each with the names of its 3-D parameters."""
    stacks = {}
    for name, module in model.named_modules():
        if "expert" in type(module).__name__.lower():
            stacks[name] = [key for key, p in module.named_parameters(recurse=False) if p.dim() == 3]
    return {name: keys for name, keys in stacks.items() if keys}


def routers(model: nn.Module) -> set[str]:
    """Return the names of linear layers that belong to a router.

    A layer belongs to a router if its name or the name of a module around it is a router's, or if it stands beside the
    experts and has one output per expert.
    """
    experts = {name.rpartition(".")[0]: _count(model, name, keys) for name, keys in fused_experts(model).items()}
    found = set()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | Conv1D):
            named = any(part in ROUTERS or "router" in part for part in name.split("."))
            outputs = layer.nf if isinstance(layer, Conv1D) else layer.out_features
            if named or experts.get(name.rpartition(".")[0]) == outputs:
                found.add(name)
    return found


def _count(model: nn.Module, name: str, keys: list[str]) -> int:
    return getattr(model.get_submodule(name), keys[0]).shape[0]
