"""Tests `weights.order=by_layer`, which runs all micro-batches of a window through a block before the next block
computes. The trained weights are bit-identical to those of resident weights and of `by_micro_batch`, and a window
copies each block at most once for forward and once for backward.

`MATRIX` has few rows. For any two of model, policy, loss, slots and precision, each pair of values occurs in some row.
"""

import threading
from _thread import interrupt_main
from dataclasses import replace
from itertools import count, product

import pytest
import torch
from torch import nn

import races
from lowmem.config.check import check
from lowmem.memory.tracker import StorageTracker
from lowmem.model.auxiliary_loss import AuxiliaryLoss
from lowmem.offload.by_layer import NAME, ByLayer
from lowmem.offload.link import Link
from lowmem.offload.micro_batches import Generators
from lowmem.offload.streamed import StreamedWeights
from lowmem.system.errors import Refused
from lowmem.techniques.gradient_checkpointing.boundary import OnDevice
from lowmem.techniques.weights.streamed import Streamed
from lowmem.training.module import CausalLM
from made_up import ClockLane, LateLane
from networks import network
from pairwise import pairwise
from same import last, same
from streams import MODELS, lines, trained
from traced_lane import TracedLane, watched

CPU = torch.device("cpu")
RESIDENT, ONE_BY_ONE = ("weights=resident",), ("weights=streamed", "weights.order=by_micro_batch")
BY_LAYER = ("weights=streamed", "weights.order=by_layer")
LOSSES = {"full": ["loss=full"], "chunked": ["loss=chunked", "loss.rows=7"], "tiled": ["loss=tiled", "loss.columns=64"]}
POLICIES, MASTERS = ("every_layer", "selective", "offload"), ("bf16-master", "16-master")
MATRIX = pairwise(MODELS, POLICIES, LOSSES, (2, 3), MASTERS)


def is_same(config, arguments, model, weights=BY_LAYER, **how):
    """Asserts that a run with streamed weights and a run with resident weights train bit-identical weights. Returns the
    streamed run."""
    streamed = trained(config, weights, model, arguments, **how)
    assert trained(config, RESIDENT, model, arguments).same(streamed)
    return streamed


def of_size(micro_batches, *more):
    """Returns overrides for windows of `micro_batches` micro-batches. An epoch has nine micro-batches of one
    sequence."""
    return ("batch_size=1", f"accumulation.batches={micro_batches}", *more)


@pytest.mark.kernels
@pytest.mark.rows("qwen3_moe-every_layer-chunked-2-16-master", "llama-offload-full-2-bf16-master")
@pytest.mark.parametrize(("model", "policy", "loss", "slots", "precision"), MATRIX)
def test_by_layer_training_has_the_bits_of_resident_weights(config, model, policy, loss, slots, precision):
    arguments = lines(model, *LOSSES[loss], "max_steps=2", precision=precision, policy=policy)
    by_layer = is_same(config, arguments, model, (*BY_LAYER, f"weights.slots={slots}"))
    assert precision == "bf16-master" or by_layer.skipped > 0


@pytest.mark.kernels
@pytest.mark.rows("3-off-*", "8-norm-adamw8bit")
@pytest.mark.parametrize(
    ("micro_batches", "clip", "optim"), list(product((1, 2, 3, 8), ("norm", "off"), ("adamw8bit", "adamw")))
)
def test_by_layer_and_by_micro_batch_have_the_bits_of_resident_weights_with_1_to_8_micro_batches_per_step(
    config, micro_batches, clip, optim
):
    """An epoch has nine micro-batches, so with eight micro-batches per window its second window has only one."""
    arguments = lines("gpt2", *of_size(micro_batches), "max_steps=2", clip=clip, optim=optim)
    is_same(config, arguments, "gpt2")
    is_same(config, arguments, "gpt2", ONE_BY_ONE)


@pytest.mark.kernels
@pytest.mark.parametrize("clip", ["off", pytest.param("norm", marks=pytest.mark.matrix)])
def test_by_layer_has_the_bits_of_resident_weights_when_accumulation_windows_shrink(config, clip):
    arguments = list(lines("llama", "batch_size=2", "accumulation.sizes={0: 3, 2: 1}", "max_steps=4", clip=clip))
    arguments[3] = "by_step"
    is_same(config, arguments, "llama")


