"""Tests learning-rate schedules step by step."""

import math

import pytest
import torch

from lowmem.techniques import scheduler


def rates(make, steps, **arguments):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule, seen = make(optimizer, **arguments), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_constant_schedule_warms_up_to_lr_with_a_first_step_above_zero():
    assert rates(scheduler.constant, 6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_schedule_falls_to_zero_at_total_steps():
    assert rates(scheduler.linear, 7, warmup_steps=2, total_steps=6) == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0]


def test_cosine_schedule_falls_to_zero_along_half_a_wave():
    expected = [1 + math.cos(math.pi * s / 8) for s in range(9)]
    assert rates(scheduler.cosine, 9, warmup_steps=0, total_steps=8) == pytest.approx(expected)
    assert rates(scheduler.cosine, 20, warmup_steps=0, total_steps=8)[-1] == 0.0


def test_learning_rate_of_a_run_shorter_than_its_warm_up_only_rises():
    assert rates(scheduler.cosine, 3, warmup_steps=4, total_steps=2) == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("make", [scheduler.constant, scheduler.linear, scheduler.cosine])
def test_warm_up_as_a_share_of_total_steps_equals_warm_up_in_steps_and_has_priority(make):
    by_share = rates(make, 40, warmup_steps=7, warmup=0.25, total_steps=40)
    assert by_share == rates(make, 40, warmup_steps=10, total_steps=40)
    assert by_share != rates(make, 40, warmup_steps=7, total_steps=40)  # the share has priority over warmup_steps
    assert rates(make, 40, warmup_steps=7, warmup=0.0, total_steps=40)[0] == 2.0


@pytest.mark.parametrize("lr", [2.0, torch.tensor(2.0)], ids=["a number", "a tensor"])
def test_resumed_schedule_uses_the_new_lr_and_length_from_the_first_step(lr):
    """torch restores the old lr, which the schedule must replace at once. If lr is a tensor, as in torchao, the
    schedule writes the new value into this tensor."""

    def made(lr, total):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        return optimizer, scheduler.linear(optimizer, warmup_steps=0, total_steps=total)

    optimizer, schedule = made(1.0, 4)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    longer, resumed = made(lr, 8)
    longer.load_state_dict(optimizer.state_dict())
    if isinstance(lr, torch.Tensor):
        longer.param_groups[0]["lr"] = held = torch.tensor(0.0)
    resumed.load_state_dict(schedule.state_dict())
    assert float(longer.param_groups[0]["lr"]) == 1.0 == float(resumed.get_last_lr()[0])
    assert not isinstance(lr, torch.Tensor) or longer.param_groups[0]["lr"] is held
    longer.step()
    resumed.step()
    assert float(longer.param_groups[0]["lr"]) == 0.75 == resumed.at(5)
