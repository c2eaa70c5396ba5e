"""Tests the columns of a memory prediction: rows add up to the sum in bytes and as printed, and the sum is the memory
that the allocator and the host need."""

import random
import re
from dataclasses import fields, replace

import pytest
from test_by_hand import (
    FEW,
    GPT2,
    LLAMA,
    MASTERS,
    adafactor_state,
    adafactor_step,
    agree,
    gpt2,
    gpt2_parameters,
    gpt2_peak,
    gpt2_state,
    llama,
    llama_backward_peak,
    llama_shapes,
    llama_weights,
)

from lowmem.config import cards
from lowmem.offload.link import SLOT_BYTES, SLOTS
from lowmem.plan import column, table
from lowmem.plan.column import DeviceBytes, DriveBytes, HostBytes
from lowmem.plan.cost import allocator
from lowmem.plan.prediction import PHASES, needs, predict
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import trace
from lowmem.system.units import CATEGORIES, GIB, HOST_CATEGORIES

CARD = Target(True, cards.card("12GiB"), 64 * GIB)
CPU = Target(on_card=False)


def printed(lines: list[str]) -> tuple[list[int], int]:
    """Returns the thousandths of a GiB in each printed row of a column, and in its printed sum."""
    _, *rows, rule, total = (line.replace(",", "") for line in lines)
    assert re.fullmatch(r" *-+", rule)
    size = lambda line: round(1000 * float(line.split()[-1]))  # noqa: E731
    return [size(row) for row in rows], size(total)


