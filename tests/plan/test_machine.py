"""Tests the rates of a machine, and what measuring them leaves behind."""

import json
import os
import re
import subprocess
import sys
import time
import weakref
from datetime import date, timedelta
from pathlib import Path

import pytest
import torch

from lowmem.config import cards
from lowmem.config.settle import run_of
from lowmem.plan.cost import machine, update_time
from lowmem.plan.job import resolved


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
    monkeypatch.setattr(machine, "fastest", lambda call, device: (call(), 1.0)[1])
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
    monkeypatch.setattr(machine, "others_compute", lambda device: True)
    monkeypatch.setattr(machine, "_name", lambda on_card: "any")
    reference, size = cards.named(cards.REFERENCE).rates, cards.card("12GiB")
    for here in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        for name in cards.cards():
            found = machine.machine(True, cards.card(name))
            assert found.flops == cards.named(name).rates["flops"] and found.link == cards.named(name).rates["link"]
            assert found.against == cards.named(name).rates["against"]
        assert machine.machine(False, size).name == "measured-cpu"
        assert (machine.machine(True, size).name == "measured-cuda") == here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.machine(True, size).flops == machine.machine(True).flops == reference["flops"]
    fast, slow = machine.machine(True, size, "tensorfloat32"), machine.machine(True, size)
    assert fast.rate("float32") == reference["flops"]["tensorfloat32"] > slow.rate("float32")


@pytest.mark.gpu
def test_rates_of_this_card_have_the_units_they_say():
    """The bounds hold for any card since 2018: operations and bytes per second, of the card and of its link."""
    found = machine.measured("a card", "cuda")
    assert all(1e12 < rate < 1e16 for rate in found.flops.values()), found.flops
    assert 1e11 < found.bandwidth < 1e13 and 1e9 < found.link < 1e12 and 0 < found.against <= 1
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def measurements(monkeypatch, tmp_path):
    """Replaces the measurement by a made-up machine, and counts how often it is measured."""
    made = []

    def measured(name, device):
        made.append(machine.Machine(name, {"float32": 1.0 + len(made)}, 1.0, 1.0))
        return made[-1]

    monkeypatch.setattr(machine, "CACHE", tmp_path / "rates")
    monkeypatch.setattr(machine, "measured", measured)
    monkeypatch.setattr(machine, "others_compute", lambda device: False)
    return made


def days_later(monkeypatch, days):
    class Later(date):
        @classmethod
        def today(cls):
            return date.today() + timedelta(days=days)

    monkeypatch.setattr(machine, "date", Later)


@pytest.mark.parametrize(("days", "again"), [(-1, True), (0, False), (6, False), (7, True), (400, True)])
def test_rates_are_kept_for_a_week(measurements, monkeypatch, days, again):
    first = machine.machine(False)
    (file,) = machine.CACHE.iterdir()
    said = json.loads(file.read_text())
    assert said["measured_on"] == date.today().isoformat()
    words = re.findall(r"\w+", machine.processor())
    for part in (f"{torch.get_num_threads()}-threads", f"torch-{torch.__version__}", *words):
        assert part in file.name
    days_later(monkeypatch, days)
    assert (machine.machine(False).flops != first.flops) == again and len(measurements) == 1 + again


@pytest.mark.parametrize("when", [("before",), ("after",)])
def test_what_was_measured_while_others_computed_is_used_and_not_kept(measurements, monkeypatch, when):
    answers = iter([True] if when == ("before",) else [False, True])
    monkeypatch.setattr(machine, "others_compute", lambda device: next(answers))
    assert machine.machine(False).flops == {"float32": 1.0} and not machine.CACHE.exists()
    monkeypatch.setattr(machine, "others_compute", lambda device: False)
    assert machine.machine(False).flops == machine.machine(False).flops == {"float32": 2.0}


@pytest.mark.parametrize(("had", "busy"), [(0.95, False), (0.5, True)])
def test_who_gets_half_of_a_processor_shares_it(monkeypatch, had, busy):
    """Beside made-up clocks: of every second this process has a part."""
    seconds, threads = iter(range(1000)), torch.get_num_threads()
    spent = []
    monkeypatch.setattr(time, "perf_counter", lambda: spent.append(float(next(seconds))) or spent[-1])
    monkeypatch.setattr(time, "process_time", lambda: had * threads * (spent[-1] if spent else 0.0))
    assert machine.others_compute("cpu") == busy


