"""Tests that each micro-batch of a window draws the same random numbers in whatever order the micro-batches draw."""

import torch
from torch import Tensor

from lowmem.offload.micro_batches import Generators
from lowmem.system.random_state import captured

CPU = torch.device("cpu")


def drawn(count, order=None) -> list[Tensor]:
    """Draws three numbers twice in each micro-batch, and once after the window. Returns the numbers of each micro-batch
    (6,), then those after the window (3,). Args: order: indices of micro-batches, each twice, in the order of the
    draws; None: one micro-batch after the other."""
    numbers = [[] for _ in range(count)]
    generators = Generators.of_window(CPU, count)
    for number in order or [number for number in range(count) for _ in range(2)]:
        generators.resume(number)
        numbers[number].append(torch.rand(3))
        generators.pause(number)
    generators.resume(0)
    return [torch.cat(each) for each in numbers] + [torch.rand(3)]


def test_micro_batches_draw_equal_random_numbers_in_any_order():
    torch.manual_seed(3)
    right = drawn(3)
    for order in ([0, 1, 2, 0, 1, 2], [2, 1, 0, 0, 1, 2]):
        torch.manual_seed(3)
        assert all(map(torch.equal, drawn(3, order), right))
    assert len({tuple(each[:3].tolist()) for each in right}) == 4


def test_first_micro_batch_and_code_after_the_window_draw_the_numbers_of_a_plain_run():
    torch.manual_seed(3)
    alone = torch.rand(9)
    for count in (1, 3):
        torch.manual_seed(3)
        first, *_, after = drawn(count)
        assert torch.equal(torch.cat([first, after]), alone)


def test_second_window_draws_other_random_numbers_than_the_first():
    one, other = drawn(3), drawn(3)
    assert not any(torch.equal(a, b) for a in one for b in other)


def test_window_without_draws_leaves_the_random_generator_unchanged():
    before, generators = captured(CPU), Generators.of_window(CPU, 3)
    for number in range(3):
        generators.resume(number)
        generators.pause(number)
    generators.resume(0)
    assert torch.equal(captured(CPU)[0], before[0])


def test_micro_batch_seeds_leave_the_initial_seed_of_the_run_unchanged():
    torch.manual_seed(5)
    drawn(3)
    assert torch.initial_seed() == 5
