"""Tests `StagedLink` with copies that run late, as on a card, and with deliberately missing waits."""

import threading

import pytest
import torch
from lightning.pytorch.strategies import strategy

import races
from lowmem.model.blocks import blocks
from lowmem.offload.copy_lanes import CardLane
from lowmem.offload.host_optimizer import HostOptimizer
from lowmem.offload.link import StagedLink
from lowmem.offload.master_weights import MasterWeights
from lowmem.techniques.precision.masters import BFloat16Master
from lowmem.techniques.strategy.in_place import InPlace
from made_up import SlowLane
from streams import lines, trained
from two_models import OPTIMIZERS, PRECISIONS, configured, equal, naive, ours


@pytest.mark.rows("adamw-norm", "adafactor-off")
@pytest.mark.parametrize("clip", ["norm", "off"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_staged_link_with_late_copies_has_the_bits_of_a_naive_training_loop(config, clip, optim):
    for precision, loss in zip(PRECISIONS, ("chunked", "full"), strict=True):
        cfg = configured(config, precision, optim, clip, "fixed", "linear", f"loss={loss}", "max_steps=3")
        assert equal(ours(cfg, SlowLane()), naive(cfg))


def test_link_moves_4_bytes_per_parameter_per_step_in_both_directions_together(config):
    lane, cfg = SlowLane(), configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    parameters = sum(p.numel() for p in ours(cfg, lane)[0])
    assert lane.moved == 3 * (2 + 2) * parameters


def without_calls_of_the_layers(module):
    """Makes each MLP use its layers without calling their hooks, like a fused kernel that reads the layers' weights."""

    def fuse(mlp):
        mlp.forward = lambda x: mlp.dropout(mlp.c_proj.forward(mlp.act(mlp.c_fc.forward(x))))

    for block in blocks(module.model):
        fuse(block.mlp)


def test_kernel_that_bypasses_layer_calls_reads_weights_that_the_host_has_updated(config):
    arguments = lines("gpt2", "max_steps=3")
    right = trained(config, ["weights=resident"], "gpt2", arguments)
    fused = {"lane": SlowLane(), "prepare": without_calls_of_the_layers}
    assert trained(config, ["weights=resident"], "gpt2", arguments, **fused).same(right)


class Gate:
    """Holds the host thread in the first update of each step until the training loop has called the method that is
    passed to `until`, so that the outcome of a race does not depend on timing."""

    def __init__(self, monkeypatch):
        self.patch, self.there, self.open = monkeypatch, threading.Event(), threading.Event()
        step = HostOptimizer.step_one

        def held(optimizer, group, p):
            self.there.set()
            assert self.open.wait(60)
            if p.grad is not None:  # an optimizer ignores a weight without a gradient
                step(optimizer, group, p)

        monkeypatch.setattr(HostOptimizer, "step_one", held)
        self._around(BFloat16Master, "optimizer_step", before=lambda: (self.there.clear(), self.open.clear()))

    def until(self, owner, name, before=lambda: None):
        self._around(owner, name, before, self.open.set)

    def _around(self, owner, name, before, after=lambda: None):
        inner = getattr(owner, name)

        def around(*args, **kwargs):
            before()
            inner(*args, **kwargs)
            after()

        self.patch.setattr(owner, name, around)


@pytest.mark.wrong
def test_forward_that_does_not_wait_for_updated_weights_differs_from_a_naive_loop_or_raises_an_in_place_error(
    config, monkeypatch
):
    """In the wrong variant, the next forward pass reads weights before the copies of the updated weights have
    arrived."""
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    right, gate = naive(cfg), Gate(monkeypatch)
    gate.until(MasterWeights, "on_before_backward")
    gate.until(MasterWeights, "on_train_end", before=gate.open.set)  # after the last step there is no backward pass
    races.weight_read_before_it_is_back(monkeypatch)
    try:
        assert not equal(ours(cfg, SlowLane()), right)
    except RuntimeError as error:  # a weight arrived while backward still read its old value
        assert "modified by an inplace operation" in str(error)


@pytest.mark.parametrize("waited", [True, False], ids=["waited", "not waited"])
def test_weights_at_the_end_of_a_run_have_the_last_update_unless_waiting_for_the_host_is_left_out(
    config, monkeypatch, waited
):
    """The export reads these weights. In the wrong variant ("not waited"), the run ends before the host has finished
    its updates, so the weights must differ."""
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=1")
    gate, found, teardown = Gate(monkeypatch), [], InPlace.teardown

    def copied(strategy):
        found[:] = [p.detach().clone() for p in strategy.lightning_module.model.parameters()]
        gate.open.set()
        teardown(strategy)

    monkeypatch.setattr(InPlace, "teardown", copied)
    if waited:
        gate.until(MasterWeights, "on_train_end", before=gate.open.set)
    else:
        monkeypatch.setattr(MasterWeights, "arrived", lambda self: None)
    assert all(map(torch.equal, found, ours(cfg, SlowLane())[1])) == waited


@pytest.mark.parametrize("disturbed", [False, True], ids=["undisturbed", "disturbed"])
def test_host_update_during_the_training_loop_equals_a_naive_loop_unless_host_gradients_are_dropped(
    config, monkeypatch, disturbed
):
    """The training loop drops gradients and steps the schedule while the host thread still updates weights. In the
    wrong variant ("disturbed"), the loop also drops the gradients that the host thread needs."""
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    right, gate = naive(cfg), Gate(monkeypatch)
    if disturbed:
        monkeypatch.setattr(HostOptimizer, "drop_gradients", lambda self, stepped: self.zero_grad(set_to_none=True))
    gate.until(HostOptimizer, "drop_gradients", before=lambda: gate.there.wait(60))  # the schedule was stepped before
    assert equal(ours(cfg, SlowLane()), right) != disturbed


def test_error_of_the_training_loop_is_raised_after_the_host_thread_has_ended(config, monkeypatch):
    """After an error, Lightning iterates over the optimizer's state. By then the host thread must have ended, because
    it adds entries to the state."""
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    gate, walked = Gate(monkeypatch), []

    def breaks(*_):
        gate.there.wait(60)
        gate.open.set()
        raise ZeroDivisionError("in the loop")

    def walk(*_):
        walked.append([thread.name for thread in threading.enumerate()])

    monkeypatch.setattr(HostOptimizer, "drop_gradients", breaks)
    monkeypatch.setattr(strategy, "_optimizers_to_device", walk)
    with pytest.raises(ZeroDivisionError, match="in the loop"):
        ours(cfg, SlowLane())
    assert walked and "host-step" not in walked[-1]


def test_error_of_the_host_thread_is_raised_and_ends_the_run(config, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("on the host")

    monkeypatch.setattr(HostOptimizer, "_step", broken)
    with pytest.raises(ZeroDivisionError, match="on the host"):
        ours(configured(config, "bf16-master", "adamw", "off", "none", "linear"), SlowLane())


def test_gradients_wait_on_the_device_up_to_a_byte_limit_and_keep_their_order():
    """There are two slots of 64 bytes, whose copies are blocked. Up to 160 bytes of further gradients may wait on the
    device before `fetch` blocks. All requests are completed in the order of the calls."""
    arrives, done = threading.Event(), []

    class Still(SlowLane):
        def copy(self, to, source, after):
            to.copy_(source)
            return self

        def synchronize(self):
            assert arrives.wait(60)

    link = StagedLink(Still(), slot_bytes=64, slots=2)
    link.ahead = 160

    def fetch(number, elements):
        link.fetch(torch.full((elements,), float(number)), lambda start, piece: done.append(float(piece[0])))

    fetch(1, 16), fetch(2, 16), fetch(3, 20), fetch(4, 20)
    link._ask(lambda: done.append("step"))
    assert done == []
    late = threading.Thread(target=fetch, args=(5, 1), daemon=True)  # 4 bytes beyond the limit
    late.start()
    late.join(0.2)
    assert late.is_alive()
    arrives.set()
    late.join(60)
    link.finish()
    link.close()
    assert done == [1.0, 2.0, 3.0, 3.0, 4.0, 4.0, "step", 5.0]


@pytest.mark.parametrize("ahead", [0, 160])
def test_error_of_a_gradient_copy_to_the_host_is_raised_without_a_deadlock(ahead):
    """The gradient has many more pieces than there are slots. If a slot were not released after a failed copy, the next
    piece would wait for a slot forever."""

    class Broken(SlowLane):
        def copy(self, to, source, after):
            return self

        def synchronize(self):
            raise ZeroDivisionError("in the copy")

    link = StagedLink(Broken(), slot_bytes=64, slots=2)
    link.ahead = ahead
    with pytest.raises(ZeroDivisionError, match="in the copy"):
        link.fetch(torch.ones(1000), lambda start, piece: None)
        link.finish()
    link.close()


@pytest.mark.parametrize("ahead", [0, 160])
def test_link_closed_after_one_fit_receives_the_gradients_of_a_second_fit(ahead):
    link, taken = StagedLink(SlowLane(), slot_bytes=64, slots=2), []
    link.ahead = ahead
    for _ in range(2):
        link.fetch(torch.ones(4), lambda start, piece: taken.append(float(piece.sum())))
        link.finish()
        link.close()
    assert taken == [4.0, 4.0]


def test_gradient_is_flattened_before_its_copy_event_is_recorded(monkeypatch):
    """Flattening a transposed gradient launches a copy on the device. The event must be recorded after this copy."""
    done, link = [], StagedLink(SlowLane(), slot_bytes=64, slots=2)
    mark, reshape = link.lane.mark, torch.Tensor.reshape
    monkeypatch.setattr(link.lane, "mark", lambda: done.append("mark") or mark())
    monkeypatch.setattr(torch.Tensor, "reshape", lambda one, *to: done.append("flat") or reshape(one, *to))
    link.fetch(torch.ones(2, 3).T, lambda start, piece: None)
    link.close()
    assert done.index("flat") < done.index("mark")


# --- on a card --------------------------------------------------------------------------------------------------------

ELEMENTS = 5_000_000  # 20 MB: the caching allocator gives it a separate segment
LONG = 200_000_000  # cycles for which a stream is busy: about 0.1 s


@pytest.fixture
def lane():
    torch.cuda.empty_cache()
    return CardLane(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["norm", "off"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_staged_link_on_a_card_has_the_bits_of_a_naive_training_loop(config, deterministic, lane, precision, clip):
    """Trains once with two small slots, for which copies wait for each other, and once with the default slots."""
    cfg = configured(config, precision, "adamw8bit", clip, "fixed", "linear", "loss=chunked", "device=cuda")
    right = naive(cfg)
    assert equal(ours(cfg, lane), right) and equal(ours(cfg), right)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_copy_on_a_card_waits_for_its_source_unless_given_an_earlier_event(lane, wrong):
    slot, gradient = lane.staging(4 * ELEMENTS), torch.zeros(ELEMENTS, device="cuda")
    assert slot.is_pinned()
    torch.cuda.synchronize()
    too_early = lane.mark()
    torch.cuda._sleep(LONG)
    gradient.fill_(1.0)
    lane.copy(slot.view(torch.float32), gradient, too_early if wrong else lane.mark()).synchronize()
    assert bool((slot.view(torch.float32) == 1.0).all()) != wrong


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_memory_of_a_pending_copy_on_a_card_is_not_reused_unless_record_stream_is_left_out(lane, monkeypatch, wrong):
    if wrong:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    slot, gradient = lane.staging(4 * ELEMENTS).view(torch.float32), torch.ones(ELEMENTS, device="cuda")
    torch.cuda.synchronize()
    with lane._down:
        torch.cuda._sleep(LONG)
    landed, place = lane.copy(slot, gradient, lane.mark()), gradient.data_ptr()
    del gradient
    other = torch.full((ELEMENTS,), 2.0, device="cuda")
    landed.synchronize()
    assert (other.data_ptr() == place) == wrong
    assert bool((slot == 1.0).all()) != wrong


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_compute_on_a_card_waits_for_a_copied_weight_unless_the_wait_is_left_out(lane, wrong):
    rounded, weight = lane.staging(4 * ELEMENTS).view(torch.float32).fill_(1.0), torch.zeros(ELEMENTS, device="cuda")
    with lane._up:
        torch.cuda._sleep(LONG)
    landed = lane.copy(weight, rounded, lane.mark())
    if not wrong:
        lane.hold(landed)
    read = weight.clone()
    torch.cuda.synchronize()
    assert bool((read == 1.0).all()) != wrong
