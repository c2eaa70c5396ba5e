"""Tests traces that are extrapolated from models with few blocks: they equal traces of the full model."""

from collections import Counter
from dataclasses import replace

import pytest

from lowmem.config import cards
from lowmem.memory.tracker import Point
from lowmem.plan.cost.machine import Machine
from lowmem.plan.cost.step_time import of_trace
from lowmem.plan.prediction import needs
from lowmem.plan.search import extend
from lowmem.plan.search.extend import Line, _line, beyond, extended, line_of
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import trace

DEPTH = 7
ON_CARD = Target(on_card=True)
SHAPE = [
    *("model.architecture.n_embd=64", f"model.architecture.n_layer={DEPTH}", "model.architecture.n_head=2"),
    *("model.architecture.vocab_size=1000", "seq_len=128"),
]
PARTS = {"loss=chunked": ["loss.rows=256"], "loss=tiled": ["loss.columns=256"]}
RECIPES = [
    "precision=bf16 optim=adamw gradient_checkpointing=none loss=full batch_size=8",
    "precision=bf16 optim=adam8bit gradient_checkpointing=every_layer loss=chunked batch_size=8",
    "precision=bf16 optim=adafactor gradient_checkpointing=selective loss=full batch_size=2 accumulation.batches=4",
    "precision=bf16-sr optim=adafactor gradient_checkpointing=none loss=chunked batch_size=8",
    "precision=bf16-sr optim=adam8bit gradient_checkpointing=offload loss=chunked batch_size=1 accumulation.batches=8",
    "precision=bf16-master optim=adamw gradient_checkpointing=none loss=full batch_size=2 accumulation.batches=4",
    "precision=bf16-master optim=adamw8bit gradient_checkpointing=every_layer loss=tiled batch_size=4",
    "precision=16 optim=adamw gradient_checkpointing=every_layer loss=full batch_size=8 tile.tokens=50",
    "precision=16-true optim=adafactor gradient_checkpointing=offload_attention loss=tiled batch_size=2",
    "precision=bf16 optim=adamw gradient_checkpointing=none batch_size=2 clip=null optim.in_backward=true",
    "precision=bf16 optim=adamw gradient_checkpointing=none batch_size=2 adapter=lora",
    "precision=bf16-master optim=adamw gradient_checkpointing=every_layer batch_size=8 weights=streamed",
    "precision=bf16-sr optim=adafactor gradient_checkpointing=selective batch_size=8 weights=streamed",
    "precision=bf16-master optim=adamw8bit gradient_checkpointing=offload loss=chunked batch_size=2 weights=streamed "
    "accumulation.batches=8 clip=null",
    "precision=bf16 optim=adamw strategy=fsdp devices=2 batch_size=2",
]
# an update on the host, offloaded block inputs and a chunked loss
FIRST = "precision=bf16-master optim=adafactor gradient_checkpointing=offload loss=chunked batch_size=4"


@pytest.fixture
def composed(config):
    def make(words):
        lines = words.split()
        more = ["accumulation=fixed"] if any("accumulation." in line for line in lines) else []
        parts = [part for line in lines for part in PARTS.get(line, [])]
        return config(*SHAPE, *more, *lines, *parts).resolved()

    return make


def rates():
    return Machine("a card", **cards.named(cards.REFERENCE).rates | {"launch": 0.0})


@pytest.mark.parametrize("words", [FIRST, *(pytest.param(words, marks=pytest.mark.matrix) for words in RECIPES)])
def test_memory_and_time_extrapolated_from_few_blocks_equal_the_full_trace(composed, words):
    """The tolerance is 1 %, because the operator with the peak can change with the depth, and scalars are rounded to
    512 bytes."""
    run = composed(words)
    # an extrapolated trace has no events
    found, full = extended(run, on_card=True), replace(trace(run, on_card=True), events=[])
    card = rates()
    assert of_trace(card, run, found).seconds == pytest.approx(of_trace(card, run, full).seconds, rel=0.01)
    short, exact = (needs(one, run, ON_CARD, 0) for one in (found, full))
    for phase, need in exact.phases.items():
        assert short.phases[phase].host == pytest.approx(need.host, rel=0.01), phase
        assert short.phases[phase].device == pytest.approx(need.device, rel=0.01), phase
    assert (found.parameters, found.streamed, found.trained_parameters) == (
        full.parameters,
        full.streamed,
        full.trained_parameters,
    )


