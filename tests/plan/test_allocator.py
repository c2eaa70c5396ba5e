"""Tests the model of PyTorch's CUDA caching allocator: how much memory it reserves."""

import random

import pytest

from lowmem.plan.cost.allocator import Allocator, Full, from_the_start, replay, smallest_limit

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
def test_simulated_allocation_size_decides_the_size_of_the_reserved_segment(size, reserved):
    assert replay([(0, size)]).reserved == reserved


def test_simulated_allocation_requests_are_rounded_up_to_512_bytes():
    assert replay([(0, 1), (1, 513)]).allocated_peak == 512 + 1024


def test_simulated_allocator_reuses_freed_memory_that_stays_reserved():
    events = [(0, 12 * MIB), (0, -12 * MIB), (1, 12 * MIB), (1, -12 * MIB)]
    assert replay(events).reserved == 12 * MIB
    assert replay([(0, 12 * MIB), (0, -12 * MIB), (1, 14 * MIB)]).reserved == 26 * MIB  # 12 MiB are too small for 14


def test_simulated_allocator_merges_adjacent_free_blocks_to_serve_a_larger_request():
    allocator = Allocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]  # in one segment of 20 MiB
    assert allocator.reserved == 20 * MIB
    allocator.release(parts[1])
    allocator.release(parts[3])
    allocator.release(parts[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB and allocator.allocated == 14 * MIB


def test_simulated_allocator_cannot_serve_a_large_request_from_fragmented_memory():
    allocator = Allocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.release(parts[0])
    allocator.release(parts[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 40 * MIB


def test_simulated_allocator_uses_the_smallest_sufficient_free_block():
    allocator = Allocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.release(large)
    allocator.release(small)
    allocator.allocate(20 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 60 * MIB


# each freed segment is too small for the next request
GROWING = [(0, 40 * MIB), (0, -40 * MIB), (1, 42 * MIB), (1, -42 * MIB), (2, 44 * MIB)]


def test_simulated_full_card_releases_unused_segments_before_out_of_memory():
    assert replay(GROWING).reserved == 126 * MIB
    assert smallest_limit(GROWING) == 44 * MIB == replay(GROWING, 44 * MIB).reserved
    with pytest.raises(Full):
        replay(GROWING, 42 * MIB)


def test_simulated_allocator_does_not_release_a_partly_used_segment():
    events = [(0, 5 * MIB), (1, 5 * MIB), (0, -5 * MIB), (2, 30 * MIB)]  # tensor 1 keeps the segment of 20 MiB in use
    assert smallest_limit(events) == 50 * MIB
    assert smallest_limit([*events[:3], (1, -5 * MIB), *events[3:]]) == 30 * MIB


def test_simulated_allocator_that_releases_no_segments_needs_more_memory(monkeypatch):
    """In the wrong variant, a full card does not release its unused segments."""
    monkeypatch.setattr(Allocator, "_give_back", lambda self: None)
    assert smallest_limit(GROWING) == 126 * MIB


def test_simulated_allocations_fit_in_the_smallest_memory_limit_and_not_in_2_mib_less():
    draw = random.Random(0)
    events, live = [], []
    for serial in range(400):
        size = draw.choice([1000, MIB // 2, 3 * MIB, 17 * MIB, 60 * MIB])
        events.append((serial, size))
        live.append((serial, -size))
        while len(live) > 12:
            events.append(live.pop(draw.randrange(len(live))))
    limit = smallest_limit(events)
    assert replay(events).allocated_peak <= limit < replay(events).reserved
    assert replay(events, limit).reserved_peak <= limit
    with pytest.raises(Full):
        replay(events, limit - 2 * MIB)


def test_replay_from_the_start_adds_a_first_step_with_workspaces_before_the_optimizer_state():
    weight, state, activation, gradient = (0, 30), (1, 20), (2, 50), (3, 30)
    died = [(serial, -size) for serial, size in (activation, gradient)]
    later = [weight, state, activation, gradient, *died]
    found = from_the_start(later, existing=2, weights=30, workspaces={0: 8, 1: 9})
    first = [(("first", serial), size) for serial, size in (activation, gradient, *died)]
    workspaces = [(("workspace", number), size) for number, size in ((0, 8), (1, 9))]
    assert found == [weight, workspaces[0], first[0], workspaces[1], *first[1:], state, *later[2:]]
    assert replay(found).allocated == replay(later[:2]).allocated + replay(workspaces).allocated
