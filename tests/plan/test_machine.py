"""The rates of a machine: what measuring them leaves behind."""

import weakref

import pytest
import torch

from lowmem import gpus
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


def test_a_card_with_a_name_has_its_own_rates(monkeypatch):
    """Also where another is here; a bare size has those of the one that is here, or else of the reference."""
    monkeypatch.setattr(machine, "measured", lambda name, device: machine.Machine(f"measured-{device}", {}, 1.0, 1.0))
    monkeypatch.setattr(machine, "_file", lambda name: machine.CACHE / "no such folder" / name)
    monkeypatch.setattr(machine.Machine, "save", lambda self: None)
    monkeypatch.setattr(machine, "_name", lambda on_card: "any")
    reference, size = gpus.named(gpus.REFERENCE).rates, gpus.card("12GiB")
    for here in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        for name in gpus.cards():
            found = machine.machine(True, gpus.card(name))
            assert found.flops == gpus.named(name).rates["flops"] and found.link == gpus.named(name).rates["link"]
        assert machine.machine(False, size).name == "measured-cpu"
        assert (machine.machine(True, size).name == "measured-cuda") == here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.machine(True, size).flops == machine.machine(True).flops == reference["flops"]
    fast = machine.machine(True, size, "tensorfloat32").flops
    assert fast == reference["flops"] | {"float32": reference["flops"]["tensorfloat32"]} != reference["flops"]
