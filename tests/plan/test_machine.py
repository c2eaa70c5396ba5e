"""Tests the roofline model, and how the rates of a machine are measured, stored and read."""

import json
import os
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowmem.config import cards
from lowmem.plan.cost import machine
from lowmem.plan.cost.machine import COMPUTE, MEMORY, Machine
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.traffic import Traffic
from lowmem.system.errors import Refused


@pytest.fixture
def measurements(monkeypatch, tmp_path):
    """Replaces the measurement by a stand-in. Yields a list that has one entry per measurement."""
    made = []

    def products(device):
        made.append(device)
        return {"float32": float(len(made)), "tensorfloat32": 8.0}

    monkeypatch.setattr(machine, "CACHE", tmp_path / "rates")
    monkeypatch.setattr(machine, "_products", products)
    monkeypatch.setattr(machine, "fastest", lambda call, on_card: 1.0)
    (clear := machine.measured.cache_clear)()
    yield made
    clear()


def file():
    (found,) = machine.CACHE.iterdir()
    return found


# --- the roofline -----------------------------------------------------------------------------------------------------


def test_predicted_operator_time_is_the_longer_of_compute_and_memory_traffic():
    rates = Machine("", {"float32": 100.0, "bfloat16": 400.0}, 10.0, 1.0)
    assert rates.operator(Work(torch.float32, 1000, 20)) == 10 + 1
    assert rates.operator(Work(torch.bfloat16, 1000, 20)) == 2.5 + 1
    assert rates.operator(Work(torch.float32, 0, 20)) == 2 + 1


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float64", "int64"])
def test_predicted_time_of_matmuls_in_a_dtype_without_a_known_rate_is_refused(name):
    rates = Machine("a card", {"float32": 1e12}, 10.0, 1.0)
    with pytest.raises(Refused, match=f"of a card is known for float32, but .* matrices in {name},.*search=false"):
        rates.operator(Work(getattr(torch, name), 10**12, 0))
    assert rates.operator(Work(getattr(torch, name), 0, 20)) == 2 + 1  # memory traffic needs no matmul rate


def test_predicted_exchange_overlaps_links_inside_and_between_nodes():
    rates = Machine("", {}, 100.0)
    assert rates.exchange(Traffic(200, 300)) == 3.0
    assert replace(rates, peer=10.0).exchange(Traffic(200, 300)) == 30.0
    assert replace(rates, peer=10.0, network=50.0).exchange(Traffic(200, 300)) == 20.0


# --- rates ------------------------------------------------------------------------------------------------------------