@pytest.mark.parametrize(
    ("precision", "clip"),
    [("bf16-master", "norm"), ("16-master", "off"), pytest.param("bf16-master", "off", marks=pytest.mark.matrix)],
)
def test_by_layer_has_the_bits_of_resident_weights_when_accumulation_windows_grow_and_shrink(config, precision, clip):
    """The windows have 1, 1, 3, 3, 1 and 3 micro-batches; the fifth window ends an epoch. A window of one micro-batch
    has a 16-bit gradient buffer, which must not round the fp32 gradient sums of the next window."""
    sizes = ("batch_size=1", "accumulation.sizes={0: 1, 2: 3}")
    arguments = list(lines("llama", *sizes, "max_steps=6", precision=precision, clip=clip))
    arguments[3] = "by_step"
    by_layer = trained(config, BY_LAYER, "llama", arguments)
    assert by_layer.same(trained(config, RESIDENT, "llama", arguments))
    assert precision == "bf16-master" or by_layer.skipped > 0


@pytest.mark.kernels
@pytest.mark.parametrize("case", ["stays", pytest.param("sliced", marks=pytest.mark.matrix), "rounded"])
def test_by_layer_has_the_bits_of_by_micro_batch_with_resident_blocks_sliced_modules_or_no_masters(config, case):
    more, weights = {
        "stays": ([], [*BY_LAYER, "weights.resident_blocks=2"]),
        "sliced": (["tile.tokens=5"], BY_LAYER),
    }.get(case, ([], BY_LAYER))
    how = {"precision": "bf16-sr"} if case == "rounded" else {}
    arguments = lines("llama", "loss=chunked", "max_steps=2", *more, **how)
    assert trained(config, weights, "llama", arguments).same(trained(config, ONE_BY_ONE, "llama", arguments))


@pytest.mark.parametrize("policy", ["offload", pytest.param("selective", marks=pytest.mark.matrix)])
def test_by_layer_with_randomly_late_copies_has_the_bits_of_resident_weights(config, policy):
    arguments = lines("llama", "loss=chunked", "max_steps=2", policy=policy, clip="off")
    is_same(config, arguments, "llama", lane=LateLane(seed=1))


RUN = (
    *("gradient_checkpointing=every_layer", "accumulation=fixed", "accumulation.batches=3", "batch_size=1", "lr=1e-2"),
    *("scheduler.total_steps=4", "max_steps=4", "val_every=2", "sample_tokens=3", "precision=bf16-master"),
    *("model.architecture.n_layer=4", "model.architecture.resid_pdrop=0.1", "optim=adamw8bit"),
)


def test_by_layer_run_resumed_by_layer_or_by_micro_batch_has_the_bits_of_a_resident_run(fit, tmp_path):
    one, right = fit(*RUN, folder="resident")
    fit(*RUN, *BY_LAYER, "max_steps=2", folder="first")
    other, resumed = fit(*RUN, *BY_LAYER, f"resume={tmp_path / 'first'}", folder="second")
    _, turned = fit(*RUN, *ONE_BY_ONE, f"resume={tmp_path / 'first'}", folder="third")
    assert one["val_loss"] == other["val_loss"] and same(last(resumed), last(right)) and same(last(turned), last(right))
    samples = [(folder / "samples.jsonl").read_text().splitlines()[-1] for folder in (right, resumed, turned)]
    assert len(set(samples)) == 1


