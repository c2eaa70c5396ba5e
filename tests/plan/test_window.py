"""Computes the duration of an optimizer step by hand, with everything that overlaps in a run."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lowmem.config import cards
from lowmem.config.settle import run_of
from lowmem.offload.drive import Sizes
from lowmem.plan.cost import step_time
from lowmem.plan.cost.machine import COMPUTE, Machine, machine
from lowmem.plan.cost.step_time import Load, WindowTime
from lowmem.plan.job import resolved
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.traces import WorkTrace

FLOPS = {"float32": 1.0}
TAKEN = {"forward": 2.0, "backward": 4.0, "sum": 0.0, "step": 0.5, "update": 3.0}


def cfg(*typed):
    return resolved(run_of(["model=gpt2", "batch_size=1", *typed]), on_card=True)


def card(link, bandwidth=1.0, duplex=1.0, **rates):
    """Returns a card whose link has this rate both ways, with a host of this bandwidth. Rates are per second."""
    host = Machine("host", FLOPS, bandwidth, 0.0, **rates)
    return Machine("card", FLOPS, 1.0, 0.0, link=cards.LinkBandwidth(link, link, duplex), host=host, **rates)


def shapes(**said):
    """Returns the work of a model of 10 parameters, 4 of them in the largest; nothing streams or leaves the device."""
    nothing = dict.fromkeys(("trained_in_blocks", "streamed", "outside", "head", "paged", "offloaded"), 0)
    nothing |= {"waits_on_host": False, "blocks": (0, 0), "drive": Sizes(), "work": Counter(), "sent": Counter()}
    sizes = {"trained_parameters": 10, "largest_trained": 4, "gradients": 20, "steps_on_host": True}
    return WorkTrace(**(nothing | sizes | said))


def test_window_time_on_a_cpu_is_the_sum_of_all_parts():
    taken = TAKEN | {"sum": 0.25}
    found = step_time.window(card(1.0).host, cfg("precision=bf16-master"), shapes(), taken, 3)
    assert found == WindowTime(3 * (2 + 4), 3 * 0.25, 0.5 + 3) and found.seconds == 18 + 0.75 + 3.5


def test_offloaded_boundaries_overlap_with_forward_and_backward():
    """6 bytes at 2 a second take 3 seconds: a forward pass of 2 waits for 1, a backward pass of 4 for none."""
    found = step_time.window(card(2.0), cfg("precision=bf16"), shapes(steps_on_host=False, offloaded=6), TAKEN, 2)
    assert found == WindowTime(2 * (2 + 4), 2 * 1, 0.5 + 3)


@pytest.mark.parametrize(
    ("link", "sums", "waits"),
    [(10.0, 0.0, 0.0), (5.0, 0.0, 0.0), (2.0, 0.0, 6.0), (10.0, 7.0, 3.0), (2.0, 7.0, 6.0)],
)
def test_gradients_leave_during_backward(link, sums, waits):
    """10 gradients of 2 bytes beside 4 seconds of backward, whether the link or the host is slower; and so do sums."""
    fast = 1e9  # of the host's memory: no time for the slots
    taken = TAKEN | {"sum": sums}
    found = step_time.window(card(link, fast), cfg("precision=bf16-master", "clip=1.0"), shapes(), taken, 3)
    assert found.passes == 18 and found.transfers == pytest.approx(3 * waits)


def test_host_update_overlaps_with_the_next_forward_pass():
    """3 seconds beside 2, after the norm; the first layer's 4 of 10 parameters are waited for in any case. Slots take 4
    bytes a parameter. Weights that come back more slowly than the host updates are what is waited for."""
    typed = cfg("precision=bf16-master", "clip=1.0")
    assert step_time.window(card(1e9, 1e9), typed, shapes(), TAKEN, 1).step == pytest.approx(0.5 + 1.2)
    slow = TAKEN | {"update": 12.0}
    assert step_time.window(card(1e9, 1e9), typed, shapes(), slow, 1).step == pytest.approx(0.5 + 12 - 2)
    assert step_time.window(card(1e9, 40.0), typed, shapes(), slow, 1).step == pytest.approx(0.5 + 13 - 2)
    assert step_time.window(card(2.0, 1e9), typed, shapes(), TAKEN, 1).step == pytest.approx(0.5 + 10 - 2)


def test_early_step_overlaps_with_backward():
    """The norm is part of it then. What the last backward pass does not hide is the rest, or the embeddings' update."""
    typed = cfg("precision=bf16-master", "clip=null")
    assert step_time.window(card(1e9, 1e9), typed, shapes(), TAKEN, 1) == (6.0, 0.0, pytest.approx(1.2))
    slow = step_time.window(card(1e9, 1e9), typed, shapes(), TAKEN | {"update": 12.0}, 2)
    assert slow == (12.0, 0.0, pytest.approx(0.5 + 12 - 4))


