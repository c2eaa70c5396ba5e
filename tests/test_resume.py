"""Tests that a run equals the unbroken run bit by bit although it is stopped at several places and resumed each time.
This is tested with each optimizer, each precision, each adapter and weights=streamed, always with dropout."""

import pytest

from devices import each_device_slowly
from lowmem.saving import random_states
from lowmem.training.module import CausalLM
from parity import CHOICES, COMPILED, WITH, shipped_but
from same import last, same

EVERY = [
    choice
    for choice in CHOICES
    if choice.startswith(("optim=", "precision=", "adapter=", "weights="))
    and choice not in ("adapter=none", "weights=resident")
]
EACH = [pytest.param(t, marks=pytest.mark.matrix if t in COMPILED else []) for t in EVERY]

# 12 sequences, one per micro-batch, and at most five micro-batches per window, so an epoch has windows of 5, 5 and 2.
SEQUENCES, WINDOWS = 12, [5, 5, 2, 5, 5, 2, 5]
RUN = (
    *("accumulation=fixed", "accumulation.batches=5", "batch_size=1", f"max_steps={len(WINDOWS)}", "save_every=1"),
    *("model.architecture.resid_pdrop=0.1", "model.architecture.embd_pdrop=0.1", "lr=1e-2", "val_sequences=1"),
)
# place of a stop -> (completed windows, completed micro-batches of the next window)
DEATHS = {
    "after micro-batch 1": (1, 1),
    "after micro-batch 1 of the short window": (2, 1),
    "at the end of an epoch": (3, 0),
    "after micro-batch 2": (3, 2),
    "before the last micro-batch": (4, 4),
    "in the second epoch's short window": (5, 1),
}


class Died(Exception):
    """Raised where the process would die."""


@pytest.fixture
def life(fit, monkeypatch):
    """Returns a function that trains until the run dies or ends, and appends the sequences of each completed window to
    `consumed`. For a run that ends, the function returns its folder."""
    from lowmem.data.packing import Joined

    monkeypatch.setattr(Joined, "__len__", lambda self: min(self.count, SEQUENCES))
    backward, step = CausalLM.manual_backward, CausalLM.training_step
    state = {"windows": 0, "batches": 0, "death": None}

    def mortal_backward(self, loss):
        if (state["windows"], state["batches"]) == state["death"]:
            raise Died
        backward(self, loss)
        state["batches"] += 1

    def recording_step(self, window, index):
        out = step(self, window, index)
        state["consumed"].append([batch.input_ids.tolist() for batch in window.micro_batches])
        state["windows"], state["batches"] = state["windows"] + 1, 0
        return out

    monkeypatch.setattr(CausalLM, "manual_backward", mortal_backward)
    monkeypatch.setattr(CausalLM, "training_step", recording_step)

    def live(name, technique, consumed, resume=None, death=None):
        state.update(windows=len(consumed), batches=0, death=death, consumed=consumed)
        beside = WITH.get(technique, []) if technique.startswith("weights=") else []
        lines = [technique, *beside, *RUN, *([f"resume={resume}"] if resume else [])]
        if death is None:
            return fit(*lines, folder=name)[1]
        with pytest.raises(Died):
            fit(*lines, folder=name)
        return resume.parent / name if resume else None

    return live


@pytest.mark.matrix_rows(*shipped_but("weights=streamed"))
@pytest.mark.parametrize("technique", EACH)
def test_run_killed_six_times_equals_the_unbroken_run(life, tmp_path, technique):
    unbroken = []
    whole = life("whole", technique, unbroken)
    assert [len(window) for window in unbroken] == WINDOWS
    consumed, resume = [], None
    for number, death in enumerate(DEATHS.values()):
        name = f"life{number}"
        life(name, technique, consumed, resume, death)
        resume = tmp_path / name
        if not list((resume / "checkpoints").glob("*")):  # the run died before it completed a window
            resume = tmp_path / f"life{number - 1}"
    again = life("last", technique, consumed, resume)
    assert consumed == unbroken
    one, other = last(whole), last(again)
    assert {"state_dict", "optimizer_states", "lr_schedulers", "lowmem", "global_step"} <= one.keys()
    if technique in ("precision=16", "precision=16-true"):
        assert any("Float16" in key for key in one)  # the loss scale
    for key in one:
        assert same(one[key], other[key]), key


@pytest.mark.matrix
@pytest.mark.parametrize(
    "technique", ["precision=bf16", pytest.param("precision=bf16-master", marks=pytest.mark.matrix)]
)
def test_run_killed_six_times_without_16_bit_units_equals_the_unbroken_run(life, tmp_path, without_units, technique):
    test_run_killed_six_times_equals_the_unbroken_run(life, tmp_path, technique)


@pytest.mark.matrix
@pytest.mark.parametrize("technique", ["optim=adam8bit", pytest.param("optim=adamw8bit", marks=pytest.mark.matrix)])
def test_run_killed_six_times_without_a_compiler_equals_the_unbroken_run(life, tmp_path, without_compiler, technique):
    test_run_killed_six_times_equals_the_unbroken_run(life, tmp_path, technique)


@pytest.mark.wrong
@pytest.mark.parametrize("forgotten", ["random states", "optimizer"])
def test_resume_without_random_states_or_optimizer_state_gives_different_weights(
    life, tmp_path, monkeypatch, forgotten
):
    """Wrong on purpose: either the random states or the optimizer state is not restored."""
    from lightning.pytorch.trainer.connectors import checkpoint_connector

    unbroken = []
    whole = life("whole", "optim=adamw", unbroken)
    consumed = []
    life("part", "optim=adamw", consumed, None, (3, 1))
    if forgotten == "random states":
        monkeypatch.setattr(random_states, "restore", lambda *_: None)
    else:
        monkeypatch.setattr(checkpoint_connector._CheckpointConnector, "restore_optimizers", lambda self: None)
    again = life("again", "optim=adamw", consumed, tmp_path / "part")
    assert consumed == unbroken
    assert not same(last(whole)["state_dict"], last(again)["state_dict"])


# The state of matrices of 256 x 768 is paged: bitsandbytes pages the state of 100,000 elements and more.
ON_A_CARD = {"precision=32": [], "precision=bf16-sr": [], "precision=16-master": [], "precision=16": []}
ON_A_CARD["optim=paged_adamw8bit"] = ["model.architecture.n_embd=256"]


@each_device_slowly
@pytest.mark.parametrize("forgetful", [False, True])
@pytest.mark.parametrize("technique", ON_A_CARD)
def test_resumed_run_equals_the_unbroken_run_only_if_random_states_are_restored(
    fit, tmp_path, monkeypatch, deterministic, technique, forgetful, device
):
    """Dropout masks are drawn on the device. Wrong on purpose (forgetful=True): random states are not restored."""
    lines = (technique, *RUN, *ON_A_CARD[technique], f"device={device}")
    _, whole = fit(*lines, folder="whole")
    fit(*lines, "max_steps=3", f"scheduler.total_steps={len(WINDOWS)}", folder="part")
    if forgetful:
        monkeypatch.setattr(random_states, "restored", lambda *_: None)
    _, again = fit(*lines, f"resume={tmp_path / 'part'}", folder="again")
    one, other = last(whole), last(again)
    assert same(one["state_dict"], other["state_dict"]) != forgetful
    assert forgetful or all(same(one[key], other[key]) for key in one)
