"""Tests the predicted duration of an optimizer step, with overlapping copies, against durations computed by hand."""

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
    """Returns a card with a host. Args: link: bytes/s in each direction; bandwidth: bytes/s of host memory; duplex:
    rate of copies to the card while copies to the host run, as a share of the full rate."""
    host = Machine("host", FLOPS, bandwidth, 0.0, **rates)
    return Machine("card", FLOPS, 1.0, 0.0, link=cards.LinkBandwidth(link, link, duplex), host=host, **rates)


def shapes(**said):
    """Returns the work of a model of 10 parameters, 4 of them in the largest weight. By default no weight is streamed,
    no block input is offloaded, and the optimizer runs on the host."""
    nothing = dict.fromkeys(("trained_in_blocks", "streamed", "outside", "head", "paged", "offloaded"), 0)
    nothing |= {"waits_on_host": False, "blocks": (0, 0), "drive": Sizes(), "work": Counter(), "sent": Counter()}
    sizes = {"trained_parameters": 10, "largest_trained": 4, "gradients": 20, "steps_on_host": True}
    return WorkTrace(**(nothing | sizes | said))


def test_predicted_time_of_an_optimizer_step_on_a_cpu_is_the_sum_of_all_parts():
    taken = TAKEN | {"sum": 0.25}
    found = step_time.window(card(1.0).host, cfg("precision=bf16-master"), shapes(), taken, 3)
    assert found == WindowTime(3 * (2 + 4), 3 * 0.25, 0.5 + 3) and found.seconds == 18 + 0.75 + 3.5


def test_predicted_offload_of_block_inputs_overlaps_with_forward_and_backward():
    """6 bytes at 2 bytes per second take 3 seconds: forward (2 seconds) waits for 1 second, and backward (4 seconds)
    does not wait."""
    found = step_time.window(card(2.0), cfg("precision=bf16"), shapes(steps_on_host=False, offloaded=6), TAKEN, 2)
    assert found == WindowTime(2 * (2 + 4), 2 * 1, 0.5 + 3)


@pytest.mark.parametrize(
    ("link", "sums", "waits"),
    [(10.0, 0.0, 0.0), (5.0, 0.0, 0.0), (2.0, 0.0, 6.0), (10.0, 7.0, 3.0), (2.0, 7.0, 6.0)],
)
def test_predicted_copies_and_sums_of_gradients_overlap_with_backward(link, sums, waits):
    """While backward computes for 4 seconds, 20 bytes of gradients are copied to the host and summed there. Backward
    waits for the slower of copies and sums."""
    fast = 1e9  # bytes per second of host memory: staging takes almost no time
    taken = TAKEN | {"sum": sums}
    found = step_time.window(card(link, fast), cfg("precision=bf16-master", "clip=1.0"), shapes(), taken, 3)
    assert found.passes == 18 and found.transfers == pytest.approx(3 * waits)


def test_predicted_host_update_overlaps_with_the_next_forward_pass():
    """After the norm, an update of 3 seconds overlaps with 2 seconds of forward, which waits at least for the update of
    the largest weight (4 of 10 parameters). Staging adds 4 bytes of host traffic per parameter. If the link is slower
    than the update, forward waits for the copies of the weights."""
    typed = cfg("precision=bf16-master", "clip=1.0")
    assert step_time.window(card(1e9, 1e9), typed, shapes(), TAKEN, 1).step == pytest.approx(0.5 + 1.2)
    slow = TAKEN | {"update": 12.0}
    assert step_time.window(card(1e9, 1e9), typed, shapes(), slow, 1).step == pytest.approx(0.5 + 12 - 2)
    assert step_time.window(card(1e9, 40.0), typed, shapes(), slow, 1).step == pytest.approx(0.5 + 13 - 2)
    assert step_time.window(card(2.0, 1e9), typed, shapes(), TAKEN, 1).step == pytest.approx(0.5 + 10 - 2)


