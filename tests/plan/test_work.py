"""Bytes and operations of single operators: by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from lowmem.plan.cost.machine import Machine
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.shapes import ShapeMode
from lowmem.step.stochastic import stochastically

N = 1 << 12


def work(make, field="moved"):
    """Returns the bytes per parameter of the call that `make` returns."""
    with ShapeMode() as shapes:
        call = make()
        shapes.phase = "update"
        call()
    return sum(getattr(work, field) * times for (_, work), times in shapes.work.items()) / N


def parameter(dtype=torch.float32):
    p = nn.Parameter(torch.ones(N, dtype=dtype))
    p.grad = torch.full_like(p, 1e-3)
    return p


def test_fused_adamw_moves_28_bytes_per_parameter():
    """In fp32 the weight and two moments are read and written, and the gradient is read: 7 x 4."""

    def make():
        optimizer = torch.optim.AdamW([parameter()], fused=True)
        optimizer.step()
        return optimizer.step

    assert work(make) == pytest.approx(28, rel=0.01)


@pytest.mark.parametrize("foreach", [False, True])
def test_so_does_sgd_by_hand(foreach):
    """p -= lr (g + decay p): g is copied with p added (12 bytes), and p is read and written with that (12)."""
    steps = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, foreach=foreach)
    assert work(lambda: steps([parameter()]).step) == pytest.approx(24, rel=0.01)


@pytest.mark.parametrize(
    ("call", "bytes_each"),
    [
        (lambda a, b: a.copy_(b), 8),  # what is overwritten is not read
        (lambda a, b: a.add_(b), 12),
        (lambda a, b: a.zero_(), 4),
        (lambda a, b: torch.add(a, b), 12),
        (lambda a, b: torch.add(a, b, out=b), 12),
        (lambda a, b: torch.zeros_like(a), 4),
        (lambda a, b: torch.empty_like(a), 0),
        (lambda a, b: a.view(2, -1), 0),
        (lambda a, b: a.new_empty(3), 0),
        (lambda a, b: torch.ones(1).expand(N).mul(a), 8),  # and what is repeated is read once
    ],
)
def test_what_an_operator_reads_and_writes(call, bytes_each):
    assert work(lambda: partial(call, torch.ones(N), torch.ones(N))) == pytest.approx(bytes_each, rel=0.01)


@pytest.mark.parametrize("part_first", [False, True])
def test_what_is_repeated_is_counted_once_whatever_it_is_a_part_of(monkeypatch, part_first):
    """A sum of 1,000 rows that are one: it reads 1,000 numbers and writes one, whichever storage was seen first."""
    monkeypatch.setattr("lowmem.plan.tracing.shapes._known", {})
    row, first_of_many = (lambda: torch.ones(1, 1000)), (lambda: torch.ones(1000, 1000)[:1])
    for make in (first_of_many, row) if part_first else (row, first_of_many):
        assert work(lambda make=make: make().expand(1000, 1000).sum) * N == 4004
    assert work(lambda: torch.ones(1000, 1000).sum) * N == 4_000_004
    assert work(lambda: torch.ones(1, 1000).expand(0, 1000).clone) == 0


def test_rounding_at_random_is_many_passes():
    """Read and written 4 bytes at a time: noise 4, its addition 12, the masking 8, finite? (absolute values 8, compared
    5, with itself 9 or 5, both 3), the choice 13, and the copy in 16 bits 6."""
    found = work(lambda: partial(stochastically, torch.ones(N), torch.ones(N, dtype=torch.bfloat16)))
    assert 60 <= found <= 72


def test_new_tensors_of_32_mib_or_more_are_asked_of_the_system():
    """malloc finds room for smaller ones in what was freed."""
    large, small = (partial(torch.ones, size >> 2) for size in (32 << 20, 16 << 20))
    assert work(lambda: partial(torch.neg, large()), "fresh") * N == 32 << 20
    assert work(lambda: partial(torch.empty_like, large()), "fresh") * N == 32 << 20
    assert work(lambda: large().neg_, "fresh") == work(lambda: large().t, "fresh") == 0
    assert work(lambda: partial(torch.neg, small()), "fresh") == 0
    rates = Machine("", {"float32": 1.0}, bandwidth=10.0, overhead=0.0, fresh=2.0)
    assert rates.operator(Work(torch.float32, 0, 100, fresh=40)) == 10 + 20
    assert replace(rates, fresh=None).operator(Work(torch.float32, 0, 100, fresh=40)) == 10  # a card
