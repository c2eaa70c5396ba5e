"""A precision in fp64: sums in another order differ by 1e-16, and a mistake of 1e-9 is seen."""

import torch

from lowmem.techniques.precision.fp32_weights import FullPrecision

LINE = "precision._target_=in_float64.InFloat64"  # beside precision=32


class InFloat64(FullPrecision):
    weights_dtype = torch.float64
