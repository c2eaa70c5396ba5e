"""Tests the cache of operator outputs in a trace: cached outputs equal the fake tensors that torch computes without the
cache."""

import pytest
import torch
from torch import nn

from lowmem.plan.tracing import shapes
from lowmem.plan.tracing.shapes import ShapeMode
from lowmem.system.torch_private import FakeTensor, storage_key


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(shapes, "_known", {})


def told(tensor, among):
    """Returns all attributes of a tensor that a plan reads. Args: among: tensors whose storage the tensor may share."""
    sharing = [storage_key(tensor) == storage_key(other) for other in among]
    storage = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), storage, sharing, tensor.device


def computed():
    """Yields outputs of operators that return new tensors, views, their modified input, several tensors, or another
    dtype, that read several inputs, or that read part of a storage."""
    x, y = torch.empty(4, 6), torch.empty(6, dtype=torch.bfloat16)
    yield from (x + y, x.t(), x[1:, ::2], x[:, 3].view(2, 2), x.add_(1), x.add_(1.0), x * x, x * torch.empty(4, 6))
    yield from (*x.split(2), *x.max(0), torch.cat([x, x]), y.float(), y.to(torch.bfloat16), x.view(torch.int32))
    yield from (
        x.t().contiguous(),
        x.reshape(24),
        x.t().reshape(24),
        torch.empty_like(x.t()),
        x.sum(),
        x.expand(2, 4, 6),
    )
    yield from (torch.full((3,), 1), torch.full((3,), 1.0), torch.full((3,), True), x.t() @ x, x == 1, y.argmax())
    yield from torch.native_dropout(x, 0.5, True)


def test_cached_operator_outputs_equal_torchs_fake_tensors():
    with ShapeMode() as first:
        expected, among = [], []
        for tensor in computed():
            expected.append(told(tensor, among))
            among.append(tensor)
    assert len(shapes._known) > 20
    with ShapeMode() as again:
        for one, tensor in zip(expected, again_of := list(computed()), strict=True):
            assert type(tensor) is FakeTensor and one == told(tensor, again_of[: len(one[5])])
    assert again.work == first.work


def test_tensor_passed_twice_to_a_traced_operator_counts_as_read_once():
    seen = ShapeMode()
    seen.phase = "forward"
    with seen:
        x = torch.empty(8)
        x * x
        x * torch.empty(8)
    moved = sorted(work.moved for _, work in seen.work)
    assert moved[-2:] == [64, 96]


def test_cached_operator_with_an_out_argument_returns_this_argument():
    with ShapeMode():
        for _ in range(2):  # the second output comes from the cache
            row, column, out = torch.empty(4, 1), torch.empty(1, 3), torch.empty(4, 3)
            assert torch.mul(row, column, out=out) is out
            assert torch.add(out, 1, out=(resized := torch.empty(0))).shape == resized.shape == (4, 3)
        known = [func for func, *_ in shapes._known if "out" in func._overloadname]
    assert torch.ops.aten.mul.out in known and torch.ops.aten.add.out not in known


def test_traced_tensor_without_a_dtype_gets_the_current_default_dtype():
    with ShapeMode():
        wide = torch.empty(4)
        torch.set_default_dtype(torch.bfloat16)
        try:
            narrow = torch.empty(4)
        finally:
            torch.set_default_dtype(torch.float32)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)


def test_traced_operators_on_constants_and_as_strided_are_not_cached():
    with ShapeMode():
        known = len(shapes._known)
        constant = torch.tensor(3)
        constant.add(1)
        torch.empty(3).as_strided_((2,), (1,))
    assert len(shapes._known) <= known + 2  # `empty`, and the operator that made the constant


def test_device_query_during_a_trace_counts_as_no_work():
    seen = ShapeMode()
    seen.phase = "forward"
    with seen:
        linear = nn.Linear(8, 8, bias=False)
        linear(torch.empty(2, 8, requires_grad=True)).sum().backward()
    assert seen.work and all(work.moved < 8 * 8 * 4 * 4 for _, work in seen.work)
    assert sum(seen.work.values()) < 20


def test_memory_traffic_of_a_composite_operator_is_counted_once():
    seen = ShapeMode()
    seen.phase = "forward"
    with seen:
        torch.ops.aten._foreach_add.List([torch.empty(4), torch.empty(4)], [torch.empty(4), torch.empty(4)])
    assert sum(times for (_, work), times in seen.work.items() if work.moved == 6 * 16) == 1


def test_fake_tensors_of_two_traces_belong_to_the_mode_of_their_trace():
    with ShapeMode() as one:
        a = torch.empty(2) + 1
    with ShapeMode() as two:
        b = torch.empty(2) + 1
    assert a.fake_mode is one and b.fake_mode is two