@pytest.mark.parametrize(
    "damage",
    [
        {"measured_on": None},
        {"measured_on": 20260101},
        {"measured_on": "yesterday"},
        {"measured_on": (date.today() + timedelta(days=1)).isoformat()},
        {"another": 1.0},
        {"bandwidth": "fast"},
        {"bandwidth": True},
        {"bandwidth": 0.0},
        {"overhead": -1.0},
        {"fresh": float("nan")},
        {"against": 0.0},
        {"flops": {"float32": float("inf")}},
        {"flops": {}},
        {"updates": {"any": 0.0}},
        {"runs": {"float32": 1.0}},
    ],
    ids=str,
)
def test_what_nobody_can_have_measured_is_not_read(measurements, damage):
    machine.machine(False)
    (file,) = machine.CACHE.iterdir()
    said = json.loads(file.read_text())
    assert machine.stored_rates(False) is not None
    file.write_text(json.dumps(said | damage))
    assert machine.stored_rates(False) is None
    assert machine.machine(False).flops == machine.stored_rates(False).flops == {"float32": 2.0}  # stored again


@pytest.mark.parametrize("said", [b"", b"[]", b"null", b"\xff", b'{"name": "any", "flops": {', b"[" * 100_000])
def test_nor_is_what_is_no_such_file(measurements, said):
    machine.machine(False)
    (file,) = machine.CACHE.iterdir()
    file.write_bytes(said)
    assert machine.stored_rates(False) is None and machine.machine(False).flops == {"float32": 2.0}


def test_a_folder_that_cannot_be_written_is_told_once(measurements, caplog):
    """A file stands where LOWMEM_RATES says, or above it."""
    machine.CACHE.write_text("a file")
    here = machine.machine(False)
    here.save()
    assert machine.stored_rates(False) is None and machine.CACHE.read_text() == "a file"
    assert len(caplog.records) == 1 and str(machine.CACHE) in caplog.text and "LOWMEM_RATES" in caplog.text


def test_so_is_one_that_may_only_be_read(measurements, monkeypatch, caplog):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    here = machine.machine(False)
    monkeypatch.setattr(machine, "TemporaryDirectory", refused)  # root, who may run tests, may write anywhere
    for _ in range(2):
        here.save()
    assert [record.message.count("Permission denied") for record in caplog.records] == [1]


def test_two_may_save_at_once(measurements, monkeypatch, caplog):
    """One saves all of it between what another writes and its rename: each has a draft of its own, and none is left."""
    here, write, meanwhile = machine.machine(False), Path.write_text, iter([True])

    def interrupted(path, text, encoding):
        write(path, text, encoding)
        if next(meanwhile, False):
            here.save()

    monkeypatch.setattr(Path, "write_text", interrupted)
    here.save()
    assert not caplog.records and next(meanwhile, None) is None
    assert machine.stored_rates(False).flops == here.flops and len(list(machine.CACHE.iterdir())) == 1


@pytest.mark.parametrize("busy", [(False, False), (True, False), (False, True)])
def test_an_update_that_was_timed_while_others_computed_is_used_and_never_kept(measurements, monkeypatch, busy):
    """Nor by what is saved later for another reason."""
    timings = []
    monkeypatch.setattr(update_time, "timed", lambda cfg: timings.append(1) or 3.0)
    monkeypatch.setattr(update_time, "counted", lambda here, cfg: 2.0)
    answers = iter(busy)
    monkeypatch.setattr(update_time, "others_compute", lambda device: next(answers))
    here, cfg = machine.machine(False), typed()
    assert not update_time.knows_update(here, cfg)
    assert [update_time.pace_of_update(here, cfg) for _ in range(2)] == [1.5, 1.5] and len(timings) == 1
    assert update_time.knows_update(here, cfg)
    here.save()
    assert update_time.knows_update(machine.stored_rates(False), cfg) != any(busy)


def test_updates_with_other_arguments_take_other_times():
    kind, fused = update_time._kind(typed()), update_time._kind(typed("optim.fused=false"))
    assert kind != fused and kind.startswith("torch.optim.AdamW") and len(kind) < 60
    assert kind == update_time._kind(typed("lr=1e-5")) == update_time._kind(typed("optim.in_backward=true"))
    assert (
        len({kind, fused, update_time._kind(typed("optim=sgd")), update_time._kind(typed("precision=bf16-master"))})
        == 4
    )


def typed(*lines):
    return resolved(run_of(["model=gpt2", "batch_size=1", "precision=32", "optim=adamw", *lines]), on_card=False)


@pytest.mark.process
@pytest.mark.parametrize(("said", "where"), [("rates", "rates"), ("", "~/.cache/lowmem"), ("~/mine", "~/mine")])
def test_rates_are_kept_where_a_variable_says(tmp_path, said, where):
    """Wherever the process goes later."""
    prints = "from lowmem.plan.cost.machine import CACHE; print(CACHE)"
    environment = os.environ | {"LOWMEM_RATES": said}
    line = [sys.executable, "-c", prints]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert Path(done.stdout.strip()) == tmp_path / Path(where).expanduser(), done.stderr
