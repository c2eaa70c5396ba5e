"""Tests streamed embeddings and output layers (heads). Training is bit-identical to training with resident weights, and
the device holds only the rows and tiles in use."""

import threading
from collections import Counter
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from torch import nn

import parity
from lowmem.config.instantiate import instantiate
from lowmem.offload import edges
from lowmem.offload.copy_lanes import AtOnceLane
from lowmem.offload.edges import Edge, GradientSink
from lowmem.offload.host_block import HostBlock
from lowmem.offload.host_weight import SplitHostWeight
from lowmem.offload.link import Link
from lowmem.system.errors import Refused
from lowmem.training.build import callbacks, optimizer
from lowmem.training.module import CausalLM, Placement, Update
from made_up import SlowLane
from networks import VOCABULARY, WIDTH, network
from tolerances import FP32_REORDERED
from two_models import configured, linked_by, windows

pytestmark = pytest.mark.kernels
SHAPES = {
    "gpt2": {},  # tied, with learned positions
    "llama": {"tie_word_embeddings": False, "pad_token_id": 7},
    "gemma3_text": {"attn_implementation": "eager"},  # tied, and the embedding is scaled
}
TIED = [kind for kind in SHAPES if kind != "llama"]


def setting(config, clip, accumulation, *more, precision="bf16-master"):
    lines = ("gradient_checkpointing=every_layer", "loss=tiled", "loss.columns=96", "max_steps=3")
    return configured(config, precision, "adamw", clip, accumulation, "linear", *lines, *more)


def weights_after(cfg, kind, lane=None):
    """Trains, and returns a dict that maps the name of each trained weight to its value in fp32. Args: lane: class of
    the copy lane; None: the default lane of a CPU."""
    model = network(kind, **SHAPES[kind])
    instantiate(cfg.gradient_checkpointing)(model)
    order = {"order": cfg.order} if cfg.streams else {}
    held = instantiate(cfg.weights)(model, head_in_tiles=True, **order)
    update = Update(optimizer(cfg), instantiate(cfg.scheduler), cfg.clip, cfg.clip_value, early=cfg.early)
    module = CausalLM(model, instantiate(cfg.loss), update, Placement(held))
    (plugin,) = map(instantiate, cfg.plugins)
    if lane is not None:
        held.lane = lane()
    trainer = parity.trainer(cfg, [plugin], callbacks(cfg))
    with nullcontext() if lane is None else linked_by(lane()):
        trainer.fit(module, windows(cfg))
    assert trainer.global_step == cfg.max_steps and (module.skipped_steps > 0) == plugin.scales_loss
    if held.streams:
        readers = [(edge.embedding is not None, edge.head is not None) for edge in held.edges]
        assert readers == ([(True, True)] if kind in TIED else [(True, False), (False, True)])
    return {name: module.full_precision(p).detach() for name, p in module.model.named_parameters()}


def same(config, kind, clip, accumulation, lane, **precision):
    resident = weights_after(setting(config, clip, accumulation, **precision), kind)
    streamed = weights_after(setting(config, clip, accumulation, "weights=streamed", **precision), kind, lane)
    return all(torch.equal(resident[name], streamed[name]) for name in resident)


@pytest.mark.rows("off-fixed-SlowLane-gpt2", "norm-fixed-None-llama")
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("clip", "accumulation", "lane"),
    [
        ("norm", "fixed", None),
        ("off", "fixed", SlowLane),  # early updates, in the last of two micro-batches
        pytest.param("off", "none", None, marks=pytest.mark.matrix),
        pytest.param("off", "none", SlowLane, marks=pytest.mark.matrix),
        pytest.param("both", "fixed", SlowLane, marks=pytest.mark.matrix),
    ],
)
def test_streamed_embedding_and_head_give_the_bits_of_resident_weights(config, kind, clip, accumulation, lane):
    assert same(config, kind, clip, accumulation, lane)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", SHAPES)
def test_streamed_embedding_and_head_with_skipped_steps_give_the_bits_of_resident_weights(config, kind, monkeypatch):
    scaled = [*parity.WITH["precision=16-master"][:-1], "precision.init_scale=3e5"]
    monkeypatch.setitem(parity.WITH, "precision=16-master", scaled)
    assert same(config, kind, "norm", "fixed", SlowLane, precision="16-master")


# --- deliberately wrong variants --------------------------------------------------------------------------------------

MICRO_BATCHES = [4, 1, 4]  # per window with `fixed` accumulation; an epoch ends with the second window


