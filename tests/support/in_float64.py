"""A precision in fp64. Another order of sums changes a result by about 1e-16 of it, so that tests can detect errors of
1e-9."""

import torch

from lowmem.techniques.precision.fp32_weights import FullPrecision

LINE = "precision._target_=in_float64.InFloat64"  # an override for precision=32, the default


class InFloat64(FullPrecision):
    weights_dtype = torch.float64