def test_sums_and_steps_of_host_masters_run_at_host_speed():
    there = Machine("card", FLOPS, 100.0, 0.0, host=Machine("host", FLOPS, 2.0, 0.0))
    work = {(phase, Work(torch.float32, 0, 200)): 1 for phase in ("forward", "sum", "step", "update")}
    found = shapes(work=work)
    at_host = {"sum": 100, "step": 100, "update": 100}
    assert step_time.seconds(there, found) == {"forward": 2, "backward": 0} | at_host
    beside = step_time.seconds(there, shapes(work=work, steps_on_host=False))
    assert beside == {"forward": 2, "backward": 0} | dict.fromkeys(at_host, 2)


def test_slow_cpu_update_takes_its_declared_factor():
    """adam8bit declares 6 times as long as its bytes. Wrong: as if a card's kernel were as slow."""
    on_host, on_card = cfg("precision=bf16-master", "optim=adam8bit"), cfg("precision=32", "optim=adam8bit")
    assert step_time.window(card(1.0).host, on_host, shapes(), TAKEN, 1).step == 0.5 + 6 * 3
    assert step_time.window(card(1e9), on_card, shapes(steps_on_host=False), TAKEN, 1).step == 0.5 + 3


@pytest.mark.parametrize(("duplex", "waits"), [(1.0, (5 - 2) + (5 - 4)), (0.5, (5 - 2) + (7.5 - 4))])
def test_sharded_weights_offloaded_to_the_host_are_copied_for_each_pass(duplex, waits):
    """20 bytes at 4 a second come for forward, and come for backward while as many bytes of gradients leave."""
    found = shapes(steps_on_host=False, waits_on_host=True)
    assert step_time.window(card(4.0, duplex=duplex), cfg("precision=bf16"), found, TAKEN, 1) == (6, waits, 0.5 + 3)


# --- weights that come from the host ----------------------------------------------------------------------------------

FROZEN = {"trained_parameters": 2, "largest_trained": 1}  # most weights are: hardly a gradient leaves


def streamed(link, *typed, micro_batches=1, duplex=1.0, **said):
    """Returns a trace of 10 parameters, 8 of which wait on the host, in 4 blocks: 16 bytes come in forward, and 12 in
    backward."""
    asked = cfg("precision=bf16-master", *typed)
    found = shapes(**({"streamed": 16, "blocks": (4, 4)} | said))
    return step_time.window(card(link, 1e9, duplex), asked, found, TAKEN, micro_batches)


@pytest.mark.parametrize(("link", "waits"), [(8.0, 0.0), (4.0, 2 + 1), (2.0, 6 + 6)])
def test_streamed_weights_arrive_for_each_pass_beside_gradients(link, waits):
    """Beside 2 and 4 seconds, in which 20 bytes of gradients leave meanwhile."""
    for micro_batches in (1, 3):
        found = streamed(link, "clip=1.0", micro_batches=micro_batches)
        assert found.passes == micro_batches * 6 and found.transfers == pytest.approx(micro_batches * waits)


def test_by_layer_micro_batches_share_the_copies_of_the_weights():
    """16 bytes come once for all of forward, 12 once for all of backward; sums of the blocks' 8 gradients leave once, 4
    bytes each, and the other 2 gradients three times. A head comes for each micro-batch."""
    by_layer = ("clip=1.0", "weights=streamed", "weights.order=by_layer", "gradient_checkpointing=offload")
    found = streamed(4.0, *by_layer, micro_batches=3, trained_in_blocks=8)
    assert found.passes == 6 and found.transfers == pytest.approx((4 - 2) + (11 - 4))
    assert streamed(4.0, *by_layer, trained_in_blocks=8).transfers == pytest.approx((4 - 2) + (5 - 4))  # of one
    head = streamed(4.0, *by_layer, micro_batches=3, trained_in_blocks=8, head=4)
    assert head.transfers == pytest.approx((4 + 3 - 2) + (11 - 4))
    here = step_time.window(card(1.0).host, cfg("precision=bf16-master", *by_layer), shapes(), TAKEN, 3)
    assert here.passes == 6


def test_last_streamed_block_is_not_copied_again_for_backward():
    """6 seconds up instead of 4. Wrong: as if it came once more."""
    assert streamed(2.0, "clip=1.0", **FROZEN).transfers == pytest.approx(6 + 2)
    assert streamed(2.0, "clip=1.0", **FROZEN, blocks=(4, 0)).transfers == pytest.approx(6 + 4)


def test_boundaries_and_streamed_weights_share_the_link():
    """6 bytes: 2 seconds that are hidden in forward, and 2 that are not in backward, where weights take 4 of 4."""
    alone, both = streamed(3.0, "clip=1.0", **FROZEN), streamed(3.0, "clip=1.0", **FROZEN, offloaded=6)
    assert alone.transfers == pytest.approx(16 / 3 - 2) and both.transfers == pytest.approx(16 / 3 - 2 + 2)