def test_by_layer_evaluation_and_samples_have_the_bits_of_resident_weights(fit, monkeypatch):
    """Nine texts are evaluated in groups of two. A group copies each of the four blocks at most once, and prefetches
    one block for the next group. In the wrong variant, all prompts draw from one random generator, so the samples
    differ."""
    typed = [*RUN, "val_sequences=9", "sample_prompts=[a,longer than that,b]", "max_steps=1", "accumulation.batches=2"]

    def written(*weights, folder):
        copied = []
        evaluate = CausalLM.validation_step

        def counting(self, *args):
            before = getattr(self.weights, "fetched", 0)
            evaluate(self, *args)
            copied.append(getattr(self.weights, "fetched", 0) - before)

        with monkeypatch.context() as patch:
            patch.setattr(CausalLM, "validation_step", counting)
            summary, where = fit(*typed, *weights, folder=folder)
        return summary["val_loss"], (where / "samples.jsonl").read_text(), copied

    loss, samples, _ = written("weights=resident", folder="resident")
    assert (loss, samples) == written(*ONE_BY_ONE, folder="one-by-one")[:2]
    by_layer = written(*BY_LAYER, folder="by-layer")
    assert (loss, samples) == by_layer[:2]
    assert len(by_layer[2]) == 1 + 5 and max(by_layer[2]) <= 4 + 1  # one group before training, five after it
    dropout_drawn_from_one_stream(monkeypatch)
    assert samples != written(*BY_LAYER, folder="wrong")[1]


# --- copies, and memory of the host -----------------------------------------------------------------------------------


def copies(config, micro_batches, weights=BY_LAYER):
    """Returns the number of block copies in a window of `micro_batches` micro-batches."""
    arguments = lines("llama", *of_size(micro_batches), "loss=chunked", "max_steps=1")
    return trained(config, weights, "llama", arguments).module.weights.fetched


def test_by_layer_copies_blocks_as_often_for_8_micro_batches_as_for_1(config):
    assert copies(config, 8) == copies(config, 1) and copies(config, 8, ONE_BY_ONE) == 7 * copies(config, 1)


def down(config, monkeypatch, micro_batches, weights=BY_LAYER):
    """Returns the bytes of block gradients that a window of `micro_batches` micro-batches copies to the host."""
    sent, fetch = [], Link.fetch

    def counting(self, gradient, receive):
        if ".layers." in getattr(getattr(receive, "__self__", None), "name", ""):
            sent.append(gradient.nbytes)
        fetch(self, gradient, receive)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "fetch", counting)
        trained(config, weights, "llama", lines("llama", *of_size(micro_batches), "loss=chunked", "max_steps=1"))
    return sum(sent)


def test_by_layer_copies_each_gradient_to_the_host_once_per_window_in_fp32(config, monkeypatch):
    one = down(config, monkeypatch, 1)
    assert down(config, monkeypatch, 8) == 2 * one and down(config, monkeypatch, 8, ONE_BY_ONE) == 8 * one


def test_by_layer_hides_a_link_four_times_slower_than_compute_in_a_window_of_eight(config):
    """Only the first copy of a step is not hidden behind computation. Computing a block takes 1 unit of time, and
    copying a block takes 4 units."""

    def time_over_compute(weights):
        lane, work = ClockLane(4.0), []

        def clocked(module):
            module.weights.lane = lane
            for block in module.weights.blocks:  # a pre-hook, because recomputation may stop before the end of the MLP
                block.mlp.register_forward_pre_hook(lambda *_: work.append(lane.computes(1.0)))

        trained(config, weights, "llama", lines("llama", *of_size(8), "loss=chunked", "max_steps=1"), prepare=clocked)
        return lane.now / len(work)

    assert time_over_compute(BY_LAYER) < 1.1 and time_over_compute(ONE_BY_ONE) > 3


@pytest.mark.parametrize(
    ("weights", "holds"), [(BY_LAYER, False), (ONE_BY_ONE, True)], ids=["by layer", "by micro-batch"]
)
def test_early_updates_keep_gradient_sums_of_blocks_by_micro_batch_but_not_by_layer(config, weights, holds):
    masters, arguments = [], lines("llama", *of_size(3), "loss=chunked", "max_steps=2", clip="off")

    def find(module):
        convert = module.weights.move_in

        def move_in(device):
            convert(device)
            masters.extend(module.masters.masters.values())

        module.weights.move_in = move_in

    trained(config, weights, "llama", arguments, lane=LateLane(seed=0), prepare=find)
    sums = [master.sum for master in masters if ".layers." in master.name]
    assert len(sums) > 20 and all((buffer is not None) == holds for buffer in sums)


