"""Precision plugins: in which dtype the forward pass computes, and how its gradients come back to fp32.

The module calls three things on whichever plugin is installed: `forward_context()` around the forward pass,
Lightning's `backward`, and `unscale()` once per window, before anyone looks at the gradients. Lightning's own plugin
does not unscale for fused optimizers, refuses to clip for them, and counts a step that the loss scaler skipped as a
step; on a CPU it turns fp16 into bf16. These do none of that.

Autocast saves half of the activations' bytes and keeps the weights in fp32. Source: Micikevicius et al. 2018,
arXiv 1710.03740.
"""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lowmem.errors import Refused

log = logging.getLogger(__name__)

# Halved from 2**16 this is 26 overflows in a row: no gradient is that large, the loss itself is inf or nan.
SMALLEST_SCALE = 2.0**-10


class FullPrecision(Precision):
    """fp32 throughout."""

    def train_step_context(self) -> AbstractContextManager:
        # Lightning wraps the whole training step, backward and optimizer included. The module enters
        # `forward_context` itself, around the forward pass alone.
        return nullcontext()

    def unscale(self, optimizer: Optimizer) -> bool:
        """Bring the window's gradients to their true size. False: they overflowed, skip this step."""
        return True


class BFloat16Autocast(FullPrecision):
    """Matrix products in bf16, weights in fp32."""

    dtype = torch.bfloat16

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def forward_context(self) -> AbstractContextManager:
        # Without the cache: it would hold a 16-bit copy of every weight until the forward pass ends.
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


class Float16Autocast(BFloat16Autocast):
    """Matrix products in fp16, weights in fp32, loss scaled so that small gradients do not vanish.

    Args:
        init_scale: loss scale at the start; halved whenever a gradient overflows.
        growth_interval: optimizer steps without overflow after which the scale doubles.

    Raises:
        Refused: in `unscale`, when the gradients overflow at whatever scale.
    """

    dtype = torch.float16

    def __init__(self, device: str = "cpu", init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__(device)
        if device == "cpu":
            log.info(
                "precision=16 on a CPU: most emulate fp16 and take ten times as long; bf16 and 32 run at full speed."
            )
        self.scaler = torch.amp.GradScaler(device, init_scale=init_scale, growth_interval=growth_interval)

    def pre_backward(self, tensor: Tensor, module) -> Tensor:
        return super().pre_backward(self.scaler.scale(tensor), module)

    def unscale(self, optimizer: Optimizer) -> bool:
        scale = self.scaler.get_scale()
        self.scaler.unscale_(optimizer)
        self.scaler.update()  # before the step: it depends on the overflow alone
        overflowed = self.scaler.get_scale() < scale
        if overflowed and scale < SMALLEST_SCALE:
            raise Refused(
                f"precision=16: the gradients overflow fp16 even at a loss scale of {scale:g}. The loss is probably "
                "not finite: type precision=bf16, or a smaller lr."
            )
        return not overflowed

    def state_dict(self) -> dict:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.scaler.load_state_dict(state_dict)
