"""Muon and AdamW as one optimizer, which steps each parameter by its role.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that every direction moves equally. It keeps
one moment, 4 bytes per parameter, where AdamW keeps two. Embeddings, head, norms and biases are not maps between hidden
spaces and step with AdamW. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.

Both optimizers are torch's own. They get this optimizer's groups and state at every step, and keep nothing.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

# torch's rule `match_rms_adamw` makes the RMS of a Muon step 0.2 lr. AdamW's first step has RMS lr, and so has a step
# by an orthogonal matrix here. Five iterations make the step nearly orthogonal: its RMS is 0.86 to 0.96 lr for a random
# gradient. Directions that the gradient lacks do not move: with r of n directions, a matrix moves by sqrt(r / n) of
# that.
TORCHS_RMS = 0.2


class Muon(Optimizer):
    """Args: params: groups with a `role` (matrix, embedding, vector); momentum: for matrices; betas, eps: AdamW's."""

    def __init__(
        self,
        params: Iterable[dict],
        lr: float,
        momentum: float = 0.95,
        betas: Sequence[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        unused = [torch.nn.Parameter(torch.zeros(1, 1))]  # torch makes no optimizer without a parameter
        self.muon = torch.optim.Muon(unused, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(unused, betas=tuple(betas), eps=eps, fused=True)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self._step(self.muon, [group for group in self.param_groups if group["role"] == "matrix"], 1 / TORCHS_RMS)
        self._step(self.adamw, [group for group in self.param_groups if group["role"] != "matrix"], 1.0)
        return loss

    def _step(self, optimizer: Optimizer, groups: list[dict], factor: float) -> None:
        """Steps with `lr` times `factor`; the decay of a step, lr x weight_decay, stays the same."""
        optimizer.state = self.state
        optimizer.param_groups = [
            optimizer.defaults | group | {"lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / factor}
            for group in groups
        ]
        if groups:
            optimizer.step()
        optimizer.param_groups = []
