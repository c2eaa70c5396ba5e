"""Tests how much of a card's memory a run can use, for cards given by name and by size. The CUDA context must be
counted once."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from conftest import ROOT
from lowmem.command import help
from lowmem.config import cards
from lowmem.plan import at_start
from lowmem.plan.column import DeviceBytes, DriveBytes, HostBytes
from lowmem.plan.prediction import PHASES, Need, Prediction
from lowmem.plan.target import Target
from lowmem.system.errors import Refused
from lowmem.system.units import GIB, MIB

NAMES = ["rtx3060", "rtx4060ti-16gb", "rtx4090", "rtx5090", "a10g", "t4", "a100-40gb", "a100-80gb", "h100", "h200"]
FIELDS = {"total_gib", "context_mib", "tflops", "bandwidth", "link", "duplex", "peer", "network"}
FIELDS |= {"capability", "source"}
PRODUCTS = {"float32", "tensorfloat32", "bfloat16", "float16"}


@pytest.mark.parametrize("name", NAMES)
def test_known_card_has_all_fields_with_positive_rates_and_a_source_url(name):
    said = cards.cards()[name]
    assert said.keys() == FIELDS and said["tflops"].keys() == PRODUCTS and said["source"].startswith("https://")
    assert (
        all(rate > 0 for rate in said["tflops"].values())
        and min(said[key] for key in ("bandwidth", "link", "duplex", "peer", "network")) > 0
    )
    assert said["duplex"] <= 1
    card = cards.card(name)
    assert card.size == round(said["total_gib"] * GIB)
    assert card.context_bytes - cards.LATER == said["context_mib"] * MIB and 0.1 * GIB < card.context_bytes < GIB
    assert card.multiplies("bfloat16") == (name != "t4")
    assert all(map(card.multiplies, ("float32", "tensorfloat32", "float16")))


def test_names_of_all_known_cards_are_in_the_help_of_gpu_and_on_the_cards_page():
    assert set(cards.cards()) == set(NAMES)
    comment = help.comments(ROOT / "conf" / "plan.yaml")["gpu"]
    assert all(name in comment and name in (ROOT / "docs" / "cards.md").read_text() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_usable_memory_of_a_card_is_90_to_100_percent_of_its_nominal_memory(name):
    sold = {"rtx3060": 12, "rtx4090": 24, "rtx5090": 32, "a10g": 24, "t4": 16, "h100": 80, "h200": 141}
    sold = sold.get(name) or int(name.partition("-")[2].removesuffix("gb"))
    assert 0.9 * sold < cards.card(name).size / GIB < sold


def test_card_given_as_12gib_keeps_2_percent_free_and_assumes_half_a_gib_of_cuda_context():
    card = cards.card("12GiB")
    assert card.size == round(0.98 * 12 * GIB) and card.context_bytes == GIB // 2
    assert card.rates is None and card.multiplies("bfloat16") and cards.card(None) is None


@pytest.mark.parametrize(
    ("word", "first"),
    [("rtx3070", "rtx3060"), ("RTX 4090", "rtx4090"), ("a100", "a100-"), ("4060ti", "rtx4060ti-16gb"), ("H10", "h100")],
)
def test_nearest_card_name_is_suggested_first(word, first):
    found = cards.nearest(word)
    assert found[0].startswith(first) and sorted(found) == sorted(NAMES)


# --- the context is counted once -------------------------------------------------------------------------------------


def predicted(reserved, context_bytes):
    """Returns a prediction in which torch reserves `reserved` bytes and the CUDA context takes `context_bytes`."""
    phases = {name: Need(reserved, GIB) for name in PHASES}
    device, host = DeviceBytes("step", activations=reserved, context=context_bytes), HostBytes("step", libraries=GIB)
    return Prediction(phases, device, host, DriveBytes(), reserved, 1, True)


RECIPE = round(11.12 * GIB)  # bytes that torch reserves for a made-up recipe that nearly fills an rtx3060


def test_run_fits_a_card_if_reserved_memory_and_cuda_context_do_not_exceed_its_size():
    card = cards.card("rtx3060")
    assert predicted(RECIPE, card.context_bytes).fits(Target(True, card))
    assert predicted(card.size - card.context_bytes, card.context_bytes).fits(Target(True, card))
    assert not predicted(card.size - card.context_bytes + 1, card.context_bytes).fits(Target(True, card))


@pytest.mark.parametrize("twice", [False, True])
def test_run_fits_the_free_memory_of_a_present_card_unless_a_second_cuda_context_is_added(monkeypatch, config, twice):
    """The CUDA context already takes 0.3 GiB of 11.75 GiB, and the recipe fits in the rest. Wrong on purpose
    (twice=True): the prediction contains a second context."""
    free = round((11.75 - 0.3) * GIB)
    made_up(monkeypatch, free)
    cfg = config("device=cuda", "plan=check")
    context = cards.CONTEXT if twice else 0
    monkeypatch.setattr(at_start, "predict", lambda _, target, __: predicted(RECIPE, target.context_bytes + context))
    monkeypatch.setattr(at_start, "_host", lambda: 64 * GIB)
    monkeypatch.setattr(at_start, "_does_not_fit", lambda *_: "it does not fit")
    assert at_start.could_fit(cfg) != twice
    if twice:
        with pytest.raises(Refused, match="it does not fit"):
            at_start.checked(cfg, [])
    else:
        assert at_start.checked(cfg, []).device.total <= free


def made_up(monkeypatch, free, capability=(8, 6)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 12 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_memory_limit_caps_the_free_memory_of_the_present_card_before_the_cuda_context(monkeypatch, config):
    made_up(monkeypatch, 11 * GIB)
    of_card, capped, above = (
        at_start._free(config("device=cuda", *typed)) for typed in ((), ("memory.limit=8GiB",), ("memory.limit=12GiB",))
    )
    assert (of_card.size, capped.size, above.size) == (11 * GIB, 8 * GIB, 11 * GIB)
    assert of_card.context_bytes == capped.context_bytes == cards.LATER < 0.2 * GIB
    assert at_start._free(config("memory.limit=8GiB")) == cards.Card(8 * GIB, "memory.limit")
    assert at_start._free(config()) is None


def test_present_card_multiplies_bfloat16_with_capability_12_0_but_not_with_7_5(monkeypatch):
    made_up(monkeypatch, GIB, (7, 5))
    assert not cards.here().multiplies("bfloat16") and cards.here().multiplies("float16")
    made_up(monkeypatch, GIB, (12, 0))
    for known in (cards.here(), replace(cards.here(), capability=None)):
        assert known.multiplies("bfloat16")
        with pytest.raises(Refused, match="Add float8_e4m3fn to MULTIPLIES"):
            known.multiplies("float8_e4m3fn")


def test_query_of_the_present_card_without_cuda_is_refused_with_gpu_size_advice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match=r"this machine has no CUDA card.*Type gpu=12GiB"):
        cards.here()


# --- typed values ----------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "line", "says"),
    [
        ("plan.py", "gpu=abc", "gpu=abc: give a size such as 12GiB"),
        ("plan.py", "gpu=0GiB", "gpu=0GiB: give a size such as 12GiB"),
        ("plan.py", "gpu=rtx3070", "or a card: rtx3060, "),
        ("plan.py", "rows=-1", "rows=-1: give a whole number of at least 1."),
        ("train.py", "plan=rtx3070", "or a card: rtx3060, "),
    ],
)
def test_invalid_gpu_rows_or_plan_value_is_refused_before_torch_is_imported(script, line, says):
    """A refused command imports about 470 modules. The limit of 600 modules also excludes heavy packages other than
    torch."""
    command = [sys.executable, "-X", "importtime", script, line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=240)
    imported = [row for row in done.stderr.splitlines() if row.startswith("import time:")]
    said = "\n".join(row for row in done.stderr.splitlines() if row not in imported)
    assert done.returncode != 0 and says in " ".join(said.split()) and "Traceback" not in said
    assert " torch\n" not in done.stderr and len(imported) < 600
