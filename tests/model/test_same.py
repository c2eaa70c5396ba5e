"""Tests `same`, which compares two tensors up to rounding errors."""

import pytest
import torch

from lowmem.model.magnitude import OTHER_KERNELS, ROUNDINGS, same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("least", [0.0, OTHER_KERNELS])
def test_tensor_comparison_accepts_errors_up_to_a_tolerance_that_scales_with_the_dtype(dtype, least):
    numbers = torch.tensor([0.0, 1.0, 64.0])
    off = 64 * max(least, ROUNDINGS * torch.finfo(dtype).eps)
    assert same(numbers + torch.tensor([0.9 * off, 0, 0]), numbers, 64.0, [torch.float32, dtype], least)
    assert not same(numbers + torch.tensor([1.1 * off, 0, 0]), numbers, 64.0, [torch.float32, dtype], least)


def test_tensor_comparison_accepts_nan_and_inf_only_if_both_tensors_have_them():
    nan, inf = float("nan"), float("inf")
    assert same(torch.tensor([nan, inf]), torch.tensor([nan, inf]), 1.0, [torch.float32])
    for one, other in ((nan, 0.0), (inf, 0.0), (inf, -inf)):
        assert not same(torch.tensor([one]), torch.tensor([other]), 1.0, [torch.float32])