def test_predicted_early_updates_overlap_with_backward():
    """With clip=null, weights are updated during backward, and these updates also compute the norm. The step waits for
    the part of the updates that the last backward pass does not hide, but at least for the update of the largest
    weight."""
    typed = cfg("precision=bf16-master", "clip=null")
    assert step_time.window(card(1e9, 1e9), typed, shapes(), TAKEN, 1) == (6.0, 0.0, pytest.approx(1.2))
    slow = step_time.window(card(1e9, 1e9), typed, shapes(), TAKEN | {"update": 12.0}, 2)
    assert slow == (12.0, 0.0, pytest.approx(0.5 + 12 - 4))


def test_gradient_sums_and_updates_of_host_masters_are_predicted_at_host_speed():
    there = Machine("card", FLOPS, 100.0, 0.0, host=Machine("host", FLOPS, 2.0, 0.0))
    work = {(phase, Work(torch.float32, 0, 200)): 1 for phase in ("forward", "sum", "step", "update")}
    found = shapes(work=work)
    at_host = {"sum": 100, "step": 100, "update": 100}
    assert step_time.seconds(there, found) == {"forward": 2, "backward": 0} | at_host
    beside = step_time.seconds(there, shapes(work=work, steps_on_host=False))
    assert beside == {"forward": 2, "backward": 0} | dict.fromkeys(at_host, 2)


def test_predicted_update_of_an_optimizer_slow_on_a_cpu_takes_its_declared_factor():
    """adam8bit declares that its update on a CPU takes 6 times as long as its memory traffic. The factor does not apply
    to a card."""
    on_host, on_card = cfg("precision=bf16-master", "optim=adam8bit"), cfg("precision=32", "optim=adam8bit")
    assert step_time.window(card(1.0).host, on_host, shapes(), TAKEN, 1).step == 0.5 + 6 * 3
    assert step_time.window(card(1e9), on_card, shapes(steps_on_host=False), TAKEN, 1).step == 0.5 + 3


@pytest.mark.parametrize(("duplex", "waits"), [(1.0, (5 - 2) + (5 - 4)), (0.5, (5 - 2) + (7.5 - 4))])
def test_sharded_weights_offloaded_to_the_host_are_predicted_to_be_copied_for_each_pass(duplex, waits):
    """20 bytes of weights at 4 bytes per second arrive for forward and again for backward, in which 20 bytes of
    gradients also leave."""
    found = shapes(steps_on_host=False, waits_on_host=True)
    assert step_time.window(card(4.0, duplex=duplex), cfg("precision=bf16"), found, TAKEN, 1) == (6, waits, 0.5 + 3)


# --- streamed weights -------------------------------------------------------------------------------------------------

FROZEN = {"trained_parameters": 2, "largest_trained": 1}  # most weights are frozen, so few gradients leave


def streamed(link, *typed, micro_batches=1, duplex=1.0, **said):
    """Returns the window time of a model of 10 parameters, 8 of which are streamed, in 4 blocks: 16 bytes are copied to
    the card in forward, and 12 in backward."""
    asked = cfg("precision=bf16-master", *typed)
    found = shapes(**({"streamed": 16, "blocks": (4, 4)} | said))
    return step_time.window(card(link, 1e9, duplex), asked, found, TAKEN, micro_batches)


@pytest.mark.parametrize(("link", "waits"), [(8.0, 0.0), (4.0, 2 + 1), (2.0, 6 + 6)])
def test_streamed_weights_are_predicted_to_be_copied_for_each_pass_while_gradients_leave(link, waits):
    """Forward takes 2 seconds and backward 4, in which 20 bytes of gradients also leave."""
    for micro_batches in (1, 3):
        found = streamed(link, "clip=1.0", micro_batches=micro_batches)
        assert found.passes == micro_batches * 6 and found.transfers == pytest.approx(micro_batches * waits)