# --- races ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "registers", "case"),
    [
        (2, True, ("gpt2", {"clip": "off"})),
        (3, False, ("llama", {"policy": "offload"})),
        pytest.param(2, False, ("qwen3_moe", {"precision": "16-master"}), marks=pytest.mark.matrix),
        pytest.param(3, True, ("qwen3", {"policy": "selective", "clip": "off"}), marks=pytest.mark.matrix),
    ],
    ids=["gpt2", "llama", "qwen3_moe", "qwen3"],
)
def test_by_layer_training_has_no_data_race(slots, registers, case):
    model, how = case
    weights = (*BY_LAYER, f"weights.slots={slots}")
    with watched() as found:
        races.run(TracedLane(found, registers), model, lines(model, "loss=chunked", "max_steps=2", **how), weights)
    assert found.errors == [], str(found.errors[0])
    assert found.checked > 500


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", [races.without_hold, races.slot_given_back_too_early])
def test_missing_wait_in_by_layer_is_found_as_a_data_race(monkeypatch, wrong):
    wrong(monkeypatch)
    with watched() as found:
        races.run(TracedLane(found), "llama", lines("llama", "loss=chunked", "max_steps=1"), BY_LAYER)
    assert found.errors


# --- deliberately wrong variants --------------------------------------------------------------------------------------


def dropout_drawn_from_one_stream(monkeypatch):
    monkeypatch.setattr(Generators, "resume", lambda self, number: None)


def gradients_added_in_another_order(monkeypatch):
    def wrong(self, p):
        gradients = [*self.sums.pop(p, []), p.grad]
        p.grad = None
        if self.current == len(self.runs) - 1:
            return sum((one.float() for one in reversed(gradients[:-1])), gradients[-1].float())
        self.sums[p] = gradients
        return None

    monkeypatch.setattr(ByLayer, "gradient", wrong)


def far_apart(module):
    """Multiplies the gradients of micro-batch n by 2**(-10 * n), so that their fp32 sum depends on the order of
    addition."""

    def smaller(p):
        calls = count()
        p.register_hook(lambda gradient: gradient * 2.0 ** (-10 * (next(calls) % 8)))

    for p in module.model.model.layers.parameters():  # without the embedding: a streamed embedding has row gradients
        smaller(p)


def test_by_layer_adds_gradients_in_the_order_of_the_micro_batches(config, monkeypatch):
    arguments = lines("llama", *of_size(8), "loss=full", "max_steps=1", optim="adamw")
    right = trained(config, RESIDENT, "llama", arguments, prepare=far_apart)
    assert trained(config, BY_LAYER, "llama", arguments, prepare=far_apart).same(right)
    gradients_added_in_another_order(monkeypatch)
    assert not trained(config, BY_LAYER, "llama", arguments, prepare=far_apart).same(right)


def counting_some(module):
    """Makes the auxiliary loss ignore tokens with ids divisible by 3, so that it counts a different number of tokens in
    each micro-batch."""
    forward = module.forward
    module.forward = lambda batch: forward(replace(batch, real=batch.input_ids % 3 > 0))


def test_by_layer_auxiliary_loss_counts_the_tokens_of_each_micro_batch(config):
    arguments = lines("qwen3_moe", "loss=full", "max_steps=2")
    right = trained(config, RESIDENT, "qwen3_moe", arguments, prepare=counting_some)
    assert trained(config, BY_LAYER, "qwen3_moe", arguments, prepare=counting_some).same(right)
    assert not trained(config, BY_LAYER, "qwen3_moe", arguments).same(right)


def auxiliary_loss_counted_once(monkeypatch):
    run = CausalLM.run_window

    def first_only(self, window):
        take, once = self.auxiliary_loss.take, iter([True])
        self.auxiliary_loss.take = lambda: take() * (1.0 if next(once, False) else 0.0)
        return run(self, window)

    monkeypatch.setattr(CausalLM, "run_window", first_only)


def own_loss_function_given_back_by_the_first_pass(monkeypatch):
    after = AuxiliaryLoss._after

    def wrong(self, *called):
        self._passes = 1
        after(self, *called)

    monkeypatch.setattr(AuxiliaryLoss, "_after", wrong)


