"""Measures how evenly the router of a mixture of experts distributes tokens over the experts. `metrics.py` logs the
result."""

import math
from functools import partial

import torch
from torch import Tensor, nn


class ExpertBalance:
    """Counts the tokens that each expert computes during training, on this rank, including padding tokens, which all go
    to the same experts.

    If a router sends most tokens to a few experts, the other experts are hardly trained. Tokens are not counted in
    compiled blocks, nor in blocks whose experts receive the router's choice neither as indices nor as numbers of
    tokens, such as the blocks of Llama 4.

    Args:
        model: hooks are registered on the experts of all its blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[str, Tensor] = {}  # name of a module of experts -> tokens per expert
        for name, module in model.named_modules():
            if "expert" in type(module).__name__.lower() and isinstance(getattr(module, "num_experts", None), int):
                module.register_forward_pre_hook(partial(self._count, name))

    def read(self) -> dict[str, float]:
        """Returns the balance since the last call of `read`, and resets the counts. The dict is empty if no tokens were
        counted.

        Returns:
            expert_entropy: entropy of the experts' shares of a block's tokens, divided by the entropy of equal shares;
            the mean over all counted blocks. 1: all experts have equal shares; 0: one expert has all tokens.
            expert_largest_share: the largest share of a block's tokens that a single expert has; the maximum over all
            counted blocks.
        """
        counts, self._counts = list(self._counts.values()), {}
        shares = [of_block.double() / of_block.sum() for of_block in counts if len(of_block) > 1]
        if not shares:
            return {}
        entropies = [torch.special.entr(of_block).sum() / math.log(len(of_block)) for of_block in shares]
        largest = torch.stack([of_block.max() for of_block in shares])
        both = torch.stack([torch.stack(entropies).mean(), largest.max()]).tolist()  # the only read from the device
        return dict(zip(("expert_entropy", "expert_largest_share"), both, strict=True))

    @torch.no_grad()
    def _count(self, name: str, experts: nn.Module, args: tuple) -> None:
        if not experts.training or torch.compiler.is_compiling() or len(args) < 2:
            return
        routed, device = args[1], args[0].device
        if isinstance(routed, Tensor) and not routed.is_floating_point():  # (tokens, experts per token) indices
            counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=device)
            counts.scatter_add_(0, routed.flatten(), torch.ones_like(routed.flatten()))
        elif (
            isinstance(routed, list) and len(routed) == experts.num_experts
        ):  # number of tokens of each expert (JetMoe)
            counts = torch.tensor(routed, device=device)
        else:
            return
        before = self._counts.get(name)
        self._counts[name] = counts if before is None else before + counts