def test_micro_batches_in_order_by_layer_are_predicted_to_share_the_copies_of_the_weights():
    """The weights are copied once for forward (16 bytes) and once for backward (12 bytes) of all micro-batches. The
    sums of the blocks' 8 gradients leave once (4 bytes each), and the other 2 gradients leave in each of 3
    micro-batches (2 bytes each). A streamed head is copied for each micro-batch."""
    by_layer = ("clip=1.0", "weights=streamed", "weights.order=by_layer", "gradient_checkpointing=offload")
    found = streamed(4.0, *by_layer, micro_batches=3, trained_in_blocks=8)
    assert found.passes == 6 and found.transfers == pytest.approx((4 - 2) + (11 - 4))
    assert streamed(4.0, *by_layer, trained_in_blocks=8).transfers == pytest.approx(
        (4 - 2) + (5 - 4)
    )  # one micro-batch
    head = streamed(4.0, *by_layer, micro_batches=3, trained_in_blocks=8, head=4)
    assert head.transfers == pytest.approx((4 + 3 - 2) + (11 - 4))
    here = step_time.window(card(1.0).host, cfg("precision=bf16-master", *by_layer), shapes(), TAKEN, 3)
    assert here.passes == 6


def test_last_streamed_block_is_predicted_to_need_no_second_copy_for_backward():
    """Backward waits 2 seconds. In the wrong variant, the last block is copied again, and backward waits 4 seconds."""
    assert streamed(2.0, "clip=1.0", **FROZEN).transfers == pytest.approx(6 + 2)
    assert streamed(2.0, "clip=1.0", **FROZEN, blocks=(4, 0)).transfers == pytest.approx(6 + 4)


def test_offloaded_block_inputs_and_streamed_weights_are_predicted_to_share_the_link():
    """6 bytes of block inputs take 2 seconds in each direction. Forward hides them. Backward does not, because weights
    use the link during all 4 seconds of backward."""
    alone, both = streamed(3.0, "clip=1.0", **FROZEN), streamed(3.0, "clip=1.0", **FROZEN, offloaded=6)
    assert alone.transfers == pytest.approx(16 / 3 - 2) and both.transfers == pytest.approx(16 / 3 - 2 + 2)


@pytest.mark.parametrize(
    ("duplex", "up", "down", "takes"),
    [(1.0, 6, 4, 6), (0.5, 6, 4, 8), (0.5, 2, 4, 4), (0.5, 1, 4, 4), (0.5, 6, 0, 6), (0.25, 0, 4, 4)],
)
def test_predicted_half_duplex_link_slows_copies_to_the_card_while_copies_to_the_host_run(duplex, up, down, takes):
    """With duplex=0.5, copies to the card run at half the rate while copies to the host run. With up=6 and down=4, a
    third of the copies to the card is done in these 4 seconds, and the other two thirds take 4 more seconds."""
    assert Load(up=up, down=down).seconds(cards.LinkBandwidth(1.0, 1.0, duplex)) == takes


def test_predicted_half_duplex_link_slows_streamed_weights_while_gradients_leave():
    """While gradients leave for 10 seconds, weights arrive at half the rate: 5 of 6 seconds of copies are done, and 1
    second follows."""
    assert streamed(2.0, "clip=1.0", duplex=0.5).transfers == pytest.approx(6 + (10 + 1 - 4))
    assert streamed(2.0, "clip=1.0", duplex=0.9).transfers == pytest.approx(
        6 + 6
    )  # the weights arrive before all gradients have left
    assert streamed(2.0, "clip=1.0", **FROZEN, duplex=0.5).transfers == pytest.approx(6 + 2 + 0.5 * 2)


def test_predicted_half_duplex_link_slows_streamed_weights_while_block_inputs_leave():
    """Block inputs leave for 2 seconds in forward, and gradients for 4 / 3 seconds in backward. With duplex=0.5, half
    of each time is added."""
    alone, shared = (streamed(3.0, "clip=1.0", **FROZEN, offloaded=6, duplex=share) for share in (1.0, 0.5))
    assert shared.transfers == pytest.approx(alone.transfers + 2 / 2 + 4 / 3 / 2)


