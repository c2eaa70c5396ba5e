"""Defines a precision in fp64. Another order of sums causes relative differences of about 1e-16, so tests can detect
relative errors of 1e-9."""

import torch

from lowmem.techniques.precision.fp32_weights import FullPrecision

LINE = "precision._target_=in_float64.InFloat64"  # overrides the class of precision=32, the default


class InFloat64(FullPrecision):
    weights_dtype = torch.float64