def looked_up_before_the_update(monkeypatch):
    """Wrong variant: lookups do not wait for updates. Each update is delayed until the next step has looked up its
    first rows, so these rows are always out of date."""
    start, gathered, step = Edge.start, Edge._gathered, SplitHostWeight.step
    lookups, steps, changed = [], Counter(), threading.Condition()

    class Hasty(HostBlock):
        def __init__(self, host_block):
            self.__dict__ = host_block.__dict__

        def wait_for_updates(self):
            pass

    def looked_up(self, at):
        rows = gathered(self, at)
        with changed:
            lookups.append(at)
            changed.notify_all()
        return rows

    def late(master, *of):
        with changed:
            steps[master] += 1
            first_of_next = min(sum(MICRO_BATCHES[: steps[master]]) + 1, sum(MICRO_BATCHES))
            assert changed.wait_for(lambda: not lookups or len(lookups) >= first_of_next, timeout=60)
        step(master, *of)

    monkeypatch.setattr(Edge, "start", lambda self, host_block, *of: start(self, Hasty(host_block), *of))
    monkeypatch.setattr(Edge, "_gathered", looked_up)
    monkeypatch.setattr(SplitHostWeight, "step", late)


def tied_gradients_each_on_its_own(monkeypatch):
    """Wrong variant: the two 16-bit gradients of a tied weight are added in fp32. Autograd would round their sum to 16
    bits."""
    right = Edge._take_rows

    def wrong(self, at, landed, of_head, *piece):
        if of_head is not None and piece[0] == 0:
            self.sink.sum_of(self.weight).use(0, of_head.view(-1))
        right(self, at, landed, None, *piece)

    monkeypatch.setattr(Edge, "_take_rows", wrong)


# the kind of clipping for each fault: with "norm", weights are updated after backward; with "off", during backward
WRONG = {looked_up_before_the_update: "norm", tied_gradients_each_on_its_own: "off"}


@pytest.mark.wrong
@pytest.mark.rows("tied_gradients*")
@pytest.mark.parametrize("wrong", WRONG)
def test_streamed_embedding_with_a_deliberate_fault_differs_from_resident_weights(config, wrong, monkeypatch):
    loaded = islice(windows(setting(config, WRONG[wrong], "fixed")), len(MICRO_BATCHES))
    assert [len(window.micro_batches) for window in loaded] == MICRO_BATCHES
    wrong(monkeypatch)
    assert not same(config, "gpt2", WRONG[wrong], "fixed", SlowLane)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_device_peak_has_only_rows_and_tiles_of_a_streamed_embedding_and_head(fit):
    """With the chunked loss, the head and the embedding tied to it stay on the device; with the tiled loss, both are
    streamed."""
    shape = ("model.architecture.vocab_size=4096", "model.architecture.n_embd=64", "model.architecture.n_layer=3")
    how = ("precision=bf16-master", "gradient_checkpointing=every_layer", "batch_size=1", "seq_len=8", "max_steps=2")
    held = {}
    for loss in (("loss=chunked", "loss.rows=8"), ("loss=tiled", "loss.columns=128")):
        summary, _ = fit(*shape, *how, *loss, "weights=streamed", "clip=null", folder=loss[0])
        held[loss[0]] = summary["peak_bytes_by_category"]
    chunked, tiled = held.values()
    both, tile = 4096 * 64 * 2, 128 * 64 * 2  # tied, in 16 bits
    assert sum(chunked.values()) > both + 2 * both  # the gradient is summed in fp32
    assert tiled["weights"] < chunked["weights"] - both + 2 * tile + 100
    assert sum(tiled.values()) - tiled["weights"] < both / 4


# --- lookups, logits and gradients ------------------------------------------------------------------------------------


@pytest.fixture
def started():
    """Returns a function. For a key of SHAPES, the function returns (a model, an equal model whose embedding and head
    are in host memory)."""

    def make(kind, **changes):
        whole, apart = (network(kind, **SHAPES[kind] | changes).eval() for _ in range(2))
        for edge in edges.edges(apart, head_in_tiles=True):
            host_block = HostBlock([edge.weight])
            edge.weight.data = torch.full((1,), torch.nan).expand(edge.weight.shape)
            edge.start(host_block, AtOnceLane(), None)
        return whole, apart

    return make