def boundary_of_another_micro_batch(monkeypatch):
    fetch, before = OnDevice.fetch, []

    def wrong(self):
        before.append(fetch(self))
        same_shape = before[-2:][0].shape == before[-1].shape
        return before[-2] if len(before) > 1 and same_shape else before[-1]

    monkeypatch.setattr(OnDevice, "fetch", wrong)


WRONG = {
    dropout_drawn_from_one_stream: "gpt2",
    auxiliary_loss_counted_once: "qwen3_moe",
    own_loss_function_given_back_by_the_first_pass: "qwen3_moe",
    boundary_of_another_micro_batch: "llama",
}


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_by_layer_with_a_deliberate_fault_differs_from_resident_weights(config, monkeypatch, wrong):
    model = WRONG[wrong]
    arguments = lines(model, "loss=full", "max_steps=2")
    right = trained(config, RESIDENT, model, arguments)
    wrong(monkeypatch)
    assert not trained(config, BY_LAYER, model, arguments).same(right)


def test_by_layer_that_releases_blocks_after_each_micro_batch_copies_blocks_more_often(config, monkeypatch):
    right = copies(config, 8)
    enter = StreamedWeights.enter

    def wrong(self, number, count):
        enter(self, number, count)
        self.last = True

    monkeypatch.setattr(StreamedWeights, "enter", wrong)
    monkeypatch.setattr(ByLayer, "gradient", lambda self, p: None)  # no early updates
    assert copies(config, 8) > 1.05 * right


# --- errors -----------------------------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def raises_in_forward(module):
    calls = iter(range(6))  # the third micro-batch of the window, in the second block

    def hook(*_):
        if next(calls) == 2:
            raise Broken

    module.weights.blocks[1].register_forward_hook(hook)


def raises_in_backward(module):
    calls = iter(range(6))

    def hook(_, __, output):
        if next(calls) == 1 and output.requires_grad:
            output.register_hook(raising)

    def raising(_):
        raise Broken

    module.weights.blocks[1].register_forward_hook(hook)


def interrupts(module):
    calls = iter(range(6))
    module.weights.blocks[1].register_forward_hook(lambda *_: interrupt_main() if next(calls) == 1 else None)


def left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.mark.parametrize(
    ("breaks", "error"), [(raises_in_forward, Broken), (raises_in_backward, Broken), (interrupts, BaseException)]
)
@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.matrix)])
def test_by_layer_error_in_a_micro_batch_ends_all_threads_and_the_next_run_has_resident_bits(
    config, model, breaks, error
):
    arguments = lines(model, "loss=chunked", "max_steps=2")
    with pytest.raises(error) as raised:
        trained(config, BY_LAYER, model, arguments, prepare=breaks)
    assert left() == [] and "run_micro_batches" in str(raised.getrepr())
    is_same(config, arguments, model)
    assert left() == []


# --- barriers and threads ---------------------------------------------------------------------------------------------


class Made:
    """A micro-batch that waits at each of `barriers` in turn, and logs each barrier once it has passed it."""

    def __init__(self, number, log, barriers=(("forward", 0), ("forward", 1), ("backward", 1))):
        self.number, self.log, self.barriers = number, log, barriers

    def __call__(self):
        for barrier in self.barriers:
            self.window.barrier(barrier)
            self.log.append((self.number, barrier))


class Logged(Generators):
    """Logs when the random states of a micro-batch would be set ("resumes") and stored ("pauses")."""

    def __init__(self, count, log):
        super().__init__(CPU, [None] * count)
        self.log = log

    def resume(self, number):
        self.log.append((number, "resumes"))

    def pause(self, number):
        self.log.append((number, "pauses"))


def run(runs, log=None):
    window = ByLayer(runs, Logged(len(runs), [] if log is None else log), lambda number, count: None)
    for each in runs:
        each.window = window
    window.run()
    return window


