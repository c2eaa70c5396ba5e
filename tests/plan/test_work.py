"""Bytes and operations of single operators: by hand."""

import pytest
import torch
from torch import nn

from lowmem.plan.trace import Shapes
from lowmem.precision.sixteen import stochastically

N = 1 << 12


def moved(call, per=N):
    """Bytes per parameter."""
    with Shapes() as shapes:
        shapes.phase = "update"
        call()
    return sum(work.moved * times for (_, work), times in shapes.work.items()) / per


def parameter(dtype=torch.float32):
    p = nn.Parameter(torch.ones(N, dtype=dtype))
    p.grad = torch.full_like(p, 1e-3)
    return p


def test_fused_adamw_moves_28_bytes_per_parameter():
    """Of fp32: the weight and two moments are read and written, the gradient is read: 7 x 4."""
    p = parameter()
    optimizer = torch.optim.AdamW([p], fused=True)
    optimizer.step()
    assert moved(optimizer.step) == pytest.approx(28, rel=0.01)
    once = {id(t): t for t in (p, p.grad, *(t for t in optimizer.state[p].values() if t.numel() > 1))}  # the wrong way
    assert sum(t.nbytes for t in once.values()) / N == 16


@pytest.mark.parametrize("foreach", [False, True])
def test_so_does_sgd_by_hand(foreach):
    """p -= lr (g + decay p): g is copied with p added (12 bytes), and p is read and written with that (12)."""
    optimizer = torch.optim.SGD([parameter()], lr=0.1, weight_decay=0.1, foreach=foreach)
    assert moved(optimizer.step) == pytest.approx(24, rel=0.01)


def test_what_is_overwritten_is_not_read():
    a, b = torch.ones(N), torch.ones(N)
    assert moved(lambda: a.copy_(b)) == 8 and moved(lambda: a.add_(b)) == 12 and moved(lambda: a.zero_()) == 4
    assert moved(lambda: torch.add(a, b)) == 12 and moved(lambda: torch.add(a, b, out=b)) == 12
    assert moved(lambda: torch.zeros_like(a)) == 4
    assert moved(lambda: torch.empty_like(a)) == moved(lambda: a.view(2, -1)) == moved(lambda: a.new_empty(3)) == 0
    assert moved(lambda: torch.ones(1).expand(N).mul(a)) == pytest.approx(8, rel=0.01)


def test_rounding_at_random_is_many_passes():
    """Read and written 4 bytes at a time: noise 4, its addition 12, the masking 8, finite? (absolute values 8, compared
    5, with itself 9 or 5, both 3), the choice 13, and the copy in 16 bits 6."""
    wide, narrow = torch.ones(N), torch.ones(N, dtype=torch.bfloat16)
    assert 60 <= moved(lambda: stochastically(wide, narrow)) <= 72
