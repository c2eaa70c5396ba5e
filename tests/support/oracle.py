"""The oracle, a reference implementation of training in plain PyTorch in fp32. It computes each optimizer step from one
large batch, with update rules that follow the papers.

The oracle imports nothing from lowmem; it gets the model as an argument.
"""

import copy
import math

import numpy as np
import torch
from torch import nn

BETAS, EPS = (0.9, 0.95), 1e-8


def train(model, read, windows, sequences, rule, lr, weight_decay, clip, held_in=torch.float32, mean_loss=None):
    """Returns the weights by name after one step per window.

    Args:
        model: model with the initial weights in fp32; a copy is trained.
        read: function of sequence indices that returns the arguments of `mean_loss` after the model: (input_ids,
            labels) for `mean_of_tokens`, which ignores labels of -100.
        windows, sequences: see `order`.
        rule: function of (p, gradient, state, step from 1, lr, decay, role) that returns the new p.
        held_in: dtype to which each updated weight is rounded after every step; the rounded values are stored in fp32.
        mean_loss: function of (model, *result of read) that returns the loss; None: `mean_of_tokens`.
    """
    mean_loss = mean_loss or mean_of_tokens
    model = copy.deepcopy(model).train()
    states = {name: {} for name, _ in model.named_parameters()}
    for step, indices in enumerate(order(windows, sequences), start=1):
        model.zero_grad()
        mean_loss(model, *read(indices)).backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = {name: p.grad for name, p in trained.items()}
        if clip is not None:
            norm = torch.stack([g.norm() for g in grads.values()]).norm()
            grads = {name: g * min(1.0, clip / norm.item()) for name, g in grads.items()}
        now = lr * (1 - (step - 1) / len(windows))  # scheduler=linear without warm-up
        with torch.no_grad():
            for name, p in trained.items():
                decay = 0.0 if p.dim() < 2 else weight_decay
                p.copy_(rule(p, grads[name], states[name], step, now, decay, role(name, p)).to(held_in))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def losses(model, read, windows, sequences, weights, mean_loss=None):
    """Returns the loss of each window. Args: weights: for each window, the weights before its step, by name. The other
    arguments are described in `train`."""
    mean_loss = mean_loss or mean_of_tokens
    model, found = copy.deepcopy(model).train(), []
    for indices, given in zip(order(windows, sequences), weights, strict=False):
        for name, p in model.named_parameters():
            p.copy_(given[name])
        found.append(mean_loss(model, *read(indices)).item())
    return found


def order(windows, sequences):
    """Yields the indices of the sequences of each window. A window has sequences of one epoch only.

    Args:
        windows: for each window, its number of sequences, which may be smaller at the end of an epoch.
        sequences: number of sequences per epoch.
    """
    left, epoch = [], 0
    for size in windows:
        if not left:
            left, epoch = list(np.random.default_rng([0, epoch]).permutation(sequences)), epoch + 1
        yield left[:size]
        left = left[size:]


def mean_of_tokens(model, input_ids, labels):
    logits = model(input_ids=input_ids, use_cache=False).logits
    kept = labels != -100
    return nn.functional.cross_entropy(logits[kept], labels[kept], reduction="mean")


def role(name, p):
    return "vector" if p.dim() < 2 else "embedding" if "embed" in name or "lm_head" in name else "matrix"


class LowRank(nn.Module):
    """A linear layer with LoRA: W x + alpha / r B A x + bias. With magnitudes m (DoRA), each row of W + alpha / r B A
    is scaled to the norm that m has for the row; the backward pass treats the row's norm before scaling as a constant.
    Parameters have PEFT's names."""

    def __init__(self, base, start, prefix, scale):
        super().__init__()
        self.base_layer, self.scale = base, scale
        for kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
            if (drawn := start.get(f"{prefix}{kind}.default.weight")) is not None:
                part = nn.ModuleDict({"default": nn.Module()})
                part["default"].weight = nn.Parameter(drawn.detach().clone())
                self.add_module(kind, part)

    def forward(self, x):
        low = self.scale * self.lora_B["default"].weight @ self.lora_A["default"].weight
        matrix = self.base_layer.weight + low
        if hasattr(self, "lora_magnitude_vector"):
            length = matrix.norm(dim=1, keepdim=True).detach()
            matrix = self.lora_magnitude_vector["default"].weight[:, None] / length * matrix
        return nn.functional.linear(x, matrix, self.base_layer.bias)


def adapt(model, start, alpha, r):
    """Replaces every linear layer except the head by a `LowRank` layer. Only the adapter's weights are trained. Args:
    start: name of a weight of the adapter -> its initial value. A layer has magnitudes only if `start` has them."""
    for p in model.parameters():
        p.requires_grad_(False)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and name != "lm_head"}
    for name, base in layers.items():
        model.set_submodule(name, LowRank(base, start, f"{name}.", alpha / r))


def adamw(p, g, state, step, lr, decay, role):
    m = state["m"] = BETAS[0] * state.get("m", 0) + (1 - BETAS[0]) * g
    v = state["v"] = BETAS[1] * state.get("v", 0) + (1 - BETAS[1]) * g * g
    direction = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
    return p - lr * decay * p - lr * direction


def sgd(p, g, state, step, lr, decay, role):
    return p - lr * decay * p - lr * g


def lion(p, g, state, step, lr, decay, role):
    m = state.get("m", torch.zeros_like(g))
    direction = (0.9 * m + 0.1 * g).sign()
    state["m"] = 0.99 * m + 0.01 * g
    return p - lr * decay * p - lr * direction


def adafactor(p, g, state, step, lr, decay, role):
    """Adafactor without momentum and without relative step sizes. Updates with an RMS above 1 are scaled to an RMS of
    1."""
    beta, square = 1 - step**-0.8, g * g + 1e-30
    if p.dim() == 2:
        rows = state["rows"] = beta * state.get("rows", 0) + (1 - beta) * square.mean(1)
        columns = state["columns"] = beta * state.get("columns", 0) + (1 - beta) * square.mean(0)
        direction = g / ((rows / rows.mean())[:, None] * columns[None]).sqrt()
    else:
        v = state["v"] = beta * state.get("v", 0) + (1 - beta) * square
        direction = g / v.sqrt()
    direction = direction / max(1.0, direction.square().mean().sqrt().item())
    return p - lr * decay * p - lr * direction


def muon(p, g, state, step, lr, decay, role):
    """Muon: Nesterov momentum, orthogonalized in five quintic iterations. The RMS of the elements of an orthogonal
    matrix is 1 / sqrt(larger side), so the update is multiplied by sqrt(larger side), which makes its RMS about 1."""
    if role != "matrix":
        return adamw(p, g, state, step, lr, decay, role)
    m = state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
    return p - lr * decay * p - lr * math.sqrt(max(p.shape)) * orthogonal((0.05 * g + 0.95 * m).double()).float()


def orthogonal(x):
    x = x / x.norm().clamp(min=1e-7)  # the gradient of an unused matrix is zero
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


# optimizer of conf/optim -> its update rule, for optimizers that are not variants of AdamW
RULES = {"lion8bit": lion, "adafactor": adafactor, "sgd": sgd, "muon": muon}
