"""Tests that training with streamed weights is bit-identical to training with resident weights, with every
checkpointing policy, and that no stale weight is read.

`MATRIX` is pairwise: each pair of values of model, policy, loss, slots and precision occurs in at least one row.
"""

import time
from contextlib import suppress
from itertools import product

import pytest
import torch
from torch import nn

from lowmem.data.loader import MicroBatch
from lowmem.offload.host_block import HostBlock
from lowmem.offload.host_weight import SplitHostWeight
from lowmem.offload.link import StagedLink
from lowmem.step.fp32_halves import joined
from lowmem.system.errors import NotFinite, Refused
from lowmem.system.torch_private import in_backward
from lowmem.techniques.gradient_checkpointing.policies import every_layer
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.techniques.weights.streamed import Streamed
from made_up import ClockLane, LateLane, SlowLane
from networks import VOCABULARY, network
from pairwise import pairwise
from same import last, same
from streams import MODELS, POLICIES, lines, trained

pytestmark = pytest.mark.kernels
LOSSES = {"full": ["loss=full"], "chunked": ["loss=chunked", "loss.rows=7"], "tiled": ["loss=tiled", "loss.columns=64"]}
MASTERS = ("bf16-master", "16-master")
MATRIX = pairwise(MODELS, POLICIES, LOSSES, (2, 3), MASTERS)


def streamed(slots=2, *more):
    """Returns overrides that stream weights for each micro-batch; test_by_layer.py tests `by_layer`."""
    return ["weights=streamed", "weights.order=by_micro_batch", f"weights.slots={slots}", *more]


@pytest.fixture(autouse=True)
def overwritten_when_it_is_given_back(monkeypatch):
    """Overwrites each released slot with NaN at once, as if another block had been copied into the slot. A backward
    pass that still reads the slot then computes NaN."""
    free = Streamed._free

    def overwrites(self, slot):
        bound = slot.bound
        free(self, slot)
        if bound:
            slot.memory.fill_(0xFF)  # NaN in bf16 and in fp16

    monkeypatch.setattr(Streamed, "_free", overwrites)


@pytest.fixture(scope="module")
def resident():
    """Returns a function that trains with resident weights and returns a `Trained`. Results are cached by the arguments
    of the call."""
    known = {}

    def run(config, model, arguments, **named):
        key = (model, arguments, str(named))
        if key not in known:
            known[key] = trained(config, ["weights=resident"], model, arguments, **named)
        return known[key]

    return run


@pytest.mark.rows(
    "gpt2-every_layer-full-2-bf16-master", "llama-sqrt-chunked-3-16-master", "qwen3_moe-offload-tiled-3-bf16-master"
)
@pytest.mark.parametrize(("model", "policy", "loss", "slots", "precision"), MATRIX)
def test_streamed_weights_train_with_the_bits_of_resident_weights(
    config, resident, model, policy, loss, slots, precision
):
    arguments = lines(model, *LOSSES[loss], "max_steps=2", precision=precision, policy=policy)
    one, other = resident(config, model, arguments), trained(config, streamed(slots), model, arguments)
    assert other.module.weights.fetched > 0 and (precision == "bf16-master" or one.skipped > 0)
    assert one.same(other)


# --- partly resident, early steps, other optimizers -------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [pytest.param(r, marks=[] if r == 3 else pytest.mark.matrix) for r in range(1, 5)])
def test_streaming_with_some_resident_blocks_has_the_bits_of_resident_weights(config, resident, blocks):
    arguments, six = lines("llama", "loss=chunked", "max_steps=2"), (("num_hidden_layers", 6),)
    some = trained(config, streamed(2, f"weights.resident_blocks={blocks}"), "llama", arguments, changed=six)
    assert len(some.module.weights.blocks) == 6 - blocks
    assert some.same(resident(config, "llama", arguments, changed=six))


@pytest.mark.parametrize(
    ("clip", "optim"),
    [
        ("off", "adamw8bit"),
        *(
            pytest.param(clip, optim, marks=pytest.mark.matrix)
            for clip, optim in product(("off", "value", "both"), ("adamw", "adafactor", "adamw8bit"))
        ),
    ],
)
def test_streaming_with_clip_off_value_or_both_and_three_optimizers_has_the_bits_of_resident_weights(
    config, resident, clip, optim
):
    arguments = lines("llama", "loss=chunked", "max_steps=2", clip=clip, optim=optim)
    assert trained(config, streamed(), "llama", arguments).same(resident(config, "llama", arguments))


# --- a long run -------------------------------------------------------------------------------------------------------

