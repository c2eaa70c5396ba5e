"""Tests that splitting fp32 numbers into two 16-bit halves and joining the halves restores every bit."""

import numpy as np
import pytest
import torch

from lowmem.plan.tracing.shapes import ShapeMode
from lowmem.step import fp32_halves

AT_ONCE = 1 << 20


def floats(start, count):
    """Returns the fp32 numbers whose bits are `start` and the following integers."""
    return torch.arange(start, start + count, dtype=torch.int32).view(torch.float32)


def special():
    """Returns all 65,536 bf16 numbers, NaNs included, the ties between adjacent bf16 numbers, and the nearest fp32
    neighbours of all these numbers."""
    uppers = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    near = torch.tensor([-2, -1, 0, 1, 2])
    lowers = torch.cat([near, (1 << 15) + near, -(1 << 15) + near])
    return (uppers + lowers).flatten().int().view(torch.float32)


def half_up(wide):
    """Returns the bits of the bf16 numbers nearest to `wide`, ties away from zero, computed with integers."""
    return ((wide.numpy().view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16).view(np.int16)


def exact(wide):
    """Returns True if the upper half is rounded half up and joining restores all bits."""
    upper, rest = fp32_halves.halves(wide)
    again = fp32_halves.joined(upper, rest)
    return np.array_equal(upper.view(torch.int16).numpy(), half_up(wide)) and torch.equal(
        again.view(torch.int32), wide.view(torch.int32)
    )


def to_nearest_even(monkeypatch):
    monkeypatch.setattr(fp32_halves, "rounded", lambda wide, out: out.copy_(wide))


def with_the_lower_half_cut(monkeypatch):
    monkeypatch.setattr(
        fp32_halves, "rounded", lambda wide, out: out.view(torch.int16).copy_(wide.view(torch.int32) >> 16)
    )


def sample():
    torch.manual_seed(0)
    return torch.cat([torch.randint(-(1 << 31), 1 << 31, (1 << 21,), dtype=torch.int32).view(torch.float32), special()])


def test_sampled_and_special_fp32_numbers_split_into_halves_are_restored_bit_exactly():
    assert exact(sample())


@pytest.mark.matrix
def test_all_fp32_numbers_split_into_halves_are_restored_bit_exactly():
    for start in range(-(1 << 31), 1 << 31, AT_ONCE):
        assert exact(floats(start, AT_ONCE)), hex(start)


@pytest.mark.parametrize("wrong", [to_nearest_even, with_the_lower_half_cut])
def test_fp32_numbers_split_with_another_rounding_are_not_restored_bit_exactly(wrong, monkeypatch):
    wrong(monkeypatch)
    wide = sample()
    again = fp32_halves.joined(*fp32_halves.halves(wide))
    assert not exact(wide) and not torch.equal(again.view(torch.int32), wide.view(torch.int32))


def test_upper_half_of_a_split_fp32_number_is_the_nearest_bf16_with_ties_away_from_zero():
    ties = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 - 2**-23, 3.4e38, -0.0, torch.inf])
    upper, _ = fp32_halves.halves(ties)
    expected = [1 + 2**-7, -1 - 2**-7, 1 + 2**-6, 1.0, torch.inf, -0.0, torch.inf]
    assert upper.tolist() == expected and upper[5].signbit()
    wide = torch.randn(1 << 16)
    away = (fp32_halves.halves(wide)[0].float() - wide).abs()
    assert (away <= (wide.bfloat16().float() - wide).abs()).all()


def test_split_and_join_in_place_restore_transposed_sliced_scalar_and_empty_fp32_tensors():
    wide = torch.randn(3, 5, 7, requires_grad=True)
    for one in (wide, wide.transpose(0, 2), wide[:, 1:3], wide[0, 0, 0], wide[:0]):
        upper, rest = fp32_halves.halves(one)
        fp32_halves.rounded(one, into := torch.empty_like(upper))
        fp32_halves.split_into(fp32_halves.joined(upper, rest), upper, rest)
        back = torch.full(one.shape, 9.0)
        assert fp32_halves.joined(upper, rest, out=back) is back and torch.equal(back, one) and torch.equal(into, upper)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_round_to_bf16_half_up_and_to_fp16_half_to_even(dtype):
    ties = torch.tensor([1 + 2**-8, 1 + 2**-11])
    fp32_halves.round_into(ties, out := torch.empty(2, dtype=dtype))
    assert out.tolist() == {torch.bfloat16: [1 + 2**-7, 1.0], torch.float16: [1 + 2**-8, 1.0]}[dtype]


def test_splitting_and_joining_a_256_gib_tensor_takes_fewer_than_30_operators():
    with ShapeMode() as shapes:
        wide = torch.empty(1 << 20, 1 << 16)  # 256 GiB
        upper, rest = fp32_halves.halves(wide)
        assert (upper.dtype, rest.dtype, upper.shape) == (torch.bfloat16, torch.int16, wide.shape)
        assert fp32_halves.joined(upper, rest).dtype == torch.float32
        assert shapes.operators < 30


def test_splitting_a_bf16_tensor_raises_a_type_error():
    """Without the error, the bits of two bf16 numbers would be read as one fp32 number."""
    with pytest.raises(TypeError, match="bfloat16"):
        fp32_halves.halves(torch.ones(2, 2, dtype=torch.bfloat16))
