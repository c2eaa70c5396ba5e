"""CUDA's caching allocator: what it reserves, by its own rules."""

import pytest

from lowmem.plan.allocator import Allocator, replay

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_segments(size, reserved):
    assert replay([(0, size)]).reserved == reserved


def test_requests_are_rounded_to_512_bytes():
    assert replay([(0, 1), (1, 513)]).allocated_peak == 512 + 1024


def test_freed_memory_is_used_again_and_stays_reserved():
    events = [(0, 12 * MIB), (0, -12 * MIB), (1, 12 * MIB), (1, -12 * MIB)]
    assert replay(events).reserved == 12 * MIB
    assert replay([(0, 12 * MIB), (0, -12 * MIB), (1, 14 * MIB)]).reserved == 26 * MIB  # too small for it


def test_neighbours_merge():
    allocator = Allocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]  # one segment of 20
    assert allocator.reserved == 20 * MIB
    allocator.release(parts[1])
    allocator.release(parts[3])
    allocator.release(parts[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB and allocator.allocated == 14 * MIB


def test_what_is_scattered_cannot_be_used_for_something_large():
    allocator = Allocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.release(parts[0])
    allocator.release(parts[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 40 * MIB


def test_the_best_fit_is_taken():
    allocator = Allocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.release(large)
    allocator.release(small)
    allocator.allocate(20 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 60 * MIB
