"""A precision in fp64: another order of sums changes results by 1e-16, so errors of 1e-9 are detected."""

import torch

from lowmem.techniques.precision.fp32_weights import FullPrecision

LINE = "precision._target_=in_float64.InFloat64"  # in addition to precision=32


class InFloat64(FullPrecision):
    weights_dtype = torch.float64
