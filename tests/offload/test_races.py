"""Tests that no memory is read or written too early while data is copied between host and device. The tests need no
card and do not depend on timing: `traced_lane.py` compares vector clocks, and `closed_lane.py` protects memory during
copies. Each wrong variant leaves out or weakens one wait.
"""

import signal
from contextlib import suppress

import pytest
import torch
from torch import nn

import closed_lane
import races
from lowmem.offload.host_block import HostBlock
from lowmem.offload.link import StagedLink
from lowmem.offload.registered import Registered
from lowmem.system.errors import NotFinite
from lowmem.techniques.weights.streamed import Streamed
from pairwise import pairwise
from streams import POLICIES, lines
from traced_lane import TracedLane, watched

EVERY = pairwise(("llama", "gpt2"), POLICIES, (2, 3, 4), ("norm", "off"))
FEW = 500  # minimum number of checked accesses in a run; without accesses no race could be found
STREAM, STAY = ("weights=streamed",), ("weights=resident",)


def traced(model, arguments, weights=STREAM, registers=True, may_fail=()):
    """Trains, and returns the `Races` of the run. Args: may_fail: classes of errors that a wrong variant may raise."""
    with watched() as found, suppress(*may_fail):
        races.run(TracedLane(found, registers), model, arguments, weights)
    return found


def closed(processes, tmp_path, *arguments, wrong=None, registers=True, weights=STREAM):
    """Trains in a separate process in which memory is protected while it is copied. Returns (exit code of the process,
    stack trace of a segmentation fault or "")."""
    log = tmp_path / "stacks"
    process = processes.Process(target=closed_lane.live, args=(log, wrong, registers, *arguments, weights))
    process.start()
    process.join()
    return process.exitcode, log.read_text()


def said(found):
    """Returns the message of the first race with the stack traces of both accesses, or "" without a race."""
    return str(found.errors[0]) if found.errors else ""


RIGHT = {
    "tiled": ("gpt2", lines("gpt2", "loss=tiled", "max_steps=2")),
    "early steps": ("llama", lines("llama", "loss=chunked", "max_steps=2", clip="off")),
    "skipped steps": ("qwen3", lines("qwen3", "max_steps=2", precision="16-master", policy="sqrt")),
    "offload": ("llama", lines("llama", "max_steps=2", policy="offload")),
    "adafactor": ("gpt2", lines("gpt2", "loss=tiled", "max_steps=2", optim="adafactor")),
}


@pytest.mark.rows("early steps-False", "offload-True")
@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("case", RIGHT)
def test_streamed_weights_have_no_data_race(case, registers):
    """With `registers`, host memory is registered with CUDA; without it, copies go through staging buffers."""
    found = traced(*RIGHT[case], registers=registers)
    assert found.errors == [], said(found)
    assert found.checked > FEW


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "policy", "slots", "clip"), EVERY)
def test_streamed_weights_have_no_data_race_in_any_pair_of_settings(model, policy, slots, clip):
    arguments = lines(model, "loss=chunked", "max_steps=2", policy=policy, clip=clip)
    found = traced(model, arguments, (*STREAM, f"weights.slots={slots}"), registers=slots != 3)
    assert found.errors == [], said(found)
    assert found.checked > FEW


# --- whole runs -------------------------------------------------------------------------------------------------------

RUN = (
    *("gradient_checkpointing=every_layer", "accumulation=fixed", "accumulation.batches=2", "batch_size=1", "lr=1e-2"),
    *("scheduler.total_steps=4", "max_steps=4", "val_every=2", "save_every=1", "sample_tokens=3", "val_sequences=2"),
    *("model.architecture.n_layer=4", "model.architecture.resid_pdrop=0.1", "optim=adamw8bit"),
)


@pytest.mark.matrix
@pytest.mark.parametrize("clip", ["norm", "off"])
@pytest.mark.parametrize("loss", ["chunked", "tiled"])
@pytest.mark.parametrize("precision", ["bf16-master", "16-master"])
def test_streamed_run_that_evaluates_saves_fails_and_resumes_has_no_data_race(
    fit, tmp_path, monkeypatch, precision, loss, clip
):
    """The first run raises an error in backward while copies are under way. The second run resumes from its
    checkpoint."""
    lines = (*RUN, *STREAM, f"precision={precision}", f"loss={loss}", f"clip={'null' if clip == 'off' else 1.0}")
    if precision == "16-master":
        lines += ("precision.init_scale=1e7",)  # the first steps are skipped
    with watched() as found, races.all_over(TracedLane(found)):
        with monkeypatch.context() as patch:
            raises_in_backward(patch, tmp_path / "first" / "checkpoints")
            with pytest.raises(Interrupted):
                fit(*lines, folder="first")
        _, folder = fit(*lines, f"resume={tmp_path / 'first'}", folder="second")
    assert found.errors == [], said(found)
    assert found.checked > 6 * FEW
    assert (folder / "samples.jsonl").read_text()