LONG = (
    *("gradient_checkpointing=every_layer", "accumulation=fixed", "accumulation.batches=3", "batch_size=1", "lr=1e-2"),
    *("clip=0.5", "max_steps=32", "scheduler=linear", "val_every=10", "save_every=8", "model.architecture.n_layer=4"),
    *("model.architecture.resid_pdrop=0.1", "optim=adamw8bit", "model.architecture.n_embd=64", "sample_tokens=4"),
)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", MASTERS)
def test_long_run_resumed_between_streamed_and_resident_weights_has_the_bits_of_an_unbroken_run(
    fit, tmp_path, precision
):
    lines = [*LONG, f"precision={precision}"]
    if precision == "16-master":
        lines.append("precision.init_scale=1e9")
    one, whole = fit(*lines, folder="resident")
    assert (one["skipped_steps"] > 0) == (precision == "16-master")
    right = held(whole)
    other, again = fit(*lines, "weights=streamed", folder="streamed")
    assert one["val_loss"] == other["val_loss"] and same(held(again), right)
    for first, then in (("streamed", "streamed"), ("streamed", "resident"), ("resident", "streamed")):
        folder = f"{first}-{then}"
        fit(*lines, f"weights={first}", "max_steps=13", "scheduler.total_steps=32", folder=f"{folder}-1")
        _, resumed = fit(*lines, f"weights={then}", f"resume={tmp_path / folder}-1", folder=folder)
        assert same(held(resumed), right), folder


def held(run):
    """Returns the compared entries of a run's last checkpoint. Weights that are stored in two halves are joined."""
    found = last(run)
    for name, rest in found.pop("rests", {}).items():
        found["state_dict"][name] = joined(found["state_dict"][name], rest)
    return {key: found[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "lowmem", "global_step")}


# --- frozen weights, and other readers of weights ---------------------------------------------------------------------

RUN = (
    "gradient_checkpointing=every_layer",
    "model.architecture.n_layer=4",
    "lr=1e-2",
    "val_every=2",
    "sample_tokens=4",
)
RUNS = {
    "lora": ["adapter=lora", "merge=true"],
    "dora": ["adapter=dora", "precision=16-master"],
    "frozen": ["freeze=[transformer.h.0.*,transformer.h.2.*,transformer.wte.*]"],
    "fp32 export": ["export_dtype=float32"],
    "qlora": ["adapter=qlora", "merge=true"],
    "aside": ["adapter=lora", "adapter.target=[c_fc]", "clip=null"],
}


@pytest.mark.parametrize(
    "lines",
    [pytest.param(r, marks=[] if n == "frozen" else pytest.mark.matrix, id=n) for n, r in RUNS.items()],
)
def test_streamed_run_has_the_evaluations_samples_and_export_of_a_resident_run(fit, lines):
    lines = ["precision=bf16-master", *RUN, *lines]
    one, stay = fit(*lines, folder="stay")
    other, stream = fit(*lines, "weights=streamed", folder="stream")
    assert one["val_loss"] == other["val_loss"]
    assert (stay / "samples.jsonl").read_text() == (stream / "samples.jsonl").read_text()
    assert same(held(stay), held(stream))
    written = {file.name: file.read_bytes() for file in (stay / "model").glob("*.safetensors")}
    assert written and all((stream / "model" / name).read_bytes() == held for name, held in written.items())


# --- late copies ------------------------------------------------------------------------------------------------------

LATE = pairwise(("llama", "gpt2"), POLICIES, (2, 3, 4), ("norm", "off"))


@pytest.mark.rows("llama-selective-4-off")
@pytest.mark.parametrize(("model", "policy", "slots", "clip"), LATE)
def test_streaming_with_randomly_late_copies_has_the_bits_of_resident_weights(
    config, resident, model, policy, slots, clip
):
    arguments = lines(model, "loss=chunked", "max_steps=2", policy=policy, clip=clip)
    late = trained(config, streamed(slots), model, arguments, lane=LateLane(seed=slots))
    assert late.same(resident(config, model, arguments))


WAITS = [
    ("every_layer", 2),
    ("selective", 2),
    ("offload", 3),
]  # policies that recompute single blocks; a segment of several blocks would also wait for its first block


