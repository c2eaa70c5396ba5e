"""Measures how evenly a mixture of experts spreads its tokens."""

import math
from functools import partial

import torch
from torch import Tensor, nn


class ExpertBalance:
    """Counts the tokens that each expert computes in training.

    A router that sends most tokens to a few experts leaves the other experts untrained. Blocks whose experts do not get
    their tokens as indices, such as Llama 4's, are not counted, nor are compiled blocks.

    Args:
        model: hooks are registered on the experts of each of its blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[str, Tensor] = {}  # block -> number of tokens of each expert since the last call of `read`
        for name, module in model.named_modules():
            if "expert" in type(module).__name__.lower() and isinstance(getattr(module, "num_experts", None), int):
                module.register_forward_pre_hook(partial(self._count, name))

    def read(self) -> dict[str, float]:
        """Returns the balance since the last call, and resets the counts. Empty if no tokens were counted.

        Returns:
            expert_entropy: entropy of the experts' shares of a block's tokens, divided by the entropy of equal
                shares, averaged over blocks. 1: all experts get equal shares; 0: one expert gets all tokens.
            expert_largest_share: the largest share of a block's tokens that one expert gets.
        """
        counts, self._counts = list(self._counts.values()), {}
        shares = [of_block.double() / of_block.sum() for of_block in counts if len(of_block) > 1]
        if not shares:
            return {}
        entropies = [torch.special.entr(of_block).sum() / math.log(len(of_block)) for of_block in shares]
        largest = torch.stack([of_block.max() for of_block in shares])
        both = torch.stack([torch.stack(entropies).mean(), largest.max()]).tolist()  # reads the device, once
        return dict(zip(("expert_entropy", "expert_largest_share"), both, strict=True))

    @torch.no_grad()
    def _count(self, name: str, experts: nn.Module, args: tuple) -> None:
        if not experts.training or torch.compiler.is_compiling() or len(args) < 2 or args[1].is_floating_point():
            return
        chosen = args[1].flatten()
        if name not in self._counts:
            self._counts[name] = torch.zeros(experts.num_experts, dtype=torch.int64, device=chosen.device)
        self._counts[name].scatter_add_(0, chosen, torch.ones_like(chosen))
