"""Muon for matrices and AdamW for all other parameters, as one optimizer.

Muon's update of a matrix is approximately the orthogonal matrix that is nearest to the momentum of the matrix, so the
update has about the same size in all directions. Muon stores one moment (4 bytes per parameter), and AdamW stores two.
Fused experts (experts, rows, columns) are updated as one matrix per expert. Matrices are updated one by one, so the
step needs temporary memory for only one matrix. Embeddings, head, norms, biases and depthwise convolutions do not map
between hidden spaces, so AdamW updates them. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.

`torch.optim.Muon` and `torch.optim.AdamW` compute the updates. At each step, they receive the groups and the state of
this optimizer; they keep neither after the step.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

# torch's rule `match_rms_adamw` gives an exactly orthogonal update an RMS of 0.2 lr. AdamW's first update has an RMS of
# lr. `Muon` divides lr by TORCHS_RMS, so that an exactly orthogonal update has an RMS of lr, too. With torch's five
# iterations, the update is only nearly orthogonal: its RMS is 0.86 to 0.96 lr for a random gradient. If the gradient
# has rank r instead of full rank n, the RMS is multiplied by sqrt(r / n).
TORCHS_RMS = 0.2


class Muon(Optimizer):
    """Muon for matrices and AdamW for all other parameters.

    Args:
        params: parameter groups, each with the key `role`: matrix, embedding or vector.
        lr, weight_decay: values for groups without these keys.
        momentum: Muon's momentum.
        betas, eps: AdamW's arguments.
    """

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
        unused = [nn.Parameter(torch.zeros(1, 1))]  # torch requires at least one parameter
        self.muon = torch.optim.Muon(unused, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        # lr and weight_decay are checked here; each step uses the group's values
        self.adamw = torch.optim.AdamW(unused, lr, tuple(betas), eps, weight_decay, fused=True)

    def __getstate__(self) -> dict:
        """Returns the state for pickling and copying. torch's version would drop `muon` and `adamw`."""
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
        """Yields (matrix, optimizer state) for each matrix of p. The matrix, its gradient and its momentum are views of
        the tensors of p."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        experts = (t if t.dim() == 3 else t[None] for t in (p.data, p.grad, state["momentum_buffer"]))
        for weight, gradient, momentum in zip(*experts, strict=True):
            matrix = nn.Parameter(weight)
            matrix.grad = gradient
            yield matrix, {"momentum_buffer": momentum}

    def _step(self, optimizer: Optimizer, state: dict[nn.Parameter, dict], group: dict, factor: float) -> None:
        """Updates parameters with a learning rate of lr * factor. Weight decay is not multiplied by the factor: it
        remains lr * weight_decay.

        Args:
            optimizer: `muon` or `adamw`.
            state: maps each parameter to update to its optimizer state.
            group: the settings, with `lr` and `weight_decay`.
            factor: factor of the learning rate.
        """
        scaled = {"lr": group["lr"] * factor, "weight_decay": group["weight_decay"] / factor, "params": list(state)}
        optimizer.state, optimizer.param_groups = state, [optimizer.defaults | group | scaled]
        if state:
            optimizer.step()
        optimizer.state, optimizer.param_groups = {}, []


def holds_matrices(group: dict, p: nn.Parameter) -> bool:
    """Returns True if Muon updates p: p is a matrix, or a stack of matrices (fused experts), in a group with the role
    matrix. Depthwise convolutions (channels, 1, width) are not matrices."""
    return group["role"] == "matrix" and (p.dim() == 2 or (p.dim() == 3 and p.shape[1] > 1))
