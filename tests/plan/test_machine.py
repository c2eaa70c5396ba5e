"""The rates of a machine: what measuring them leaves behind."""

import weakref

import pytest
import torch

from lowmem.plan import machine


@pytest.mark.parametrize("kept", [False, True])
def test_what_was_measured_with_is_given_back_to_the_card(monkeypatch, kept):
    """Beside a stand-in for CUDA's allocator, which can give back only what nobody holds. Kept: the wrong variant."""
    rates, ones, made, held, given_back = machine._rates, torch.ones, [], [], []

    def watched(*args, **kwargs):
        found = ones(*args, **kwargs)
        made.append(weakref.ref(found))
        held.extend([found] if kept else [])
        return found

    monkeypatch.setattr(torch, "ones", watched)
    monkeypatch.setattr(machine, "_seconds", lambda call, device: (call(), 1.0)[1])
    monkeypatch.setattr(machine, "_rates", lambda device: rates("cpu"))
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: given_back.append(not any(one() is not None for one in made))
    )
    found = machine.measured("a card", "cuda")
    assert found.name == "a card" and found.flops.keys() == machine.DTYPES.keys() and found.bandwidth > 0
    assert len(made) == 2 and given_back == [not kept]
    machine.measured("no card", "cpu")
    assert len(given_back) == 1