def random_column(draw: random.Random) -> DeviceBytes:
    names = [field.name for field in fields(DeviceBytes) if field.name != "phase"]
    sizes = {name: draw.choice((0, draw.randrange(4 * GIB), draw.randrange(GIB // 900))) for name in names}
    return DeviceBytes("step", **sizes)


@pytest.mark.parametrize("seed", range(20))
def test_printed_rows_of_a_memory_column_add_up_to_the_printed_sum(seed):
    shown = random_column(random.Random(seed))
    lines = column.lines(shown, "device", "card")
    rows, total = printed(lines)
    assert sum(rows) == total == round(1000 * shown.total / GIB) and all(rows)
    by_name = {line[2:42].strip(): row for line, row in zip(lines[1:-2], rows, strict=True)}
    for name, size in shown.rows.items():
        assert abs(by_name.get(column.LABELS[name], 0) - 1000 * size / GIB) < 1


def test_independently_rounded_memory_rows_do_not_add_up_to_the_rounded_sum():
    """In the wrong variant, each row is rounded on its own, so 3 x 0.0004 GiB disappear."""
    size = round(0.0004 * GIB)
    thirds = DeviceBytes("step", weights=GIB + size, gradients=GIB + size, optimizer=GIB + size)
    assert sum(round(1000 * size / GIB) for size in thirds.rows.values()) != round(1000 * thirds.total / GIB)
    rows, total = printed(column.lines(thirds, "device", "card"))
    assert sum(rows) == total


def test_memory_column_fits_80_characters_and_every_row_has_a_label():
    for kind in (DeviceBytes, HostBytes, DriveBytes):
        names = [field.name for field in fields(kind) if field.name != "phase"]
        made = kind(*(["step"] if kind is not DriveBytes else []), **dict.fromkeys(names, 200 * GIB))
        shown = column.lines(made, "device, highest in evaluation", "the smallest card that works")
        assert len(shown) == len(names) + 3 and max(map(len, shown)) <= 80
    assert {*CATEGORIES, *HOST_CATEGORIES} <= column.LABELS.keys()


RUNS = {
    "as shipped": (),
    "masters": ("precision=bf16-master", "optim=adamw8bit"),
    "offload": ("gradient_checkpointing=offload", "precision=bf16"),
    "paged": ("optim=paged_adamw8bit",),
}


@pytest.mark.parametrize("target", [CARD, CPU], ids=["card", "cpu"])
@pytest.mark.parametrize("name", RUNS)
def test_memory_columns_add_up_to_the_traced_memory(config, name, target):
    """On a card, the device column is the sum of three terms: the smallest allocator limit with which the run succeeds,
    the CUDA context, and the gradients in flight."""
    cfg = config(*RUNS[name]).resolved()
    traced = trace(cfg, target.on_card)
    found = needs(traced, cfg, target, libraries=GIB)
    device, host, point = found.device, found.host, traced.phases[found.device.phase]
    tensors = device.weights + device.gradients + device.optimizer + device.activations + device.temporaries
    assert tensors - point.total == (traced.unseen if device.phase == "step" and target.on_card else 0)
    assert host.total == max(need.host for need in found.phases.values())
    assert host.phase == max(PHASES, key=lambda phase: found.phases[phase].host) and host.libraries == GIB
    assert min(*device.rows.values(), *host.rows.values()) >= 0
    if target.on_card:
        least = allocator.smallest_limit(traced.events)
        assert device.total - device.context - device.in_flight == least
        assert device.workspaces == traced.workspace and device.context == cards.CONTEXT
    else:
        assert device.total == point.total == found.allocated
        assert host.total - host.libraries - host.threads == device.total + point.host


def test_omitting_a_memory_row_changes_the_sum_and_the_verdict_that_a_run_does_not_fit(config):
    """The wrong variants omit each row of the columns in turn."""
    found = predict(config("precision=bf16-master").resolved(), CARD)
    for whole in (found.device, found.host):
        for name, size in whole.rows.items():
            assert (replace(whole, **{name: 0}).total == whole.total) == (size == 0)
    for name in ("weights", "activations", "workspaces", "context"):
        assert replace(found, device=replace(found.device, **{name: 0})).fits(small(found))
    assert not found.fits(small(found))


def small(found) -> Target:
    """Returns a target whose card is one byte too small for the prediction."""
    return Target(True, cards.Card(found.device.total - 1, "made up"), None)


def test_json_and_table_of_a_prediction_have_equal_totals(config):
    found = predict(config("precision=bf16-master").resolved(), CARD)
    stored = found.as_dict()
    assert stored["device"]["total"] == sum(found.device.rows.values()) == found.device.total
    assert {"phase", "total", *found.host.rows} == set(stored["host"])
    said = table.of_prediction(found, CARD)
    assert max(map(len, said.partition("Needs a")[0].splitlines())) <= 80
    assert f"{found.device.total / GIB:.3f}" in said and f"{found.host.total / GIB:.3f}" in said


# --- the recipes of test_by_hand.py ---------------------------------------------------------------------------------

LIBRARIES = 100
BESIDE = {"workspaces": 2 * cards.WORKSPACE, "context": cards.CONTEXT}  # further rows of a card


def columns(cfg, target):
    cfg = cfg.resolved()
    return needs(trace(cfg, target.on_card), cfg, target, LIBRARIES)


def rows_agree(column, **derived):
    """Returns whether each row of the column equals its value in `derived` (0 if absent) up to a few scalars. The row
    `fragments` is ignored."""
    rows = {name: size for name, size in column.rows.items() if name != "fragments"}
    return all(agree(size, derived.get(name, 0)) for name, size in rows.items())


def test_device_and_host_memory_columns_of_gpt2_equal_the_hand_derived_formula(config):
    found, state = columns(gpt2(config), CARD), gpt2_state(GPT2)
    weights, kept = (
        4 * gpt2_parameters(GPT2),
        gpt2_peak(GPT2) - 4 * gpt2_parameters(GPT2) - state,
    )
    assert found.device.phase == "backward"
    assert rows_agree(found.device, weights=weights, optimizer=state, activations=kept, **BESIDE)
    assert not rows_agree(found.device, weights=weights, optimizer=state, **BESIDE)  # wrong: a row left out
    assert found.host.phase == "save"  # the export is a copy in host memory
    threads = {"threads": found.host.threads, "libraries": LIBRARIES}
    assert rows_agree(found.host, temporaries=weights, cuda=GIB, **threads)


@pytest.mark.parametrize("on_card", [True, False])
def test_memory_columns_of_host_masters_equal_the_hand_derived_formula(config, on_card):
    """On a CPU the host's column also has the rows of the device."""
    found = columns(llama(config, LLAMA, *MASTERS, "optim=adamw"), CARD if on_card else Target(False))
    parameters = (llama_weights(LLAMA) - 2 * 4 * (LLAMA.D // 2)) // 2
    tensors = (
        llama_weights(LLAMA),
        llama_backward_peak(LLAMA) - llama_weights(LLAMA),
    )
    device = dict(zip(("weights", "activations"), tensors, strict=True))
    sent = {"in_flight": 2 * LLAMA.V * LLAMA.H}  # the largest gradient, on its way to the host
    assert rows_agree(found.device, **device, **(BESIDE | sent if on_card else {}))
    state = 8 * parameters + 4 * len(llama_shapes(LLAMA))
    host = {"masters": 4 * parameters, "optimizer": state, "gradients": 2 * parameters}
    host |= {"libraries": LIBRARIES, "threads": found.host.threads}
    host |= {"staging": 2 * SLOTS * SLOT_BYTES, "cuda": GIB, "temporaries": 4 * parameters} if on_card else device
    assert rows_agree(found.host, **host)
    assert not rows_agree(replace(found.host, masters=0), **host)  # wrong: a row left out


def test_device_memory_column_of_an_adafactor_step_equals_the_hand_derived_formula(config):
    found = columns(llama(config, FEW, "precision=bf16-sr", "optim=adafactor"), CARD)
    gradients, scratch = adafactor_step(FEW)
    derived = {
        "weights": llama_weights(FEW),
        "optimizer": adafactor_state(FEW),
        "gradients": gradients,
    }
    derived |= {"temporaries": scratch, "activations": 8 * FEW.B * (FEW.T + 1)} | BESIDE
    assert found.device.phase == "step" and rows_agree(found.device, **derived)