def test_by_layer_waits_at_each_barrier_until_all_micro_batches_have_reached_the_barrier():
    log = []
    run([Made(number, log) for number in range(3)], log)
    reached = [entry for entry in log if isinstance(entry[1], tuple)]
    assert reached == [(n, barrier) for barrier in Made(0, log).barriers for n in range(3)]
    switches = [entry for entry in log if not isinstance(entry[1], tuple)]
    assert switches == [each for _ in range(4) for n in range(3) for each in ((n, "resumes"), (n, "pauses"))]


@pytest.mark.parametrize(
    "other",
    [(("forward", 1),), (), (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))],
    ids=["first block left out", "no block", "additional backward"],
)
def test_by_layer_refuses_micro_batches_that_run_different_blocks(other):
    with pytest.raises(Refused, match=r"weights\.order=by_micro_batch"):
        run([Made(0, []), Made(1, [], other), Made(2, [])])
    assert left() == []


def test_micro_batch_threads_inherit_grad_mode_device_and_dispatch_modes():
    seen = []

    class Looks(Made):
        def __call__(self):
            seen.append((torch.is_grad_enabled(), torch.ones(1).device.type, torch.full((1 << 16,), 1.0)))

    with StorageTracker({}) as tracker, torch.no_grad(), torch.device("cpu"):
        before = tracker.now
        run([Looks(0, []), Looks(1, [])])
        assert tracker.now - before >= 2 * 4 << 16
    with torch.device("meta"):
        run([Looks(0, []), Looks(1, [])])
    assert [entry[:2] for entry in seen] == [(False, "cpu")] * 2 + [(True, "meta")] * 2


@pytest.mark.parametrize("inference", [False, True], ids=["grad mode", "inference mode"])
def test_backward_in_micro_batch_threads_is_not_multithreaded(inference):
    """With multithreading, one autograd thread per card would run backward of all micro-batches. A hook that waits in
    this thread for another micro-batch would deadlock. Entering inference mode changes the setting, so multithreading
    must be disabled after that."""
    seen = []

    class Asks(Made):
        def __call__(self):
            seen.append(torch._C._is_multithreading_enabled())

    with torch.inference_mode(inference):
        run([Asks(0, []), Asks(1, [])])
    assert seen == [False, False] and torch._C._is_multithreading_enabled()


def test_autocast_around_micro_batch_threads_raises_an_error():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError, match="autocast"):
        run([Made(0, []), Made(1, [])])
    assert left() == []


def test_by_layer_sends_a_gradient_missing_in_the_last_micro_batch_to_the_host_after_the_window():
    sent = []

    class Sink:
        link = type("Link", (), {"fetch": staticmethod(lambda gradient, receive: receive(gradient))})

        @staticmethod
        def sum_of(p):
            return type("Sum", (), {"add": staticmethod(lambda gradient: sent.append((p, gradient)))})

    weights = Streamed(network("llama", num_hidden_layers=3), order="by_layer")
    weights.device, weights._sink = CPU, Sink
    p = next(iter(weights.blocks[0].parameters()))

    class Leaves(Made):
        def __call__(self):
            if self.number < 2:
                p.grad = torch.full_like(p, self.number + 1.0)
                assert weights.take_gradient(p) is None

    weights.run_micro_batches([Leaves(number, []) for number in range(3)], Generators.alike(CPU, 3, seed=None))
    assert len(sent) == 1 and sent[0][0] is p and bool((sent[0][1] == 3.0).all()) and p.grad is None


def test_unknown_weights_order_is_refused_before_loading(config):
    """The run has one micro-batch per window, where the order would have no effect."""
    with pytest.raises(Refused, match=r"weights\.order=by_block: .* auto, by_layer, by_micro_batch"):
        check(config("weights=streamed", "precision=bf16-master", "weights.order=by_block"), {})


def test_by_layer_sends_a_gradient_outside_the_blocks_for_each_micro_batch():
    weights = Streamed(network("llama", num_hidden_layers=3), order="by_layer")
    weights._window = ByLayer([Made(0, []), Made(1, [])], Generators.alike(CPU, 2, seed=None), weights.enter)
    for p, leaves in ((nn.Parameter(torch.ones(2)), True), (next(weights.blocks[0].parameters()), False)):
        p.grad = torch.ones_like(p)
        assert (weights.take_gradient(p) is not None) == leaves and p.grad is None
