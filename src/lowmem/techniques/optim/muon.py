"""Muon and AdamW as one optimizer, which steps each parameter by its role.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that every direction moves equally. It keeps
one moment, 4 bytes per parameter, where AdamW keeps two. Fused experts, (experts, rows, columns), are one matrix per
expert and are stepped one expert after the other, so that the scratch is that of one matrix. Embeddings, head, norms,
biases and convolutions are not maps between hidden spaces and step with AdamW. Source: Jordan et al. 2024,
kellerjordan.github.io/posts/muon.

Both optimizers are torch's own. They get this optimizer's groups and state at every step, and keep nothing.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
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
        unused = [nn.Parameter(torch.zeros(1, 1))]  # torch makes no optimizer without a parameter
        self.muon = torch.optim.Muon(unused, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        # lr and weight_decay are checked here; a step replaces them by the values of the group
        self.adamw = torch.optim.AdamW(unused, lr, tuple(betas), eps, weight_decay, fused=True)

    def __getstate__(self) -> dict:
        """Returns what a copy holds; torch's own leaves out all further attributes."""
        return super().__getstate__() | {"muon": self.muon, "adamw": self.adamw}

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            matrices = [matrix for p in ready if holds_matrices(group, p) for matrix in self._matrices(p)]
            self._step(self.muon, dict(matrices), group, 1 / TORCHS_RMS)
            others = {p: self.state[p] for p in ready if not holds_matrices(group, p)}
            self._step(self.adamw, others, group, 1.0)
        return loss

    def _matrices(self, p: nn.Parameter) -> Iterator[tuple[nn.Parameter, dict]]:
        """Yields each matrix of p with its state: views of p, its gradient and its momentum."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        experts = (t if t.dim() == 3 else t[None] for t in (p.data, p.grad, state["momentum_buffer"]))
        for weight, gradient, momentum in zip(*experts, strict=True):
            matrix = nn.Parameter(weight)
            matrix.grad = gradient
            yield matrix, {"momentum_buffer": momentum}

    def _step(self, optimizer: Optimizer, state: dict[nn.Parameter, dict], group: dict, factor: float) -> None:
        """Steps the parameters of `state` with `lr` times `factor`; the decay of a step, lr x weight_decay, stays the
        same."""
        scaled = {"lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / factor, "params": list(state)}
        optimizer.state, optimizer.param_groups = state, [optimizer.defaults | group | scaled]
        if state:
            optimizer.step()
        optimizer.state, optimizer.param_groups = {}, []


def holds_matrices(group: dict, p: nn.Parameter) -> bool:
    """Returns whether p is a matrix, or a stack of matrices (fused experts). A convolution of a language model has one
    input channel per output, (channels, 1, width), and is not a matrix."""
    return group["role"] == "matrix" and (p.dim() == 2 or (p.dim() == 3 and p.shape[1] > 1))