@pytest.mark.parametrize(
    ("policy", "slots"), [WAITS[0], *(pytest.param(*w, marks=pytest.mark.matrix) for w in WAITS[1:])]
)
def test_device_waits_once_per_step_if_copies_are_faster_than_compute(config, policy, slots):
    """The device waits for the first block after a step, because nothing else can be computed meanwhile."""
    steps = 2
    arguments = lines("llama", "loss=chunked", f"max_steps={steps}", policy=policy)

    def waits(copying):
        lane = ClockLane(copying)

        def clocked(module):
            module.weights.lane = lane
            for block in module.weights.blocks:
                # a pre-hook, because recomputation may stop before the end of the MLP
                block.mlp.register_forward_pre_hook(lambda *_: lane.computes(1.0))

        trained(config, streamed(slots), "llama", arguments, prepare=clocked)
        return lane.waits

    assert waits(0.9) == steps
    assert waits(1.1) > 2 * steps


# --- which copies are made, and when ----------------------------------------------------------------------------------


@pytest.fixture
def begun():
    """Yields a function that takes a lane and a number of leading frozen blocks, and returns a Llama of four blocks and
    its started `Streamed`."""
    started = []

    def begin(lane=None, frozen=0):
        model = network("llama", num_hidden_layers=4, tie_word_embeddings=False)
        every_layer(model)
        for part in [model.model.embed_tokens, *model.model.layers[:frozen]]:
            part.requires_grad_(False)
        weights = Streamed(model)
        weights.edges = []
        weights.move_in(torch.device("cpu"))
        weights.lane = lane
        weights.start()
        started.append(weights)
        return model, weights

    yield begin
    for weights in started:
        weights.stop()


IDS = torch.arange(8).view(1, 8)


def test_leading_frozen_blocks_are_not_copied_again_for_backward(begun):
    for frozen in (0, 2):
        model, weights = begun(frozen=frozen)
        model(IDS, use_cache=False).logits.sum().backward()
        assert (
            weights.fetched == 4 + 3 - frozen
        )  # forward copies four; backward begins with the last, which is still in its slot


def test_streamed_evaluation_prefetches_the_first_block_for_the_next_pass(begun):
    lane = ClockLane(0.9)
    model, weights = begun(lane)
    for block in weights.blocks:
        block.register_forward_pre_hook(lambda *_: lane.computes(1.0))
    with torch.no_grad():
        for _ in range(3):
            model.eval()(IDS, use_cache=False)
    assert lane.waits == 1 and weights.fetched == 3 * 4 + 1


def test_streamed_block_output_in_a_dict_tuple_or_list_is_accepted_and_a_plain_object_refused(begun, monkeypatch):
    _, weights = begun()
    reached = []
    monkeypatch.setattr(weights, "_reached", reached.append)
    for number, inside in enumerate((lambda x: {"hidden": x}, lambda x: (x, None), lambda x: [x])):
        output = torch.ones(2, requires_grad=True) * 2
        weights._leaves(number, inside(output))
        output.sum().backward()
    assert reached == [0, 1, 2]
    with pytest.raises(Refused, match="LlamaDecoderLayer returned a object without a tensor"):
        weights._leaves(3, object())


def test_binding_a_streamed_block_to_a_slot_that_backward_still_reads_raises_an_error(begun, monkeypatch):
    _, weights = begun()
    weights._bind(0)
    weights.host_blocks[0].steps += 1
    monkeypatch.setattr("lowmem.offload.streamed.in_backward", lambda: True)
    with pytest.raises(AssertionError, match="backward still reads"):
        weights._bind(0)


# --- deliberately wrong variants --------------------------------------------------------------------------------------


def given_back_after_it_was_computed_again(monkeypatch):
    leaves = Streamed._leaves

    def wrong(self, number, output):
        leaves(self, number, output)
        if in_backward():
            self._release(lambda other, _: other == number)

    monkeypatch.setattr(Streamed, "_leaves", wrong)


def not_brought_for_backward(monkeypatch):
    enters = Streamed._enters

    def wrong(self, number):
        if not in_backward():
            enters(self, number)

    monkeypatch.setattr(Streamed, "_enters", wrong)
    monkeypatch.setattr(Streamed, "_reached", lambda self, number: None)


def as_it_was_before_the_step(monkeypatch):
    def wrong(self, number):
        return next((slot for slot in self._slots if slot.host_block is self.host_blocks[number]), None)

    monkeypatch.setattr(Streamed, "_slot_of", wrong)


def brought_before_the_step_is_done(monkeypatch):
    step = SplitHostWeight.step

    def slowly(self, *how):
        time.sleep(0.005)
        step(self, *how)

    monkeypatch.setattr(SplitHostWeight, "step", slowly)
    monkeypatch.setattr(HostBlock, "wait_for_updates", lambda self: None)


def without_checkpointing(monkeypatch):
    pass


WRONG = {
    given_back_after_it_was_computed_again: "every_layer",
    not_brought_for_backward: "every_layer",
    as_it_was_before_the_step: "every_layer",
    brought_before_the_step_is_done: "every_layer",
    without_checkpointing: "none",
}


