"""Marks for tests that run on a CPU and on a card. The row on the card tests code for cards. On machines without a
card, the row on the CPU finds errors in the test itself."""

import pytest
import torch

CARD = pytest.param("cuda", marks=pytest.mark.gpu)
each_device = pytest.mark.parametrize("device", ["cpu", CARD])
# For tests whose row on the CPU takes seconds and repeats other tests.
each_device_slowly = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.matrix), CARD])
is_missing = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CARDS = pytest.param("cuda", marks=[pytest.mark.gpu, is_missing])
