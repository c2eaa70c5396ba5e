"""Tests that random states are captured, seeded, forked and restored."""

import pytest
import torch

from devices import each_device
from lowmem.system.random_state import captured, forked, restored, seeded

CPU = torch.device("cpu")


def drawn(device) -> torch.Tensor:
    return torch.cat([torch.rand(2), torch.rand(2, device=device).cpu()])


@each_device
def test_restored_random_states_draw_the_numbers_drawn_after_their_capture(device):
    states = captured(torch.device(device))
    first = drawn(device)
    assert not torch.equal(drawn(device), first)
    restored(states, torch.device(device))
    assert torch.equal(drawn(device), first)


def test_random_states_of_missing_devices_are_skipped():
    states = captured(CPU)
    first = torch.rand(3)
    restored([*states, torch.zeros(16, dtype=torch.uint8)], CPU)
    assert torch.equal(torch.rand(3), first)


@each_device
def test_seeded_states_draw_the_numbers_of_manual_seed_and_change_no_generator(device):
    before = captured(torch.device(device))
    states = seeded(7, torch.device(device))
    assert all(map(torch.equal, captured(torch.device(device)), before))
    with forked(torch.device(device), states):
        found = drawn(device)
    torch.manual_seed(7)
    assert torch.equal(drawn(device), found)


@each_device
def test_forked_random_state_is_restored_even_after_an_error(device):
    before = captured(torch.device(device))
    with pytest.raises(ValueError, match="odd"), forked(torch.device(device)):
        drawn(device)
        raise ValueError("odd")
    assert all(map(torch.equal, captured(torch.device(device)), before))
