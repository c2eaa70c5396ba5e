"""Precisions with fp32 weights: matrix products are in fp32 or TF32, or with autocast in 16 bits.

With autocast (`precision=16` or `bf16`) most activations have 16 bits. Source: Micikevicius et al. 2018, arXiv
1710.03740.
"""

import logging
from contextlib import AbstractContextManager

import torch
from torch import nn

from lowmem.techniques.precision.contract import BasePrecision
from lowmem.techniques.precision.loss_scale import ScaledLoss

log = logging.getLogger(__name__)


class FullPrecision(BasePrecision):
    """Computes everything in fp32."""

    dtype = torch.float32


class TensorFloat32(FullPrecision):
    """fp32 weights. On a card with TF32, inputs of matrix products keep 10 mantissa bits, and sums are in fp32. On
    other devices, matrix products are in fp32."""

    tf32 = True

    def convert_module(self, module: nn.Module) -> nn.Module:
        if has_tf32(self.device):
            # restored in `teardown`: the setting belongs to the process, and the next run may be in fp32
            self._run.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        else:
            log.info("precision=tf32: this device does not support TF32, so matrix products run in fp32.")
        return super().convert_module(module)


def has_tf32(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)


class Autocast(BasePrecision):
    """Computes matrix products in `dtype`, with weights in fp32."""

    def forward_context(self) -> AbstractContextManager:
        # With its cache, autocast would keep the 16-bit copies of all weights until the forward pass ends.
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


class BFloat16Autocast(Autocast):
    """Autocast to bf16. bf16 has the range of fp32, so the loss is not scaled."""

    dtype = torch.bfloat16


class Float16Autocast(ScaledLoss, Autocast):
    """Autocast to fp16, with a loss scale. Args: see `ScaledLoss`."""

    dtype = torch.float16