@pytest.mark.parametrize("kind", SHAPES)
def test_streamed_head_returns_the_logits_of_a_resident_head_within_rounding(started, kind, monkeypatch):
    monkeypatch.setattr(edges, "COLUMNS", 96)
    whole, apart = started(kind)
    ids = torch.randint(0, VOCABULARY, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(apart(ids).logits, whole(ids).logits, rtol=0, atol=FP32_REORDERED)


def test_second_lookup_of_a_streamed_embedding_in_one_pass_is_refused(started):
    _, apart = started("llama")
    ids = torch.zeros(1, 4, dtype=int)
    first = apart.model.embed_tokens(ids)
    with pytest.raises(Refused, match="twice in one forward pass"):
        apart.model.embed_tokens(ids)
    del first
    apart.model.embed_tokens(ids)  # `first` was freed without backward


def test_padding_row_of_a_streamed_embedding_gets_no_gradient_during_the_next_lookup(started):
    """While the rows of the next lookup stand in for the weight, the module's `padding_idx` is None. The host receives
    gradients at this time and must still leave out the padding row."""
    whole, apart = started("llama")
    (edge,) = edges.edges(apart, head_in_tiles=False)
    host_block, embedding, taken = HostBlock([whole.model.embed_tokens.weight]), edge.embedding, []
    (host_block.spans[edge.weight],) = host_block.spans.values()

    class Meanwhile(Link):
        def fetch(self, gradient, receive):
            with edge._in_place_of_the_weight(nn.Parameter(gradient)):
                super().fetch(gradient, receive)

    class Held:
        def use_rows(self, at, rows):
            taken.append(rows.new_zeros(edge.weight.shape).index_add_(0, at, rows))

    embedding.__dict__.pop("forward")
    edge.start(host_block, AtOnceLane(), GradientSink(Meanwhile(), lambda p: Held(), lambda p: None))
    ids = torch.tensor([[7, 3, 7, 5, 3]])
    for model in (whole, apart):
        model.model.embed_tokens(ids).sum().backward()
    right = whole.model.embed_tokens.weight.grad
    assert not right[7].any() and right[3].all()
    assert torch.equal(taken[0], right)


@pytest.mark.parametrize("by_frequency", [False, True], ids=["plain", "by frequency"])
@pytest.mark.parametrize("padding", [-1, 3])
def test_row_gradients_summed_by_token_have_the_bits_of_the_dense_embedding_gradient(padding, by_frequency):
    torch.manual_seed(0)
    ids, rows = torch.randint(0, 7, (64,)), torch.randn(64, 16).bfloat16()
    dense = torch.ops.aten.embedding_dense_backward(rows, ids, 11, padding, by_frequency)
    summed = edges.summed_by_token(rows.clone(), ids, padding, by_frequency)
    assert torch.equal(torch.zeros_like(dense).index_add_(0, ids, summed), dense)
    # wrong variant: a sum in fp32 that is rounded once to bf16
    assert not torch.equal(torch.zeros(11, 16).index_add_(0, ids, rows.float()).bfloat16(), dense)


def test_abandoned_read_of_streamed_head_tiles_waits_for_all_copies_of_tiles(started):
    class Noted(AtOnceLane):
        asked, held = [], []

        def copy(self, *of):
            self.asked.append(super().copy(*of))
            return self.asked[-1]

        def hold(self, until):
            self.held.append(until)

    _, apart = started("llama")
    edge, lane = apart.lm_head.source, Noted()
    edge.lane = lane
    tiles = edge.tiles(96)
    next(tiles)
    assert len(lane.asked) == 2 and len(lane.held) == 1
    tiles.close()
    assert set(lane.asked) <= set(lane.held)


def test_gradients_of_embedding_and_head_left_by_a_failed_pass_are_discarded(started):
    _, apart = started("gpt2")
    edge = apart.lm_head.source
    edge.start_gradient()
    ids = apart.transformer.wte(torch.zeros(1, 4, dtype=int))
    edge.stop()
    assert ids is not None and edge._of_head == {} and edge._rows == {}


def test_shared_or_renormalized_embedding_or_head_is_not_streamed():
    model = network("llama", **SHAPES["llama"])
    assert [edge.weight.shape for edge in edges.edges(model, True)] == [(VOCABULARY, WIDTH)] * 2
    assert [edge.embedding for edge in edges.edges(model, False)] == [model.model.embed_tokens]
    assert edges.edges(network("gpt2"), False) == []  # tied
    model.model.embed_tokens.max_norm = 1.0  # a lookup changes the weight
    assert [edge.head for edge in edges.edges(model, True)] == [model.lm_head]
    model.another = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.another.weight = model.lm_head.weight
    assert edges.edges(model, True) == []
