"""Precisions with weights, gradients and activations in 16 bits, which take half the memory of fp32. Updates are
computed in fp32.

Parameters are updated one at a time, where they are stored: on the device, or with strategy=fsdp_offload in host memory
(for weights=streamed see `BFloat16Stochastic`). Weight and gradient are converted to fp32, the optimizer updates the
fp32 weight, and the result is rounded to 16 bits. The optimizer sees only fp32 weights and gradients, so its state has
the usual dtypes, and an eps of 1e-8 does not underflow. The step needs temporary memory for the fp32 weight and fp32
gradient of one parameter. RoPE frequencies and other fp32 buffers keep their dtype. A subclass may convert and round
differently, and store additional tensors with each weight.

The price is lost updates: a 16-bit weight cannot change by less than the spacing of its dtype. The spacing of bf16 is
0.4 to 0.8 % of the weight, so most updates in fine-tuning are rounded away. Stochastic rounding rounds up or down at
random, with probabilities that make the expected value equal to the exact result. Source: Zamirai et al. 2020, arXiv
2010.06192.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.step.optimizer import DeviceOptimizer, GlobalNorm
from lowmem.step.stochastic import stochastically
from lowmem.system.errors import Refused
from lowmem.techniques.precision.contract import BasePrecision
from lowmem.techniques.precision.loss_scale import ScaledLoss
from lowmem.techniques.strategy.contract import OneDevice

ExtraState = dict[str, Tensor]


class SixteenBitWeights(BasePrecision):
    """Weights in `dtype`; updates are rounded to nearest. Subclasses may override `widen`, `round` and
    `new_extra_state`."""

    weights_dtype = None

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._extra_state: dict[nn.Parameter, ExtraState] = {}
        self._named: dict[str, nn.Parameter] = {}  # name -> parameter, or its shard if the model is sharded
        self._divided = False

    # --- for subclasses -------------------------------------------------------------------------------------------

    def widen(self, p: nn.Parameter) -> Tensor:
        """Returns an fp32 copy of a weight. The optimizer updates this copy in place."""
        return p.data.float()

    def round(self, wide: Tensor, p: nn.Parameter) -> None:
        """Rounds an updated weight to 16 bits. Args: wide: the fp32 weight; p: the parameter, whose data receives the
        result."""
        p.data.copy_(wide)

    def new_extra_state(self, p: nn.Parameter) -> ExtraState:
        """Returns additional tensors, by name, that the device stores with a weight; empty by default. The first call
        of `extra_state(p)` calls this method. `widen` and `round` of a subclass get the tensors from `extra_state(p)`,
        and change them in place. The memory meter and checkpoints include these tensors."""
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

    # --- the interface --------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        named = module.named_parameters()  # a tied parameter is listed once
        if isinstance(ranks := getattr(module, "ranks", None), OneDevice):  # theirs: any LightningModule
            self._divided, named = ranks.divides, ((name, ranks.local(p)) for name, p in named)
        self._named = dict(named)
        return super().convert_module(module)

    def optimizer(self, inner: Optimizer, model: nn.Module, global_norm: GlobalNorm) -> DeviceOptimizer:
        return NarrowOptimizer(self, inner, model, global_norm)

    def device_tensors(self) -> Iterator[Tensor]:
        return (tensor for extra_state in self._extra_state.values() for tensor in extra_state.values())

    def state_dict(self) -> dict:
        extra_state = {name: self._extra_state[p] for name, p in self._named.items() if self._extra_state.get(p)}
        return super().state_dict() | ({"held": extra_state} if extra_state else {})

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for name, extra_state in state_dict.get("held", {}).items():  # empty for most precisions
            p = self._named[name]
            self._extra_state[p] = {key: tensor.to(p.device, copy=True) for key, tensor in extra_state.items()}


class NarrowOptimizer(DeviceOptimizer):
    """Updates 16-bit weights one at a time, and converts each weight and its gradient to fp32 for the update. The
    gradient is unscaled after the conversion, because unscaled gradients below 6e-8 would underflow in fp16."""

    def __init__(
        self, precision: SixteenBitWeights, inner: Optimizer, model: nn.Module, global_norm: GlobalNorm
    ) -> None:
        super().__init__(inner, model, global_norm)
        self.precision = precision

    def _unscale(self) -> None:
        """Does nothing, because `step_one` unscales."""

    def step(self) -> None:
        for group, p in self.with_gradient():
            self.step_one(group, p)

    def step_one(self, group: dict, p: nn.Parameter) -> None:
        """Updates a parameter and frees its gradient."""
        if p.dtype == torch.float32:  # a weight of an adapter, which is stored in fp32 and not rounded
            p.grad.div_(self.scale)
            super().step_one(group, p)
            p.grad = None
            return
        narrow, wide, gradient = p.data, self.precision.widen(p), p.grad
        # A gradient must have its parameter's dtype, so weight and gradient are both replaced by fp32 tensors.
        p.grad = None
        p.data = wide
        p.grad = gradient.float().div_(self.scale)
        del gradient
        try:
            super().step_one(group, p)
            wide = p.data  # an optimizer may have replaced p.data
        finally:
            p.grad = None
            p.data = narrow
        self.precision.round(wide, p)


class BFloat16Weights(SixteenBitWeights):
    """bf16 weights; updates are rounded to nearest."""

    dtype = torch.bfloat16


class BFloat16Stochastic(SixteenBitWeights):
    """bf16 weights whose updates are rounded stochastically. With weights=streamed, the host updates and rounds all
    trained 16-bit weights, even those that are not streamed (`StochasticHostWeight` in `offload/host_weight.py`).
    Otherwise `NarrowOptimizer` updates and rounds them.

    Args:
        device: see `BasePrecision`.
        early_step: True: with weights=streamed and clip=null, each weight is updated during backward, as soon as its
            last gradient of the window is in host memory. False: weights are updated after backward.
    """

    dtype = torch.bfloat16
    draws = True
    steps_on_host = "if streamed"

    def __init__(self, device: str = "cpu", early_step: bool = True) -> None:
        super().__init__(device)
        self.early_step = early_step

    def round(self, wide: Tensor, p: nn.Parameter) -> None:
        stochastically(wide, p.data)


class Float16Weights(ScaledLoss, SixteenBitWeights):
    """fp16 weights, with a loss scale. Args: see `ScaledLoss`."""

    dtype = torch.float16
