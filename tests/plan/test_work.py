"""Tests the memory traffic of single operators and optimizers against values computed by hand."""

from functools import partial

import pytest
import torch
from torch import nn

from lowmem.config.settle import run_of
from lowmem.plan.job import resolved
from lowmem.plan.tracing.shapes import ShapeMode
from lowmem.plan.tracing.stand_in import stand_in
from lowmem.step.stochastic import stochastically
from lowmem.training import build

N = 1 << 12


def work(make, field="moved"):
    """Returns the memory traffic of the function that `make` returns, divided by N parameters. Args: field: another
    field of the work to return instead."""
    with ShapeMode() as shapes:
        call = make()
        shapes.phase = "update"
        call()
    return sum(getattr(work, field) * times for (_, work), times in shapes.work.items()) / N


def parameter(dtype=torch.float32):
    p = nn.Parameter(torch.ones(N, dtype=dtype))
    p.grad = torch.full_like(p, 1e-3)
    return p


def test_traced_fused_adamw_moves_28_bytes_per_parameter():
    """In fp32 the weight and two moments are read and written, and the gradient is read: 7 accesses of 4 bytes."""

    def make():
        optimizer = torch.optim.AdamW([parameter()], fused=True)
        optimizer.step()
        return optimizer.step

    assert work(make) == pytest.approx(28, rel=0.01)


@pytest.mark.parametrize(("optim", "bytes_each"), [("adamw", 28), ("adam8bit", 12 + 2 * 2 * (1 + 4 / 256))])
def test_traced_optimizer_stand_in_moves_the_bytes_of_gradient_weight_and_state(optim, bytes_each):
    """In the stand-in, one kernel reads the gradient, and reads and writes weight and state. AdamW's state is in fp32;
    adam8bit's state is in 8 bits, with an fp32 scale per 256 elements."""
    run = resolved(run_of(["model=gpt2", "batch_size=1", "precision=32", f"optim={optim}"]), on_card=False)
    standing_in = stand_in(build.optimizer(run), one_kernel=True, pages=False)

    def make():
        layer = nn.Linear(N >> 6, 1 << 6, bias=False)
        layer.weight.grad = torch.full_like(layer.weight, 1e-3)
        optimizer = standing_in(layer)
        optimizer.step()
        return optimizer.step

    assert work(make) == pytest.approx(bytes_each, rel=0.01)


@pytest.mark.parametrize("foreach", [False, True])
def test_traced_sgd_with_weight_decay_moves_24_bytes_per_parameter(foreach):
    """p -= lr (g + decay p): the sum of g and decay p is written to a copy (12 bytes), and then p is updated with this
    copy (12)."""
    steps = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, foreach=foreach)
    assert work(lambda: steps([parameter()]).step) == pytest.approx(24, rel=0.01)


@pytest.mark.parametrize(
    ("call", "bytes_each"),
    [
        (lambda a, b: a.copy_(b), 8),  # the overwritten tensor is not read
        (lambda a, b: a.add_(b), 12),
        (lambda a, b: a.zero_(), 4),
        (lambda a, b: torch.add(a, b), 12),
        (lambda a, b: torch.add(a, b, out=b), 12),
        (lambda a, b: torch.zeros_like(a), 4),
        (lambda a, b: torch.empty_like(a), 0),
        (lambda a, b: a.view(2, -1), 0),
        (lambda a, b: a.new_empty(3), 0),
        (lambda a, b: torch.ones(1).expand(N).mul(a), 8),  # an expanded tensor is read once
    ],
    ids=[
        *("copy_", "add_", "zero_", "add", "add with out", "zeros_like", "empty_like", "view", "new_empty"),
        "product with an expanded tensor",
    ],
)
def test_traced_operator_traffic_equals_hand_computed_bytes(call, bytes_each):
    assert work(lambda: partial(call, torch.ones(N), torch.ones(N))) == pytest.approx(bytes_each, rel=0.01)


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((12, 8), (3, 8, 16), 2 * 12 * 8 * 16),
        ((16, 16), (16, 8), 2 * 16 * 16 * 8),
        ((3, 4, 8), (3, 8, 16), 3 * 2 * 4 * 8 * 16),
    ],
    ids=["rows by expert", "inner dimension by expert", "two stacks"],
)
def test_flops_of_grouped_matrix_products_equal_hand_computed_flops(a, b, flops):
    ends = [3] if len(a) == 2 else None  # shape of the offsets: one for each expert

    def products():
        offsets = [] if ends is None else [torch.ones(ends, dtype=torch.int32)]
        return partial(torch._grouped_mm, torch.ones(a), torch.ones(b), *offsets)

    assert work(products, "flops") * N == flops


@pytest.mark.parametrize("part_first", [False, True])
def test_memory_traffic_of_an_expanded_tensor_is_counted_by_its_storage(monkeypatch, part_first):
    """The sum of a row that is expanded to 1,000 rows reads 1,000 numbers and writes one, whether the first traced row
    is a tensor of its own or part of a larger tensor."""
    monkeypatch.setattr("lowmem.plan.tracing.shapes._known", {})
    row, first_of_many = (lambda: torch.ones(1, 1000)), (lambda: torch.ones(1000, 1000)[:1])
    for make in (first_of_many, row) if part_first else (row, first_of_many):
        assert work(lambda make=make: make().expand(1000, 1000).sum) * N == 4004
    assert work(lambda: torch.ones(1000, 1000).sum) * N == 4_000_004
    assert work(lambda: torch.ones(1, 1000).expand(0, 1000).clone) == 0


def test_traced_stochastic_rounding_moves_60_to_72_bytes_per_parameter():
    """Bytes read and written per element: noise 4, addition 12, masking 8, isfinite 21 to 25 (absolute value 8,
    comparison with infinity 5, comparison with itself 9 or 5, product 3), selection 13, and the copy to 16 bits 6."""
    found = work(lambda: partial(stochastically, torch.ones(N), torch.ones(N, dtype=torch.bfloat16)))
    assert 60 <= found <= 72
