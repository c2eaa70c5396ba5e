"""The staged link on a lane whose copies run late: what a card would do, and the races that it would bring."""

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
def test_staged_link_has_the_bits_of_the_naive_loop(config, clip, optim):
    for precision, loss in zip(PRECISIONS, ("chunked", "full"), strict=True):
        cfg = configured(config, precision, optim, clip, "fixed", "linear", f"loss={loss}", "max_steps=3")
        assert equal(ours(cfg, SlowLane()), naive(cfg))


def test_link_moves_2_bytes_per_parameter_down_and_2_up_per_step(config):
    lane, cfg = SlowLane(), configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    parameters = sum(p.numel() for p in ours(cfg, lane)[0])
    assert lane.moved == 3 * (2 + 2) * parameters


def without_calls_of_the_layers(module):
    """Makes each MLP read the weights of its layers without calling these layers, as a fused kernel does."""

    def fuse(mlp):
        mlp.forward = lambda x: mlp.dropout(mlp.c_proj.forward(mlp.act(mlp.c_fc.forward(x))))

    for block in blocks(module.model):
        fuse(block.mlp)


def test_fused_kernel_reads_weights_that_the_host_has_updated(config):
    arguments = lines("gpt2", "max_steps=3")
    right = trained(config, ["weights=resident"], "gpt2", arguments)
    fused = {"lane": SlowLane(), "prepare": without_calls_of_the_layers}
    assert trained(config, ["weights=resident"], "gpt2", arguments, **fused).same(right)


class Gate:
    """Holds the host thread in the first step of a window until the loop has done `until`, so that no race is luck."""

    def __init__(self, monkeypatch):
        self.patch, self.there, self.open = monkeypatch, threading.Event(), threading.Event()
        step = HostOptimizer.step_one

        def held(optimizer, group, p):
            self.there.set()
            assert self.open.wait(60)
            if p.grad is not None:  # without one an optimizer says nothing and steps nothing
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
def test_forward_that_does_not_wait_for_its_weights_has_other_bits(config, monkeypatch):
    """The deliberately wrong variant: the next forward pass reads what has not come back yet."""
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    right, gate = naive(cfg), Gate(monkeypatch)
    gate.until(MasterWeights, "on_before_backward")
    gate.until(MasterWeights, "on_train_end", before=gate.open.set)  # after the last step there is no backward pass
    races.weight_read_before_it_is_back(monkeypatch)
    try:
        assert not equal(ours(cfg, SlowLane()), right)
    except RuntimeError as error:  # where it came back while backward was still reading the old one
        assert "modified by an inplace operation" in str(error)


@pytest.mark.parametrize("waited", [True, False])
def test_weights_at_the_end_of_a_run_are_those_of_the_last_step(config, monkeypatch, waited):
    """The export reads them. The wrong variant: the host still steps, as after a run that saves nothing."""
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


@pytest.mark.parametrize("disturbed", [False, True])
def test_host_step_is_not_disturbed_by_the_training_loop(config, monkeypatch, disturbed):
    """The loop drops gradients and steps the schedule while the host still steps; disturbed: it drops those, too."""
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    right, gate = naive(cfg), Gate(monkeypatch)
    if disturbed:
        monkeypatch.setattr(HostOptimizer, "drop_gradients", lambda self, stepped: self.zero_grad(set_to_none=True))
    gate.until(HostOptimizer, "drop_gradients", before=lambda: gate.there.wait(60))  # the schedule was stepped before
    assert equal(ours(cfg, SlowLane()), right) != disturbed


def test_error_of_the_training_loop_is_raised_while_the_host_steps(config, monkeypatch):
    """Lightning walks through the optimizer's state when a run ends by an error; the host adds to it until then."""
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