def test_named_card_has_published_rates_even_if_another_card_is_present(measurements, monkeypatch):
    """A card given as a size has the rates of the present card, or of the reference card if no card is present."""
    monkeypatch.setattr(machine, "measured", lambda on_card: Machine(f"measured {on_card}", {"float32": 1.0}, 1.0))
    for here in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        monkeypatch.setattr(machine, "_name", lambda on_card: f"any {on_card}")
        for name, section in cards.cards().items():
            found = machine.machine(True, cards.card(name))
            flops = {dtype: COMPUTE * 1e12 * rate for dtype, rate in section["tflops"].items()}
            assert found.flops == pytest.approx(flops)
            assert found.bandwidth == pytest.approx(MEMORY * 1e9 * section["bandwidth"])
            assert found.link == (1e9 * section["link"], 1e9 * section["link"], section["duplex"])
            assert found.host.name == "measured False"
        assert machine.machine(False, cards.card("12GiB")).name == "measured False"
        assert machine.machine(True, cards.card("12GiB")).name == ("measured True" if here else cards.REFERENCE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    slow, fast = (machine.machine(True, products=products) for products in ("float32", "tensorfloat32"))
    assert fast.rate("float32") == slow.rate("tensorfloat32") > slow.rate("float32")


@pytest.mark.gpu
def test_measured_rates_of_a_card_are_within_the_bounds_of_cards_since_2018_and_stored(monkeypatch, tmp_path):
    """Rates are in FLOP/s and bytes/s."""
    monkeypatch.setattr(machine, "CACHE", tmp_path)
    machine.measured.cache_clear()
    found = machine.measured(on_card=True)
    assert all(1e12 < rate < 1e16 for rate in found.flops.values()), found.flops
    assert 1e11 < found.bandwidth < 1e13 and all(1e9 < rate < 1e12 for rate in found.link[:2])
    assert torch.get_float32_matmul_precision() == "highest"
    assert machine.stored_rates(on_card=True) == found


@pytest.mark.parametrize("kept", [False, True])
def test_measuring_rates_frees_its_card_memory_unless_a_reference_to_the_tensor_remains(
    measurements, monkeypatch, kept
):
    """`empty_cache` can release only memory that no tensor uses. In the wrong variant (kept), a reference to the
    measured tensor remains."""
    ones, made, held, given_back = torch.ones, [], [], []

    def watched(*shape, device):
        made.append(weakref.ref(found := ones(*shape)))
        held.extend([found] if kept else [])
        return found

    monkeypatch.setattr(torch, "ones", watched)
    monkeypatch.setattr(torch, "empty", lambda shape, pin_memory: ones(shape))
    monkeypatch.setattr(machine, "_name", lambda on_card: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(all(one() is None for one in made)))
    found = machine.measured(on_card=True)
    assert found.name == "a card" and found.bandwidth == 2 * found.link.up > 0
    assert len(made) == 1 and given_back == [not kept]


def test_cpu_rates_are_measured_once_and_stored(measurements):
    first = machine.machine(False)
    words = (
        f"{torch.get_num_threads()}-threads",
        f"torch-{torch.__version__}",
        *re.findall(r"\w+", machine.processor()),
    )
    assert all(word in file().name for word in words)
    assert machine.machine(False) == first and measurements == ["cpu"]
    machine.measured.cache_clear()  # as in another process
    assert machine.machine(False) == first and measurements == ["cpu"]


@pytest.mark.parametrize(("days", "kept"), [(-1, False), (0, True), (6, True), (7, False), (400, False)])
def test_stored_rates_expire_after_a_week(measurements, days, kept):
    machine.machine(False)
    day = time.time() - days * 24 * 3600 - 60
    os.utime(file(), (day, day))
    assert (machine.stored_rates(False) is not None) == kept


@pytest.mark.parametrize(
    "damage",
    [
        *({"another": 1.0}, {"bandwidth": "fast"}, {"bandwidth": True}, {"bandwidth": 0.0}, {"launch": -1.0}),
        *({"peer": float("nan")}, {"link": [1.0, 1.0]}, {"flops": {"float32": float("inf")}}, {"flops": {}}),
        *(b"", b"[]", b"null", b"\xff", b'{"name": "any", "flops": {', b"[" * 100_000),
    ],
    ids=lambda damage: str(damage)[:30],
)
def test_implausible_stored_rates_are_measured_again(measurements, damage):
    machine.machine(False)
    whole = json.loads(file().read_text())
    assert machine.stored_rates(False) is not None
    file().write_bytes(damage if isinstance(damage, bytes) else json.dumps(whole | damage).encode())
    assert machine.stored_rates(False) is None
    machine.measured.cache_clear()
    machine.machine(False)
    assert len(measurements) == 2 and machine.stored_rates(False) is not None


def test_unwritable_rates_folder_does_not_stop_a_plan(measurements):
    machine.CACHE.write_text("a file")
    assert machine.machine(False) == machine.machine(False) and measurements == ["cpu"]
    assert machine.stored_rates(False) is None and machine.CACHE.read_text() == "a file"


def test_two_processes_that_store_rates_concurrently_leave_one_valid_file(measurements, monkeypatch):
    """A second process stores its rates after the first has written its temporary file and before the first renames
    this file."""
    here = Machine("any", {"float32": 1.0}, 1.0, link=cards.LinkBandwidth(2.0, 3.0, 0.5))
    write, pid, others = Path.write_text, os.getpid(), iter([1])

    def interrupted(path, text, encoding):
        write(path, text, encoding)
        if other := next(others, 0):
            monkeypatch.setattr(os, "getpid", lambda: pid + other)
            machine.store(here, False)
            monkeypatch.setattr(os, "getpid", lambda: pid)

    monkeypatch.setattr(Path, "write_text", interrupted)
    machine.store(here, False)
    assert machine.stored_rates(False) == here and next(others, None) is None and file().suffix == ".json"


@pytest.mark.process
@pytest.mark.parametrize(("said", "where"), [("rates", "rates"), ("", "~/.cache/lowmem"), ("~/mine", "~/mine")])
def test_environment_variable_lowmem_rates_sets_the_folder_of_stored_rates(tmp_path, said, where):
    """A relative folder is resolved against the working directory in which the process starts."""
    prints = "from lowmem.plan.cost.machine import CACHE; print(CACHE)"
    environment = os.environ | {"LOWMEM_RATES": said}
    line = [sys.executable, "-c", prints]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert Path(done.stdout.strip()) == tmp_path / Path(where).expanduser(), done.stderr