@pytest.mark.parametrize(
    ("duplex", "up", "down", "takes"),
    [(1.0, 6, 4, 6), (0.5, 6, 4, 8), (0.5, 2, 4, 4), (0.5, 1, 4, 4), (0.5, 6, 0, 6), (0.25, 0, 4, 4)],
)
def test_half_duplex_link_slows_copies_up_while_copies_run_down(duplex, up, down, takes):
    """A share of 0.5: in 4 seconds 2 of 6 seconds' bytes have gone up, and the other 4 follow alone."""
    assert Load(up=up, down=down).seconds(cards.LinkBandwidth(1.0, 1.0, duplex)) == takes


def test_streamed_weights_slow_down_while_gradients_leave():
    """10 seconds of gradients beside 6 of weights, which have half of the link meanwhile: 5 of 6, and 1 follows."""
    assert streamed(2.0, "clip=1.0", duplex=0.5).transfers == pytest.approx(6 + (10 + 1 - 4))
    assert streamed(2.0, "clip=1.0", duplex=0.9).transfers == pytest.approx(6 + 6)  # they fit beside the gradients
    assert streamed(2.0, "clip=1.0", **FROZEN, duplex=0.5).transfers == pytest.approx(6 + 2 + 0.5 * 2)


def test_streamed_weights_slow_down_while_boundaries_leave():
    """2 seconds of boundaries in forward, and 2 of gradients in backward: half of that is added."""
    alone, shared = (streamed(3.0, "clip=1.0", **FROZEN, offloaded=6, duplex=share) for share in (1.0, 0.5))
    assert shared.transfers == pytest.approx(alone.transfers + 2 / 2 + 4 / 3 / 2)


def both_shares(asked, found):
    return [step_time.window(card(2.0, duplex=share), asked, found, TAKEN, 2) for share in (1.0, 0.5)]


def test_duplex_share_does_not_matter_if_copies_run_in_one_direction():
    """Masters whose gradients leave in backward and whose weights come back in forward, and boundaries of a run that
    steps on the card."""
    for asked, found in (
        (cfg("precision=bf16-master", "clip=1.0"), shapes()),
        (cfg("precision=bf16"), shapes(steps_on_host=False, offloaded=6)),
    ):
        alone, shared = both_shares(asked, found)
        assert alone == shared


def test_weights_of_an_early_step_return_beside_leaving_gradients():
    """10 seconds each: half of the weights have come back when the last gradient has left, and 5 seconds follow."""
    alone, shared = both_shares(cfg("precision=bf16-master", "clip=null"), shapes())
    host = 0.5 + 3 + 2 * 20 / 1 - 10  # which reads and writes slots at one byte a second, and is slower here
    assert alone.step == shared.step == pytest.approx(host)
    early = cfg("precision=bf16-master", "clip=null")
    fast = [step_time.window(card(2.0, 1e9, share), early, shapes(), TAKEN, 1) for share in (1.0, 0.5)]
    assert [one.step for one in fast] == pytest.approx([1.2, 5.0])


def test_streamed_weights_are_updated_on_the_host_and_resident_weights_copied_back():
    """Only the other 2 updated ones come to the device: after 8 seconds of the next forward pass 1 second each for 2
    bytes, or after 10 of backward, in which 12 of the link's 20 bytes were weights. Wrong: all of them."""
    assert streamed(2.0, "clip=1.0").step == pytest.approx(0.5 + 2)
    assert streamed(2.0, "clip=1.0", trained_parameters=18).step == pytest.approx(0.5 + 10)
    early = streamed(2.0, "clip=null", **(FROZEN | {"trained_parameters": 9}))
    assert early == (6.0, pytest.approx(6 + 5), pytest.approx(1 / 3))  # an embedding's update of 3 seconds / 9


def test_every_copy_on_a_cpu_adds_its_time():
    here = card(1.0).host
    found = step_time.window(here, cfg("precision=bf16-master"), shapes(), TAKEN | {"travel": 0.5, "sum": 0.25}, 3)
    assert found.transfers == 3 * 0.75


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("rtx3060", 663), ("rtx4060ti-16gb", 2235), ("rtx4090", 4337), ("rtx5090", 2078), ("h100", 9787)],
)
def test_tokens_from_which_streaming_is_free_follow_from_card_rates(name, tokens):
    """0.65 x FLOP/s over bytes/s: 0.65 x 25.5e12 / 25e9."""
    there = machine(True, cards.named(name))
    assert step_time.free_from(there, "bfloat16") == pytest.approx(tokens, abs=1)


def test_streaming_is_free_when_forward_takes_as_long_as_its_weights():
    """There are 1000 weights, and as many operations and bytes a second as make it 50 tokens."""
    share = step_time.REACHED / COMPUTE
    there = replace(card(4.0), flops={"bfloat16": 50 * 4.0 / share})
    for tokens, waits in ((50, 0.0), (25, 250.0)):
        forward = 2 * 1000 * tokens / (share * there.flops["bfloat16"])
        taken = TAKEN | {"forward": forward, "backward": 3 * forward}
        found = step_time.window(there, cfg("precision=bf16-master"), shapes(streamed=2000), taken, 1)
        assert found.transfers == pytest.approx(waits + max(0.0, 500 - 3 * forward))
    assert step_time.free_from(there, "bfloat16") == pytest.approx(50)
