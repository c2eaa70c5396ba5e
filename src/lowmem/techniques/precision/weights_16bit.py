"""Holds weights, gradients and activations in 16 bits, half of their bytes, and computes the update in fp32.

One parameter at a time: it and its gradient are widened to fp32, any optimizer steps it, and the result is rounded
back; a class may do both in another way, and store more than the weight. The optimizer's state is that of fp32 weights,
so an eps of 1e-8 does not underflow; besides it the step needs one parameter in fp32. RoPE frequencies and other fp32
buffers stay as the model made them.

It costs small updates: a 16-bit weight cannot move by less than its spacing. With bf16 that is 0.4 % of the weight, and
most updates of a fine-tuning round to nothing. Stochastic rounding moves the weight by a full spacing with the
probability that makes the mean right. Source: Zamirai et al. 2020, arXiv 2010.06192.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.system.errors import Refused
from lowmem.techniques.precision.contract import BasePrecision, step_one, with_gradient, with_step
from lowmem.techniques.precision.loss_scale import ScaledLoss
from lowmem.techniques.strategy.contract import OneDevice

ExtraState = dict[str, Tensor]

CHUNK = 1 << 22  # elements that are rounded at random at once
LARGEST = torch.finfo(torch.bfloat16).max


class SixteenBitWeights(BasePrecision):
    """Weights in `dtype`. Such precisions differ in `widen`, `round` and `new_extra_state`."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._extra_state: dict[nn.Parameter, ExtraState] = {}
        self._named: dict[str, nn.Parameter] = {}  # the parameters that are stepped, by name
        self._divided = False

    # --- seams ----------------------------------------------------------------------------------------------------

    def widen(self, p: nn.Parameter) -> Tensor:
        """Returns a copy of the weight in fp32, which the optimizer steps in place."""
        return p.data.float()

    def round(self, wide: Tensor, p: nn.Parameter) -> None:
        """Writes the stepped fp32 weight into `p.data`, in 16 bits."""
        p.data.copy_(wide)

    def new_extra_state(self, p: nn.Parameter) -> ExtraState:
        """Returns tensors by name that are kept with a weight on the device; called before its first update. `widen`
        and `round` find them in `extra_state(p)` and change them in place. Meter and checkpoints include them."""
        return {}

    def extra_state(self, p: nn.Parameter) -> ExtraState:
        if self._divided:
            raise Refused(
                f"precision: {type(self).__name__} stores extra state for each weight, which checkpoints of a sharded "
                "model cannot hold. Type strategy=ddp."
            )
        if p not in self._extra_state:
            self._extra_state[p] = self.new_extra_state(p)
        return self._extra_state[p]

    # --- the contract ---------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        named = module.named_parameters()  # a tied parameter is listed once
        if isinstance(ranks := getattr(module, "ranks", None), OneDevice):  # theirs: any module
            self._divided, named = ranks.divides, ((name, ranks.local(p)) for name, p in named)
        self._named = dict(named)
        return super().convert_module(module)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return with_step(optimizer, self._step_all)

    def device_tensors(self) -> Iterator[Tensor]:
        return (tensor for extra_state in self._extra_state.values() for tensor in extra_state.values())

    def state_dict(self) -> dict:
        extra_state = {name: self._extra_state[p] for name, p in self._named.items() if self._extra_state.get(p)}
        return super().state_dict() | ({"held": extra_state} if extra_state else {})

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for name, extra_state in state_dict.get("held", {}).items():  # most have none
            p = self._named[name]
            self._extra_state[p] = {key: tensor.to(p.device, copy=True) for key, tensor in extra_state.items()}

    def _step_all(self, optimizer: Optimizer) -> None:
        for group, p in with_gradient(optimizer):
            self.update(optimizer, group, p)

    def update(self, optimizer: Optimizer, group: dict, p: nn.Parameter) -> None:
        if p.dtype == torch.float32:  # a module that an adapter keeps in fp32: nothing is rounded
            p.grad.div_(self.gradient_scale)
            super().update(optimizer, group, p)
            return
        narrow, wide, gradient = p.data, self.widen(p), p.grad
        # A parameter cannot have a gradient of another dtype, so both are exchanged.
        p.grad = None
        p.data = wide
        p.grad = gradient.float().div_(self.gradient_scale)
        del gradient
        try:
            step_one(optimizer, group, p)
            wide = p.data  # an optimizer may have set another tensor
        finally:
            p.grad = None
            p.data = narrow
        self.round(wide, p)


class BFloat16Weights(SixteenBitWeights):
    """bf16 weights that are rounded to nearest."""

    dtype = torch.bfloat16


class BFloat16Stochastic(SixteenBitWeights):
    """bf16 weights that are rounded up or down at random, so that the mean is right."""

    dtype = torch.bfloat16
    draws = True

    def round(self, wide: Tensor, p: nn.Parameter) -> None:
        stochastically(wide, p.data)


class Float16Weights(ScaledLoss, SixteenBitWeights):
    """fp16 weights, with a loss scale. Gradients stay scaled until each is widened for its update: unscaled in fp16,
    those below 6e-8 would vanish.

    Args: those of `ScaledLoss`.
    """

    dtype = torch.float16

    def unscale(self, optimizer: Optimizer) -> bool:
        norm = self.global_norm([p for _, p in with_gradient(optimizer)])
        return self.loss_scale.update(bool(norm.isfinite()))


def stochastically(
    wide: Tensor, narrow: Tensor, generator: torch.Generator | None = None, on_host: bool = False
) -> None:
    """Rounds wide (fp32) into narrow (bf16), up or down with the probability that makes the mean right.

    bf16 is the upper half of fp32: a random number that is added to the lower half carries over with just that
    probability. Above the largest finite bf16 the only neighbour is inf, so finite numbers become the largest finite
    bf16. A few rows are rounded at a time, since it takes 15 bytes per element.

    Args:
        generator: of the random numbers, on wide's device; None: torch's own.
        on_host: values are inspected first, for which a card would have to wait. The bits are the same, in less than
            half of the time and memory.
    """
    draw = partial(torch.randint, 0, 1 << 16, dtype=torch.int32, device=wide.device, generator=generator)
    wide, narrow = torch.atleast_1d(wide, narrow)
    rows = max(1, CHUNK * len(wide) // max(1, wide.numel()))
    pieces = wide.split(rows)
    # a CPU draws the same numbers in pieces as at once; a card would not
    noises = draw(wide.shape).split(rows) if wide.is_cuda else (draw(piece.shape) for piece in pieces)
    for piece, noise, rounded in zip(pieces, noises, narrow.split(rows), strict=True):
        if on_host and piece.numel() and _has_neighbours(piece):
            rounded.view(torch.int16).copy_(noise.add_(piece.view(torch.int32)).bitwise_right_shift_(16))
        else:
            _add_and_cut(piece, noise, rounded)


def _has_neighbours(wide: Tensor) -> bool:
    """Returns True if every number lies between two finite bf16 numbers; nan does not."""
    low, high = torch.aminmax(wide)
    return bool(low >= -LARGEST) and bool(high <= LARGEST)


def _add_and_cut(wide: Tensor, noise: Tensor, narrow: Tensor) -> None:
    rounded = wide.view(torch.int32).add(noise).bitwise_and_(-1 << 16).view(torch.float32)  # exact in bf16
    narrow.copy_(torch.where(wide.isfinite(), rounded.clamp_(-LARGEST, LARGEST), wide))