def both_shares(asked, found):
    return [step_time.window(card(2.0, duplex=share), asked, found, TAKEN, 2) for share in (1.0, 0.5)]


def test_predicted_half_duplex_link_is_as_fast_as_full_duplex_if_copies_run_in_one_direction():
    """In both runs, copies go in one direction at a time. With masters, gradients leave in backward and weights return
    in forward. With an update on the card, block inputs leave in forward and return in backward."""
    for asked, found in (
        (cfg("precision=bf16-master", "clip=1.0"), shapes()),
        (cfg("precision=bf16"), shapes(steps_on_host=False, offloaded=6)),
    ):
        alone, shared = both_shares(asked, found)
        assert alone == shared


def test_weights_updated_early_are_predicted_to_return_to_the_card_while_gradients_leave():
    """Gradients and weights take 10 seconds each. With duplex=0.5, half of the weights have returned when the last
    gradient has left, and the other half takes 5 more seconds."""
    alone, shared = both_shares(cfg("precision=bf16-master", "clip=null"), shapes())
    host = 0.5 + 3 + 2 * 20 / 1 - 10  # the host stages at one byte per second, which is slower than the link
    assert alone.step == shared.step == pytest.approx(host)
    early = cfg("precision=bf16-master", "clip=null")
    fast = [step_time.window(card(2.0, 1e9, share), early, shapes(), TAKEN, 1) for share in (1.0, 0.5)]
    assert [one.step for one in fast] == pytest.approx([1.2, 5.0])


def test_only_resident_weights_are_predicted_to_be_copied_back_after_the_host_update():
    """Only the 2 resident parameters are copied to the card after their update, in 2 seconds. In the wrong variant, 10
    parameters are copied in 10 seconds."""
    assert streamed(2.0, "clip=1.0").step == pytest.approx(0.5 + 2)
    assert streamed(2.0, "clip=1.0", trained_parameters=18).step == pytest.approx(0.5 + 10)
    early = streamed(2.0, "clip=null", **(FROZEN | {"trained_parameters": 9}))
    assert early == (6.0, pytest.approx(6 + 5), pytest.approx(1 / 3))  # the update of one of 9 parameters


def test_every_copy_on_a_cpu_adds_to_the_predicted_time():
    here = card(1.0).host
    found = step_time.window(here, cfg("precision=bf16-master"), shapes(), TAKEN | {"travel": 0.5, "sum": 0.25}, 3)
    assert found.transfers == 3 * 0.75


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("rtx3060", 663), ("rtx4060ti-16gb", 2235), ("rtx4090", 4337), ("rtx5090", 2078), ("h100", 9787)],
)
def test_tokens_from_which_streaming_is_free_follow_from_card_rates(name, tokens):
    """The expected number is 0.65 x FLOP/s divided by the link's bytes/s; for the RTX 3060, 0.65 x 25.5e12 / 25e9."""
    there = machine(True, cards.named(name))
    assert step_time.free_from(there, "bfloat16") == pytest.approx(tokens, abs=1)


def test_streaming_is_predicted_to_be_free_if_forward_takes_as_long_as_the_copy_of_the_weights():
    """The rates are chosen so that streaming 1000 weights is free from 50 tokens on."""
    share = step_time.REACHED / COMPUTE
    there = replace(card(4.0), flops={"bfloat16": 50 * 4.0 / share})
    for tokens, waits in ((50, 0.0), (25, 250.0)):
        forward = 2 * 1000 * tokens / (share * there.flops["bfloat16"])
        taken = TAKEN | {"forward": forward, "backward": 3 * forward}
        found = step_time.window(there, cfg("precision=bf16-master"), shapes(streamed=2000), taken, 1)
        assert found.transfers == pytest.approx(waits + max(0.0, 500 - 3 * forward))
    assert step_time.free_from(there, "bfloat16") == pytest.approx(50)
