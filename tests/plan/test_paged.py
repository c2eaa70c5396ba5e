"""State that CUDA pages: in no figure of the card's, on the host where the card has no room for it."""

from dataclasses import replace

import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.optim import PagedAdamW8bit
from torch import nn

from conftest import beside
from devices import each_device_slowly
from lowmem.config.cards import Card
from lowmem.memory.ledger import optimizer_state, paged_state
from lowmem.plan.prediction import Need, outline, predict
from lowmem.plan.target import Target
from lowmem.plan.tracing import stand_in, trace
from lowmem.system.units import GIB
from lowmem.techniques.optim import build

# Embeddings of 300 x 256 are below the 100,000 elements from which state is paged; matrices of 256 x 768 are above.
MODEL = ["model.architecture.n_embd=256", "model.architecture.n_layer=2", "model.architecture.vocab_size=300"]
BYTES = {"paged_adamw8bit": 2, "paged_adamw32bit": 8}  # of two buffers, per element


def composed(config, *typed):
    return config(*MODEL, "max_steps=2", *typed).resolved()


def large(cfg) -> int:
    """Elements of the parameters whose state is paged: of each block 256 x 768 and twice 256 x 1024, not 256 x 256."""
    assert cfg.model.architecture["n_embd"] == 256
    return cfg.model.architecture["n_layer"] * (256 * 768 + 2 * 256 * 1024)


@pytest.mark.parametrize("optim", BYTES)
@pytest.mark.parametrize("counted", [True, False])
def test_paged_state_is_none_of_the_cards(config, monkeypatch, optim, counted):
    """Beside the same optimizer without pages. Wrong on purpose: counted as what torch allocates."""
    if not counted:
        monkeypatch.setattr(
            trace, "stand_in", lambda make, one_kernel, pages: stand_in.stand_in(make, one_kernel, False)
        )
    cfg = composed(config, f"optim={optim}")
    plain = composed(config, f"optim={optim}", f"optim._target_={cfg.optim.target.replace('Paged', '')}")
    paged, unpaged = predict(cfg, Target(on_card=True)), predict(plain, Target(on_card=True))
    state = BYTES[optim] * large(cfg)
    assert unpaged.paged == 0
    assert (paged.paged == state) == counted
    for phase in ("forward", "backward", "step", "evaluation", "save", "resume"):
        spared = unpaged.phases[phase].device - paged.phases[phase].device
        assert (spared == state) == counted, phase
    assert (paged.device_need < unpaged.device_need) == counted


def test_without_a_card_nothing_is_paged(config):
    found = [predict(composed(config, f"optim={optim}"), Target(on_card=False)) for optim in BYTES]
    assert [one.paged for one in found] == [0, 0]
    assert found[1].by_category["optimizer"] > 8 * large(composed(config))


def test_an_estimate_knows_it_too(config):
    cfg = composed(config, "optim=paged_adamw8bit")
    on_card, beside = outline(cfg, Target(on_card=True)), outline(cfg, Target(on_card=False))
    assert on_card.paged == 2 * large(cfg) and beside.paged == 0
    held = [one.phases["evaluation"].bytes["optimizer"] for one in (on_card, beside)]
    assert held[1] - held[0] == on_card.paged


def target(gpu, ram):
    return Target(True, Card(gpu, "made up"), ram)


def test_it_lies_where_there_is_room_and_never_makes_a_run_unfit(config):
    phases = {name: Need(GIB, GIB) for name in ("load", "forward", "step", "evaluation")} | {"save": Need(GIB, 5 * GIB)}
    found = predict(composed(config, "optim=paged_adamw8bit"), Target(True, Card(0, "", GIB)))
    found = replace(found, phases=phases, reserved=2 * GIB, smallest=GIB, paged=4 * GIB)
    # gpu: 2 GiB are needed, and torch reserves 2 beside 1 of the context before a page finds room
    assert {gpu: found.paged_on_host(gpu * GIB) / GIB for gpu in (2, 3, 4, 7, 8)} == {2: 4, 3: 4, 4: 3, 7: 0, 8: 0}
    assert found.paged_on_host(None) == 0
    assert found.fits(target(2 * GIB, 5 * GIB))
    assert not found.fits(target(2 * GIB, 5 * GIB - 1))  # all of it, to be written
    crowded = replace(found, phases=phases | {"step": Need(GIB, 3 * GIB)})
    assert [crowded.host_need(gpu * GIB) / GIB for gpu in (2, 4, 5, 8)] == [7, 6, 5, 5]
    assert crowded.fits(target(8 * GIB, 5 * GIB)) and not crowded.fits(target(2 * GIB, 5 * GIB))
    assert not found.fits(target(2 * GIB - 1, None))


def test_bitsandbytes_pages_from_this_size_on(monkeypatch):
    asked = []
    monkeypatch.setattr(functional, "get_paged", lambda *shape, **_: asked.append(shape) or torch.zeros(1))
    monkeypatch.setattr(functional, "fill", lambda *_: None)
    made = PagedAdamW8bit(nn.Linear(8, 8).parameters())
    for elements in (build.PAGED_FROM - 1, build.PAGED_FROM):
        made.get_state_buffer(torch.empty(elements, device="meta"))
    assert asked == [(build.PAGED_FROM,)]


def test_the_meter_counts_it_beside_the_card():
    """As torch's allocator does: `is_paged` is bitsandbytes' mark."""
    model = nn.Linear(64, 64, bias=False)
    made = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    made.step()
    assert list(optimizer_state(made)) and not list(paged_state(made))
    (state,) = optimizer_state(made)
    state.is_paged = True
    assert list(paged_state(made)) == [state]


@each_device_slowly
def test_a_run_holds_no_paged_state_on_the_card_also_when_it_is_resumed(fit, tmp_path, device):
    """Of AdamW's 8 bytes per parameter; without CUDA nothing is paged."""
    lines = (*MODEL, "save_every=2", f"device={device}")
    runs = {
        "adamw": ("optim=adamw",),
        "paged": ("optim=paged_adamw32bit", "max_steps=2"),
        "resumed": ("optim=paged_adamw32bit", f"resume={tmp_path / 'paged'}"),
    }
    ended = {name: fit(*beside(lines, more), folder=name)[0] for name, more in runs.items()}
    held = {name: summary["peak_bytes"]["device"] for name, summary in ended.items()}
    spared = [(held["adamw"] - held[name]) / (8 * ended["adamw"]["parameters"]) for name in ("paged", "resumed")]
    assert min(spared) > 0.5 if device == "cuda" else max(map(abs, spared)) < 0.05, spared
