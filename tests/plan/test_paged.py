"""Tests predictions for paged optimizer state, which does not count as device memory and moves to host memory if the
card is full."""

import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.optim import PagedAdamW8bit
from torch import nn

from conftest import beside
from devices import each_device_slowly
from lowmem.config.cards import Card
from lowmem.memory.ledger import optimizer_state, paged_state
from lowmem.plan.column import HostBytes
from lowmem.plan.host_bytes import BY_HOST, of_host
from lowmem.plan.prediction import pages_on_host, predict
from lowmem.plan.target import Target
from lowmem.plan.tracing import stand_in, trace
from lowmem.system.units import GIB
from lowmem.techniques.optim import build

# State is paged from 100,000 elements on. Embeddings of 300 x 256 have fewer elements, and matrices of 256 x 768 more.
MODEL = ["model.architecture.n_embd=256", "model.architecture.n_layer=2", "model.architecture.vocab_size=300"]
BYTES = {"paged_adamw8bit": 2, "paged_adamw32bit": 8}  # bytes per element of the two moments


def composed(config, *typed):
    return config(*MODEL, "max_steps=2", *typed).resolved()


def large(cfg) -> int:
    """Returns the number of elements whose state is paged: in each block, one matrix of 256 x 768 and two of 256 x
    1024, but not the matrix of 256 x 256."""
    assert cfg.model.architecture["n_embd"] == 256
    return cfg.model.architecture["n_layer"] * (256 * 768 + 2 * 256 * 1024)


@pytest.mark.parametrize("optim", BYTES)
@pytest.mark.parametrize("counted", [True, False])
def test_paged_optimizer_state_is_not_counted_on_the_card_unless_traced_as_memory_of_the_allocator(
    config, monkeypatch, optim, counted
):
    """The reference is the optimizer without paging. In the wrong variant (counted=False), the state is traced as
    memory of torch's allocator."""
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
    assert (paged.device.total < unpaged.device.total) == counted


def test_no_optimizer_state_is_predicted_to_be_paged_without_a_card(config):
    found = [predict(composed(config, f"optim={optim}"), Target(on_card=False)) for optim in BYTES]
    assert [one.paged for one in found] == [0, 0]
    assert found[1].device.optimizer > 8 * large(composed(config))


def test_predicted_pages_of_optimizer_state_move_to_the_host_as_the_card_gets_smaller():
    # in GiB: 4 of paged state; torch and the CUDA context need 3, and pages get what remains of the card
    assert {gpu: pages_on_host(4, 3, gpu) for gpu in (2, 3, 4, 7, 8)} == {2: 4, 3: 4, 4: 3, 7: 0, 8: 0}
    assert pages_on_host(4, 3, None) == 0


def test_paged_optimizer_state_is_added_to_predicted_host_memory_except_while_saving_or_loading():
    phases = {name: HostBytes(name, optimizer=GIB) for name in ("load", "forward", "step", "evaluation")}
    phases["save"] = HostBytes("save", optimizer=5 * GIB)
    crowded = phases | {"step": HostBytes("step", optimizer=3 * GIB)}
    assert of_host(phases, 1, pages=4 * GIB).total == 5 * GIB  # save already contains the full state
    assert [of_host(crowded, 1, pages=pages * GIB).total / GIB for pages in (4, 3, 2, 0)] == [7, 6, 5, 5]


def test_paged_optimizer_state_on_a_small_card_moves_to_host_memory_and_leaves_device_memory_unchanged(config):
    cfg = composed(config, "optim=paged_adamw8bit")
    room, crowded = (predict(cfg, Target(True, Card(size, "made up", GIB))) for size in (9 * GIB, GIB))
    assert room.device == crowded.device and room.paged_on_host == 0
    assert crowded.paged_on_host == crowded.paged == 2 * large(cfg)
    for one, pages in ((room, 0), (crowded, crowded.paged)):
        assert one.host.phase in BY_HOST or one.host.optimizer >= pages
        assert one.fits(Target(True, Card(one.device.total, "made up"), one.host.total))
        assert not one.fits(Target(True, Card(one.device.total - 1, "made up"), one.host.total))
        assert not one.fits(Target(True, Card(one.device.total, "made up"), one.host.total - 1))


def test_bitsandbytes_pages_optimizer_state_from_100000_elements(monkeypatch):
    asked = []
    monkeypatch.setattr(functional, "get_paged", lambda *shape, **_: asked.append(shape) or torch.zeros(1))
    monkeypatch.setattr(functional, "fill", lambda *_: None)
    made = PagedAdamW8bit(nn.Linear(8, 8).parameters())
    for elements in (build.PAGED_FROM - 1, build.PAGED_FROM):
        made.get_state_buffer(torch.empty(elements, device="meta"))
    assert asked == [(build.PAGED_FROM,)]


def test_paged_optimizer_state_is_counted_separately_from_other_optimizer_state():
    """bitsandbytes marks paged state with the attribute `is_paged`."""
    model = nn.Linear(64, 64, bias=False)
    made = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    made.step()
    assert list(optimizer_state(made)) and not list(paged_state(made))
    (state,) = optimizer_state(made)
    state.is_paged = True
    assert list(paged_state(made)) == [state]


@each_device_slowly
def test_paging_moves_over_half_of_the_adamw_state_off_a_card_and_saves_nothing_on_a_cpu(fit, tmp_path, device):
    """AdamW's state has 8 bytes per parameter. Without CUDA, no state is paged."""
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