class Interrupted(RuntimeError):
    pass


def raises_in_backward(monkeypatch, checkpoints):
    """Makes backward raise `Interrupted` when it reaches a block for the sixth time after the first checkpoint."""
    reached, blocks = Streamed._reached, iter(range(5))

    def raises(self, *arguments):
        if checkpoints.is_dir() and [*checkpoints.iterdir()] and next(blocks, None) is None:
            raise Interrupted
        return reached(self, *arguments)

    monkeypatch.setattr(Streamed, "_reached", raises)


@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("case", RIGHT)
def test_streamed_weights_access_no_memory_that_is_protected_during_copies(processes, tmp_path, case, registers):
    assert closed(processes, tmp_path, *RIGHT[case], registers=registers)[0] == 0


@pytest.mark.parametrize("clip", ["norm", "off"])
def test_resident_weights_with_masters_have_no_data_race(clip):
    found = traced("llama", lines("llama", "loss=chunked", "max_steps=2", clip=clip), STAY)
    assert found.errors == [], said(found)
    assert found.checked > FEW


# --- wrong variants ---------------------------------------------------------------------------------------------------


OFFLOAD = {"weights": STAY, "policy": "offload"}
WRONG = {
    races.without_hold: {},
    races.slot_given_back_too_early: {},
    races.slot_taken_from_a_block_that_backward_reads: {"policy": "sqrt"},
    races.staging_recycled_under_its_copy: {"registers": False},
    races.weight_read_before_it_is_back: {"weights": STAY},
    races.copy_down_read_without_an_event: {},
    races.gradient_freed_before_its_copy_has_run: {},
    races.copy_before_the_gradient_is_complete: {},
    races.boundary_read_before_it_is_back: OFFLOAD,
    races.boundary_fetched_before_it_has_left: OFFLOAD,
}
# Faults that protected memory reveals: accesses of the CPU to slots, host blocks and staging buffers. Protected
# memory does not reveal a wrong order of the device's work.
SHOWN = (
    races.without_hold,
    races.slot_taken_from_a_block_that_backward_reads,
    races.staging_recycled_under_its_copy,
    races.copy_down_read_without_an_event,
)


def line(policy="every_layer", **how):
    return ("gpt2", lines("gpt2", "loss=chunked", "max_steps=2", clip="off", policy=policy)), how


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__.replace("_", " "))
def test_missing_wait_between_host_and_device_is_found_as_a_data_race(monkeypatch, wrong):
    arguments, how = line(**WRONG[wrong])
    wrong(monkeypatch)
    found = traced(*arguments, **how, may_fail=[NotFinite])
    assert found.errors, "nobody saw it"
    assert "stack trace" in said(found)


@pytest.mark.parametrize("wrong", SHOWN, ids=lambda wrong: wrong.__name__.replace("_", " "))
def test_missing_wait_between_host_and_device_accesses_protected_memory_and_crashes(processes, tmp_path, wrong):
    arguments, how = line(**WRONG[wrong])
    code, stack = closed(processes, tmp_path, *arguments, wrong=wrong.__name__, **how)
    assert code == -signal.SIGSEGV and "lowmem" in stack, (code, stack)


@pytest.mark.parametrize("waits", [True, False], ids=["registered", "not registered"])
def test_host_block_is_updated_after_its_last_copy_unless_registering_the_copy_is_left_out(waits):
    """In training, the gradient of an update depends on the copied weight, so the update follows the copy in any case.
    Only `update_block` orders an update after a copy whose result no computation uses."""
    with watched() as found:
        lane, host_block = TracedLane(found), HostBlock([nn.Parameter(torch.ones(64))])
        staged, up = StagedLink(lane, 4096, 2), Registered(lane, [host_block.flat])
        slot = torch.empty_like(host_block.flat)
        read = up.copy(slot, host_block.flat, up.mark())
        host_block.last_copy = read if waits else None
        staged.update_block(host_block, lambda: host_block.flat.fill_(2))
        staged.finish()
        staged.close()
        up.close()
    assert bool(found.errors) != waits
