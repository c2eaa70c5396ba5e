"""Marks for tests that run on a CPU and on a card. The row on the card checks code for cards; the row on the CPU checks
that the test works."""

import pytest
import torch

CARD = pytest.param("cuda", marks=pytest.mark.gpu)
each_device = pytest.mark.parametrize("device", ["cpu", CARD])
# For tests whose rows on the CPU take seconds, and repeat what other tests cover.
each_device_slowly = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.matrix), CARD])
is_missing = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CARDS = pytest.param("cuda", marks=[pytest.mark.gpu, is_missing])
