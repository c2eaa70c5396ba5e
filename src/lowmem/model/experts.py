"""Finds the experts and the routers of a mixture-of-experts model.

transformers stores the experts of one block as stacks of matrices: 3-D parameters (experts, rows, columns) of one
module. A router computes one score per expert and token. Only the experts with the highest scores process the token,
except in the classes that COMPUTE_ALL lists. A small change to a router's weights can send tokens to other experts, so
adapters and quantization leave routers unchanged.
"""

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ROUTERS = ("gate", "shared_expert_gate")  # names of routers, in addition to all names that contain "router"
COMPUTE_ALL = ("Llama4TextExperts", "InklingSharedExperts")  # classes in which all experts process each token
# keys of transformers' configs for the number of experts that process a token
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def fused_experts(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Returns the stacks of experts, which are the 3-D parameters of modules whose class name contains "expert", as a
    nested dict: {name of the module: {name of the parameter: the parameter}}."""
    stacks = {
        name: {key: p for key, p in module.named_parameters(recurse=False) if p.dim() == 3}
        for name, module in model.named_modules()
        if "expert" in type(module).__name__.lower()
    }
    return {name: found for name, found in stacks.items() if found}


def routers(model: nn.Module) -> set[str]:
    """Returns the names of linear layers that belong to a router.

    A layer belongs to a router if the layer, or a module that contains it, has the name of a router. It also belongs to
    a router if it has the same parent module as the experts, and one output per expert.
    """
    experts = {}
    for name, found in fused_experts(model).items():
        experts[name.rpartition(".")[0]] = len(next(iter(found.values())))
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


def inactive_parameters(model: PreTrainedModel) -> int:
    """Returns the number of parameters that are not used for a given token: the weights of those `fused_experts` that
    the router does not choose for the token. Returns 0 if the config has none of the keys in EXPERTS_PER_TOKEN."""
    config = model.config.get_text_config(decoder=True)
    chosen = next((getattr(config, key) for key in EXPERTS_PER_TOKEN if getattr(config, key, None)), None)
    stacks = [
        p
        for name, found in fused_experts(model).items()
        if type(model.get_submodule(name)).__name__ not in COMPUTE_ALL
        for p in found.values()
    ]
    return sum(p.numel() * max(len(p) - (chosen or len(p)), 0) // len(p) for p in stacks)
