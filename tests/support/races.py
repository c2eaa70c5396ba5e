"""Trains over a copy lane, and defines deliberately wrong variants of the code, such as a missing wait. On a card, each
variant would be a race."""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

from closed_lane import ClosedLane
from lowmem.config.settle import Run
from lowmem.config.typed_lines import composed
from lowmem.offload import link, master_weights, streamed
from lowmem.offload.copy_lanes import AtOnce, CardLane
from lowmem.offload.link import StagedLink
from lowmem.offload.streamed import StreamedWeights
from lowmem.techniques.gradient_checkpointing import boundary
from lowmem.techniques.gradient_checkpointing.boundary import OnHost
from streams import trained
from traced_lane import Event, TracedLane


def config(*lines, base=()):
    return Run.from_draft(composed([*base, *lines]))


def run(lane, model, arguments, weights=("weights=streamed",)):
    """Trains with all copies over `lane`. Returns `streams.Trained`. Args: model: key of `streams.MODELS`; arguments:
    the result of `streams.lines`; weights: overrides that place the weights."""
    with patch.object(boundary, "_lane", lambda device: lane):
        return trained(config, list(weights), model, arguments, lane=lane)


@contextmanager
def all_over(lane):
    """Makes all runs in this context copy activations, weights and gradients over `lane`, as on a card."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(boundary, "_lane", lambda device: lane))
        patches.enter_context(patch.object(streamed, "lane_of", lambda device: lane))
        make_link = partial(StagedLink, lane, slot_bytes=4096, slots=2)
        patches.enter_context(patch.object(master_weights, "link_to", lambda device: make_link()))
        yield


# --- wrong variants: each takes a `pytest.MonkeyPatch` ----------------------------------------------------------------


def without_hold(patch):
    for lane in (TracedLane, ClosedLane):
        patch.setattr(lane, "hold", lambda *_: None)


def slot_given_back_too_early(patch):
    """The next copy into a slot waits for the previous copy into the slot, but not for the computation that reads the
    slot."""
    free = StreamedWeights._free

    def too_early(self, slot):
        landed = slot.landed
        free(self, slot)
        slot.free = landed

    patch.setattr(StreamedWeights, "_free", too_early)


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
    def not_waiting(self, weight):
        self._coming.pop(id(weight), None)

    patch.setattr(StagedLink, "wait", not_waiting)


def copy_down_read_without_an_event(patch):
    """The host reads a gradient before the copy to the host is complete, as after `.to("cpu", non_blocking=True)`
    without a wait for an event."""
    receive = StagedLink._receive
    patch.setattr(
        StagedLink, "_receive", lambda self, to, start, here, _, slot: receive(self, to, start, here, AtOnce(), slot)
    )


def gradient_freed_before_its_copy_has_run(patch):
    patch.setattr(TracedLane, "keep", lambda *_: None)


def copy_before_the_gradient_is_complete(patch):
    """Each copy to the host waits for the event for which the lane's first copy waited, instead of the event after
    which the gradient is complete."""
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


def slot_taken_from_a_block_that_backward_reads(patch):
    """If no slot is free, the next block is copied into a slot that another block may still be reading."""
    fetch = StreamedWeights._fetch

    def taking(self, number):
        if fetch(self, number):
            return True
        slot, host_block = self._slots[0], self.host_blocks[number]
        host_block.wait_for_updates()
        slot.host_block, slot.steps = host_block, host_block.steps
        slot.landed = host_block.last_copy = self._up.copy(
            slot.memory[: host_block.flat.numel()], host_block.flat, slot.landed
        )
        return True

    patch.setattr(StreamedWeights, "_fetch", taking)
