"""Precisions with 16-bit weights on the device and fp32 masters on the host, so that small updates are not lost.

The device stores 2 bytes of weights per parameter, or less if weights are streamed. The host stores the masters, the
optimizer state and a step's gradients, and the CPU runs the optimizer. The Lightning callback `MasterWeights`
(`offload/master_weights.py`) creates the masters, and `HostOptimizer` (`offload/host_optimizer.py`) updates them. The
classes in this module define the dtypes and the loss scale. Sources: Micikevicius et al. 2018, arXiv 1710.03740, for
masters; Ren et al. 2021, arXiv 2101.06840, for masters in host memory.
"""

import torch

from lowmem.techniques.precision.contract import BasePrecision
from lowmem.techniques.precision.loss_scale import ScaledLoss


class BFloat16Master(BasePrecision):
    """bf16 weights on the device. bf16 has the range of fp32, so the loss is not scaled.

    Args:
        device: see `BasePrecision`.
        early_step: True: with clip=null, each master is updated during backward, as soon as its last gradient of the
            window is in host memory. False: masters are updated after backward.
    """

    dtype = torch.bfloat16
    steps_on_host = "always"

    def __init__(self, device: str = "cpu", early_step: bool = True) -> None:
        super().__init__(device)
        self.early_step = early_step


class Float16Master(ScaledLoss, BasePrecision):
    """fp16 weights on the device, with a loss scale. Args: see `ScaledLoss`."""

    dtype = torch.float16
    steps_on_host = "always"
