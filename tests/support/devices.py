"""Marks of tests that run on a CPU and on a card. The card's row is the check; the CPU's row tests the test."""

import pytest
import torch

CARD = pytest.param("cuda", marks=pytest.mark.gpu)
each_device = pytest.mark.parametrize("device", ["cpu", CARD])
# The CPU's rows take seconds, and other tests also cover them.
each_device_slowly = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.matrix), CARD])
is_missing = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CARDS = pytest.param("cuda", marks=[pytest.mark.gpu, is_missing])
