"""Tests that nothing is read or written too early, on every path between host and device, without a card and without
luck: `traced_lane.py` orders all accesses. Each wrong variant leaves out one wait.
"""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from lowmem.system.copy_lanes import AtOnce, CardLane
from lowmem.techniques.gradient_checkpointing import boundary
from lowmem.techniques.gradient_checkpointing.boundary import OnHost
from lowmem.techniques.weights import link, resident
from lowmem.techniques.weights.link import StagedLink
from lowmem.techniques.weights.registered import Registered
from lowmem.techniques.weights.streamed import Streamed
from streams import lines, trained
from traced_lane import Event, TracedLane, watched

FEW = 500  # accesses that a run has at least: with none seen, no race could be


def races_of(config, model, arguments, weights=("weights=streamed",), registers=True):
    with watched() as races:
        lane = TracedLane(races, registers)
        with patch.object(boundary, "_lane", lambda device: lane):
            trained(config, list(weights), model, arguments, lane=lane)
    return races


def said(races):
    """Returns the first error with both of its stacks."""
    return str(races.errors[0]) if races.errors else ""


STAY = ("weights=resident",)
RIGHT = {
    "tiled": ("gpt2", lines("gpt2", "loss=tiled", "max_steps=2")),
    "early steps": ("llama", lines("llama", "loss=chunked", "max_steps=2", clip="off")),
    "skipped steps": ("qwen3", lines("qwen3", "max_steps=2", precision="16-master", policy="sqrt")),
    "offload": ("llama", lines("llama", "max_steps=2", policy="offload")),
    "adafactor": ("gpt2", lines("gpt2", "loss=tiled", "max_steps=2", optim="adafactor")),
}


@pytest.mark.rows("tiled-True", "early steps-False", "skipped steps-True", "offload-True")
@pytest.mark.parametrize("registers", [True, False])
@pytest.mark.parametrize("case", RIGHT)
def test_weights_that_stream_have_no_race(config, case, registers):
    """With memory that is registered, and through staging where it is not."""
    races = races_of(config, *RIGHT[case], registers=registers)
    assert races.errors == [], said(races)
    assert races.checked > FEW


@pytest.mark.parametrize("clip", ["norm", "off"])
def test_weights_that_stay_have_none(config, clip):
    races = races_of(config, "llama", lines("llama", "loss=chunked", "max_steps=2", clip=clip), STAY)
    assert races.errors == [], said(races)
    assert races.checked > FEW


# --- wrong variants ---------------------------------------------------------------------------------------------------


def without_hold(patch):
    patch.setattr(TracedLane, "hold", lambda *_: None)


def slot_given_back_too_early(patch):
    """The mark is that of the copy into the slot, not of the computation that reads it."""
    free = Streamed._free

    def too_early(self, slot):
        landed = slot.landed
        free(self, slot)
        slot.free = landed

    patch.setattr(Streamed, "_free", too_early)


def staging_recycled_under_its_copy(patch):
    patch.setattr(link.Staging, "send", send_without_waiting)


def send_without_waiting(self, source, to, after):
    there = to.detach().view(-1)
    for start, piece in link.pieces(source, self.slot_bytes):
        slot, _ = self._slots.popleft()
        here = slot.view(piece.dtype)[: piece.numel()].copy_(piece)
        after = self.lane.copy(there[start : start + piece.numel()], here, after)
        self._slots.append((slot, after))
    return after


def weight_read_before_it_is_back(patch):
    patch.setattr(StagedLink, "wait", lambda *_: None)


def copy_down_read_without_an_event(patch):
    """As `.to("cpu", non_blocking=True)` that is read at once; so is a step that begins before the copy is complete."""
    take = StagedLink._take
    patch.setattr(
        StagedLink, "_take", lambda self, to, start, here, _, slot: take(self, to, start, here, AtOnce(), slot)
    )


def gradient_freed_before_its_copy_has_run(patch):
    patch.setattr(TracedLane, "keep", lambda *_: None)


def copy_before_the_gradient_is_complete(patch):
    """The mark is one of the start of the run."""
    copy = CardLane.copy

    def early(self, to, source, after):
        if not hasattr(self, "first"):
            self.first = after
        return copy(self, to, source, self.first if not self.is_host(source) else after)

    patch.setattr(CardLane, "copy", early)


def boundary_read_before_it_is_back(patch):
    fetch = OnHost.fetch

    def early(self):
        self.start()
        self.arrived = self.lane.begin
        return fetch(self)

    patch.setattr(OnHost, "fetch", early)
    patch.setattr(TracedLane, "begin", property(lambda self: Event(self.races, 0)), raising=False)


def boundary_fetched_before_it_has_left(patch):
    start = OnHost.start

    def early(self):
        self.left = Event(self.lane.races, 0)
        start(self)

    patch.setattr(OnHost, "start", early)


OFFLOAD = {"weights": STAY, "policy": "offload"}
WRONG = {
    without_hold: {},
    slot_given_back_too_early: {},
    staging_recycled_under_its_copy: {"registers": False},
    weight_read_before_it_is_back: {"weights": STAY},
    copy_down_read_without_an_event: {},
    gradient_freed_before_its_copy_has_run: {},
    copy_before_the_gradient_is_complete: {},
    boundary_read_before_it_is_back: OFFLOAD,
    boundary_fetched_before_it_has_left: OFFLOAD,
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__.replace("_", " "))
def test_a_wait_that_is_left_out_is_found(config, monkeypatch, wrong):
    wrong(monkeypatch)
    how = {**WRONG[wrong]}
    line = lines("gpt2", "loss=chunked", "max_steps=2", clip="off", policy=how.pop("policy", "every_layer"))
    races = races_of(config, "gpt2", line, **how)
    assert races.errors, "nobody saw it"
    assert "stack trace" in said(races)


@pytest.mark.parametrize("waits", [True, False])
def test_a_home_is_updated_after_its_last_read(waits):
    """In a training the gradient that updates a home was computed from what was read there, which orders the two as
    well. A copy that nobody computes with is waited for by `at_home` alone."""
    with watched() as races:
        lane, home = TracedLane(races), resident.Home([nn.Parameter(torch.ones(64))])
        staged, up = StagedLink(lane, 4096, 2), Registered(lane, [home.flat])
        slot = torch.empty_like(home.flat)
        read = up.copy(slot, home.flat, up.mark())
        home.read = read if waits else None
        staged.at_home(home, lambda: home.flat.fill_(2))
        staged.finish()
        staged.close()
        up.close()
    assert bool(races.errors) != waits