@pytest.mark.wrong
def test_memory_extrapolated_to_a_wrong_depth_differs_from_the_full_trace(composed, monkeypatch):
    run = composed(RECIPES[0])
    exact = needs(replace(trace(run, on_card=True), events=[]), run, ON_CARD, 0).phases
    monkeypatch.setattr(extend, "line_of", lambda run: Line(3, 4, DEPTH - 4))
    short = needs(extended(run, on_card=True), run, ON_CARD, 0).phases
    assert short["backward"].device != pytest.approx(exact["backward"].device, rel=0.01)


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        ("A" * 48, Line(3, 4, 45)),
        ("AB" * 13, Line(4, 6, 11)),  # Gemma 2
        ("AB" * 4 + "A", Line(3, 5, 3)),
        ("AAAAAB" * 5, Line(6, 12, 4)),  # Gemma 3
        ("D" + "M" * 26, Line(3, 4, 24)),  # a mixture with a dense block
        ("DDD" + "M" * 58, Line(4, 5, 57)),
        ("A" * 5 + "B", None),  # the last block is the only one of its kind
        ("A" * 4 + "B" * 4, Line(5, 6, 3)),  # half of the blocks frozen
        ("ABCDEFG", None),
        ("AAA", None),
    ],
)
def test_depths_of_the_two_short_models_follow_from_the_kinds_of_blocks_or_extrapolation_is_not_used(kinds, line):
    assert _line(kinds) == line


def test_numbers_counters_and_points_of_two_traces_are_extrapolated_linearly_and_other_fields_kept():
    near = {
        "a": 1,
        "b": Counter(x=2),
        "c": Point("forward", {"weights": 4}, 1),
        "d": "a word",
        "e": [1],
        "f": (3, True),
    }
    far = {
        "a": 3,
        "b": Counter(x=2, y=1),
        "c": Point("forward", {"weights": 5}, 1),
        "d": "a word",
        "e": [],
        "f": (4, True),
    }
    assert beyond(near, far, 10) == {
        "a": 21,
        "b": Counter(x=2, y=10),
        "c": Point("forward", {"weights": 14}, 1),
        "d": "a word",
        "e": [],
        "f": (13, True),
    }


@pytest.mark.parametrize("words", ["gradient_checkpointing=sqrt", "gradient_checkpointing=every_k"])
def test_checkpointing_with_depth_dependent_segments_is_traced_in_full(composed, words):
    assert line_of(composed(f"{words} batch_size=1")) is None
    assert line_of(composed("gradient_checkpointing=every_layer batch_size=1")) == Line(3, 4, DEPTH - 3)
    assert extended(composed(f"{words} batch_size=1"), on_card=True).events


def test_model_with_a_frozen_last_block_is_traced_in_full(composed):
    """The frozen last block is the only block of its kind. A model with a frozen first block can be extrapolated."""
    assert line_of(composed("freeze=[transformer.h.0.*] batch_size=1")) == Line(3, 4, DEPTH - 3)
    assert line_of(composed("freeze=[transformer.h.6.*] batch_size=1")) is None


def taking_turns(config, depth):
    """Returns the config of a small Gemma 2, whose blocks alternate between sliding attention over 4 tokens and full
    attention."""
    keys = {"model_type": "gemma2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    keys |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "num_hidden_layers": depth}
    keys |= dict.fromkeys([f"{name}_token_id" for name in ("pad", "bos", "eos")], 0)
    lines = ["model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3", "precision=bf16", "batch_size=4"]
    return config(*lines).replacing("model.architecture", keys).resolved()


@pytest.mark.matrix
@pytest.mark.parametrize(("depth", "line"), [(9, Line(3, 5, 3)), (10, Line(4, 6, 3)), (10, Line(3, 4, 7))])
def test_extrapolated_activations_of_alternating_blocks_equal_the_full_trace_unless_the_period_is_ignored(
    config, monkeypatch, depth, line
):
    """In this test, blocks with sliding attention save one more tensor. The wrong variant (depth 10 from depths 3 and
    4) ignores the period of 2, and must be off by more than 0.2 %."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    plain = Gemma2DecoderLayer.forward

    def heavier(self, hidden_states, *args, **kwargs):
        out = plain(self, hidden_states, *args, **kwargs)
        return out.exp().log() if self.self_attn.sliding_window else out  # saves the result of exp

    monkeypatch.setattr(Gemma2DecoderLayer, "forward", heavier)
    run, right = taking_turns(config, depth), depth % 2 == line.near % 2
    assert (line_of(run) == line) == right
    monkeypatch.setattr(extend, "line_of", lambda run: line)
    found, full = extended(run, on_card=True), trace(run, on_card=True)
    both = [one.phases["backward"].bytes for one in (found, full)]
    assert (both[0]["activations"] == pytest.approx(both[1]["activations"], rel=0.002)) == right