def test_error_of_the_host_thread_ends_the_run(config, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("on the host")

    monkeypatch.setattr(HostOptimizer, "_step", broken)
    with pytest.raises(ZeroDivisionError, match="on the host"):
        ours(configured(config, "bf16-master", "adamw", "off", "none", "linear"), SlowLane())


def test_gradients_queue_on_the_device_up_to_a_byte_limit():
    """Two slots of 64 bytes are taken and their copies stand still; 160 bytes more may wait, and what is asked for
    meanwhile keeps its place."""
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
    late = threading.Thread(target=fetch, args=(5, 1), daemon=True)  # 4 bytes that have no room
    late.start()
    late.join(0.2)
    assert late.is_alive()
    arrives.set()
    late.join(60)
    link.finish()
    link.close()
    assert done == [1.0, 2.0, 3.0, 3.0, 4.0, 4.0, "step", 5.0]


@pytest.mark.parametrize("ahead", [0, 160])
def test_error_of_a_copy_is_raised_without_a_deadlock(ahead):
    """Many more pieces than slots: a slot that did not come back would be waited for."""

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
def test_closed_link_serves_a_second_fit(ahead):
    link, taken = StagedLink(SlowLane(), slot_bytes=64, slots=2), []
    link.ahead = ahead
    for _ in range(2):
        link.fetch(torch.ones(4), lambda start, piece: taken.append(float(piece.sum())))
        link.finish()
        link.close()
    assert taken == [4.0, 4.0]


def test_gradient_is_flattened_before_its_copy_event_is_recorded(monkeypatch):
    """To flatten one that lies otherwise is work for the device, of which the mark must know."""
    done, link = [], StagedLink(SlowLane(), slot_bytes=64, slots=2)
    mark, reshape = link.lane.mark, torch.Tensor.reshape
    monkeypatch.setattr(link.lane, "mark", lambda: done.append("mark") or mark())
    monkeypatch.setattr(torch.Tensor, "reshape", lambda one, *to: done.append("flat") or reshape(one, *to))
    link.fetch(torch.ones(2, 3).T, lambda start, piece: None)
    link.close()
    assert done.index("flat") < done.index("mark")


# --- on a card --------------------------------------------------------------------------------------------------------

ELEMENTS = 5_000_000  # 20 MB: a segment of its own
LONG = 200_000_000  # cycles that a stream is kept busy: a tenth of a second


@pytest.fixture
def lane():
    torch.cuda.empty_cache()
    return CardLane(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("clip", ["norm", "off"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_card_the_staged_link_has_the_bits_of_the_naive_loop(config, deterministic, lane, precision, clip):
    """Through few small slots, where everything has to wait for everything, and through the run's own."""
    cfg = configured(config, precision, "adamw8bit", clip, "fixed", "linear", "loss=chunked", "device=cuda")
    right = naive(cfg)
    assert equal(ours(cfg, lane), right) and equal(ours(cfg), right)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_on_a_card_a_copy_waits_for_the_computation_of_its_source(lane, wrong):
    slot, gradient = lane.staging(4 * ELEMENTS), torch.zeros(ELEMENTS, device="cuda")
    assert slot.is_pinned()
    torch.cuda.synchronize()
    too_early = lane.mark()
    torch.cuda._sleep(LONG)
    gradient.fill_(1.0)
    lane.copy(slot.view(torch.float32), gradient, too_early if wrong else lane.mark()).synchronize()
    assert bool((slot.view(torch.float32) == 1.0).all()) != wrong


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_on_a_card_memory_of_a_pending_copy_is_not_reused(lane, monkeypatch, wrong):
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
@pytest.mark.parametrize("wrong", [False, True])
def test_on_a_card_compute_waits_for_the_copied_weight(lane, wrong):
    rounded, weight = lane.staging(4 * ELEMENTS).view(torch.float32).fill_(1.0), torch.zeros(ELEMENTS, device="cuda")
    with lane._up:
        torch.cuda._sleep(LONG)
    landed = lane.copy(weight, rounded, lane.mark())
    if not wrong:
        lane.hold(landed)
    read = weight.clone()
    torch.cuda.synchronize()
    assert bool((read == 1.0).all()) != wrong