@pytest.mark.wrong
@pytest.mark.parametrize("slots", [pytest.param(2, marks=pytest.mark.matrix), 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_streaming_with_a_deliberate_fault_is_not_finite_or_differs_from_resident_weights(
    config, resident, monkeypatch, wrong, slots
):
    if wrong is without_checkpointing and slots == 2:
        pytest.skip("with two slots the blocks of either parity find their own weights")
    arguments = lines("llama", "loss=chunked", "max_steps=2", policy=WRONG[wrong])
    right = resident(config, "llama", arguments)
    wrong(monkeypatch)
    lane = SlowLane() if wrong is brought_before_the_step_is_done else None
    with suppress(NotFinite):
        assert not trained(config, streamed(slots), "llama", arguments, lane=lane).same(right)


@pytest.mark.parametrize("waits", [True, False], ids=["registered", "not registered"])
def test_host_updates_a_weight_after_its_pending_copy_unless_registering_the_copy_is_left_out(waits):
    """In training, a weight has a gradient only after it was copied to the device, so only a copy that was prefetched
    and not used can overlap with an update. In the deliberately wrong variant, the copy is not registered, and the
    weight is updated before it is copied."""
    lane, p = SlowLane(), nn.Parameter(torch.ones(1000))
    copied, link, host_block = (
        torch.empty(4000, dtype=torch.uint8),
        StagedLink(lane, slot_bytes=64, slots=2),
        HostBlock([p]),
    )
    lane.copies.submit(time.sleep, 0.05)
    landed = lane.copy(copied, host_block.flat, lane.mark())
    host_block.last_copy = landed if waits else None
    link.update_block(host_block, lambda: host_block.tensor(p).zero_())
    link.finish()
    landed.synchronize()
    link.close()
    assert bool((copied.view(torch.float32) == 1).all()) == waits


# --- which weights stream ---------------------------------------------------------------------------------------------


def test_streamed_parameters_hold_nan_after_the_move_to_the_host_and_are_restored_after_the_run():
    model = network("llama", num_hidden_layers=4)
    right = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = Streamed(model)
    weights.move_in(torch.device("cpu"))
    streaming = {name for name, p in model.named_parameters() if weights.host_block(p)}
    assert streaming == {name for name in right if ".layers." in name or "embed_tokens" in name}
    assert all(
        p.isnan().all() == (name in streaming) and p.shape == right[name].shape for name, p in model.named_parameters()
    )
    weights.start()
    weights.stop()
    assert all(torch.equal(p, right[name]) for name, p in model.named_parameters())


def test_streaming_a_model_with_a_shared_mlp_and_repeated_blocks_has_the_gradients_of_resident_weights():
    """The second and the fourth block share an MLP, which stays resident. The model runs all blocks twice."""
    batch = MicroBatch(*torch.randint(0, VOCABULARY, (2, 3, 20)))

    def gradients(streams):
        model = network("llama", num_hidden_layers=4)
        model.get_input_embeddings().requires_grad_(False)
        layers = model.model.layers
        layers[3].mlp = layers[1].mlp
        forward = model.model.forward
        model.model.forward = lambda **given: forward(inputs_embeds=forward(**given)[0], use_cache=False)
        every_layer(model)
        if streams:
            weights = Streamed(model)
            weights.move_in(torch.device("cpu"))
            assert weights.host_block(layers[1].mlp.up_proj.weight) is None and weights.host_block(
                layers[0].mlp.up_proj.weight
            )
            weights.start()
        losses.full(model, batch).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    streamed, resident = gradients(streams=True), gradients(streams=False)
    assert streamed.keys() == resident.keys() and all(torch.equal(streamed[name], resident[name]) for name in resident)


def test_streaming_with_too_few_blocks_or_invalid_slots_or_resident_blocks_is_refused():
    with pytest.raises(Refused, match="weights=resident"):
        Streamed(network("llama", num_hidden_layers=1))
    always_the_same = network("llama", num_hidden_layers=3)
    always_the_same.model.layers = nn.ModuleList([always_the_same.model.layers[0]] * 3)
    with pytest.raises(Refused, match="has 0 to stream"):
        Streamed(always_the_same)
    for count, instead in ((-1, 2), (3, 2), (9, 2)):
        with pytest.raises(Refused, match=f"weights.resident_blocks={instead}"):
            Streamed(network("llama", num_hidden_layers=4), resident_blocks=count)
    with pytest.raises(Refused, match=r"weights\.slots=2"):
        Streamed(network("llama", num_hidden_layers=4), slots=1)
