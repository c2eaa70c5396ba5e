"""Tests plans of runs with adapters or frozen weights: predicted memory equals measured memory, and memory extrapolated
from few blocks equals the memory of a full trace."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_recipes import card
from test_trace import MODELS, PHASES, SCALARS, measured, traced

from lowmem.model.loading import describe
from lowmem.model.trainable import trainable
from lowmem.plan.prediction import needs
from lowmem.plan.search.candidates import Typed, routes, trainings
from lowmem.plan.search.extend import Line, extended, line_of
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import trace
from lowmem.training import build

FREEZE = "freeze=[transformer.wte.*,*.ln_1.*]"
RUN = (*MODELS["gpt2"], "max_steps=3", "val_every=3", "batch_size=8", "clip=1.0")
PRECISIONS = ("32", "bf16", "bf16-master", "bf16-sr")
ROWS = [
    *product(("adapter=lora", "adapter=dora"), PRECISIONS[:3], ("none", "every_layer")),
    ("adapter=lora", "bf16-sr", "none"),
    (FREEZE, "bf16-master", "every_layer"),
    (FREEZE, "32", "none"),
]
FEW = [ROWS[5], ROWS[8], ROWS[13]]


def row(adapter, precision, checkpointing):
    return (*RUN, adapter, f"precision={precision}", f"gradient_checkpointing={checkpointing}")


def beyond(found, phases):
    """Returns predicted minus measured bytes: of each phase on the device, and of the evaluation on the host."""
    device = {phase: phases[phase].total - found[phase]["live_peak_bytes"] for phase in PHASES}
    return device, phases["evaluation"].host - found["evaluation"]["host_tensor_bytes"]


@pytest.mark.rows("typed5")
@pytest.mark.parametrize("typed", [pytest.param(one, marks=() if one in FEW else pytest.mark.matrix) for one in ROWS])
def test_measured_peak_memory_with_an_adapter_or_freeze_equals_the_prediction(config, fit, typed):
    """Predicted and measured device memory (some MB) differ by at most SCALARS bytes. Host memory agrees to the
    byte."""
    _, folder = fit(*row(*typed))
    found, shapes = measured(folder), traced(config(*row(*typed)))
    device, host = beyond(found, shapes.phases)
    assert host == 0 and all(abs(one) <= SCALARS for one in device.values()), (device, host)
    for phase in PHASES:
        for category in ("weights", "gradients", "optimizer"):
            assert shapes.phases[phase].bytes[category] == found[phase][f"{category}_bytes"]
    assert shapes.trained_parameters < shapes.parameters and shapes.largest_trained <= shapes.largest


SLOW = [
    pytest.param(line, marks=pytest.mark.matrix)
    for line in ("adapter=none", "adapter=dora", "gradient_checkpointing=none")
]


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", ["adapter.r=8", *SLOW])
def test_prediction_for_another_adapter_or_checkpointing_differs_from_the_measurement(config, fit, wrong):
    """Wrong variants: predictions for other runs must differ from the measurement by more than 1 % in some phase."""
    typed = row("adapter=lora", "bf16", "every_layer")
    _, folder = fit(*typed)
    phases, found = traced(config(*without(typed, wrong), wrong)).phases, measured(folder)
    device, _ = beyond(found, phases)
    assert any(abs(device[phase]) > 0.01 * found[phase]["live_peak_bytes"] for phase in PHASES)


def without(lines, wrong):
    """Returns all lines except those that set the group of `wrong`."""
    return [line for line in lines if line.split("=")[0] != wrong.split("=")[0]]


# --- recipes ----------------------------------------------------------------------------------------------------------

DEPTH = 7
SHAPE = [
    *("model.architecture.n_embd=64", f"model.architecture.n_layer={DEPTH}", "model.architecture.n_head=2"),
    *("model.architecture.vocab_size=1000", "seq_len=64", "batch_size=4"),
]


@pytest.fixture
def composer(config):
    """Returns a function that takes overrides, and returns a function that composes the config of a recipe."""

    def typed(*lines):
        def make(recipe):
            kept = [line for line in (*SHAPE, *lines) if line.split("=")[0] not in recipe]
            cfg = config(*kept, *(f"{key}={value}" for key, value in recipe.items()))
            return cfg.resolved()

        return make

    return typed


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("line", "precision"),
    [
        ("adapter=lora", "bf16-master"),
        pytest.param("adapter=dora", "bf16-true", marks=pytest.mark.matrix),
        pytest.param(FREEZE, "bf16-master", marks=pytest.mark.matrix),
        pytest.param("adapter=lora", "32", marks=pytest.mark.matrix),
        pytest.param("adapter=dora", "bf16-master", marks=pytest.mark.matrix),
        pytest.param("adapter=lora", "bf16-sr", marks=pytest.mark.matrix),
    ],
)
def test_memory_with_an_adapter_extrapolated_from_few_blocks_equals_the_full_trace(composer, line, precision):
    recipe = {"precision": precision, "optim": "adamw", "gradient_checkpointing": "every_layer", "loss": "full"}
    run = composer(line)(recipe | {"batch_size": "4"})
    found, full = extended(run, on_card=True), replace(trace(run, on_card=True), events=[])
    short, exact = (needs(one, run, Target(on_card=True), 0) for one in (found, full))
    for phase, need in exact.phases.items():
        assert short.phases[phase].device == pytest.approx(need.device, rel=0.01), phase
        assert short.phases[phase].host == pytest.approx(need.host, rel=0.01), phase


def test_search_does_not_change_adapter_or_freeze(composer):
    make = composer("adapter=lora", FREEZE)
    asked = Typed(make({}), (*SHAPE, "adapter=lora", FREEZE), make)
    for training in trainings(asked, card(2**30)):
        for route in routes(asked, training):
            assert not {"adapter", "freeze"} & route.option.keys()
            assert asked.config(route.option).adapter == asked.run.adapter


def test_short_models_have_3_and_4_blocks_if_all_blocks_are_alike_but_5_and_6_if_the_first_4_are_frozen(composer):
    assert line_of(composer("freeze=[*.h.*.mlp.*]")({})) == Line(3, 4, DEPTH - 3)
    assert line_of(composer("freeze=['*.h.[0-3].*']")({})) == Line(5, 6, DEPTH - 5)


def test_model_with_an_adapter_on_the_last_block_only_is_traced_in_full(composer):
    assert line_of(composer("adapter=lora", "adapter.target=['*.h.6.*']")({})) is None


def test_loading_masters_of_a_partly_frozen_model_on_a_cpu_is_predicted_to_take_one_fp32_copy(config):
    """On a CPU the fp32 weights are loaded first, and then rounded to 16 bits one tensor at a time."""
    frozen = "freeze=[transformer.wte.*,transformer.h.0.*]"
    cfg = config(frozen, "precision=bf16-master").resolved()
    shapes = trace(cfg, on_card=False)
    load = needs(shapes, cfg, Target(on_card=False), 0).phases["load"].host
    assert load == pytest.approx(4 * (shapes.parameters + shapes.largest), rel=0.01)


def test_base_model_frozen_by_an_adapter_loads_in_bf16_with_less_predicted_host_memory_than_masters(config):
    """A frozen weight needs no fp32 master, so loading takes about half of the host memory that masters of all weights
    take."""
    lines = ("adapter=lora", "precision=bf16-master", "adapter.r=1")
    cfg, all_weights = (config(*some) for some in (lines, lines[1:2]))
    loaded = build.causal_lm(cfg, describe(cfg, plans=True)).model
    assert {p.dtype for p in loaded.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for _, p in trainable(loaded)} == {torch.float32}
    adapter, every = (needs(trace(one, False), one, Target(on_card=False), 0) for one in (cfg, all_weights))
    assert adapter.phases["load"].host < 0.65 * every.phases["load"].host


def test_adapter_on_16_bit_weights_does_not_count_as_training_that_rounds_weights(config):
    """If it counted, the search would rank a recipe with 16-bit frozen weights as a large change of the typed
    training."""
    assert config("precision=bf16-true").rounds_weights
    assert not config("precision=bf16-true", "adapter=lora").rounds_weights


@pytest.mark.rows("qlora-offload")
@pytest.mark.parametrize(
    ("adapter", "policy"),
    [("qlora", "every_layer"), ("qlora", "offload"), ("lora", "every_layer")],
)
def test_memory_of_an_adapter_with_a_streamed_base_equals_the_prediction(config, fit, adapter, policy):
    """The peaks agree to the byte in every phase. The wrong variant, a prediction for a resident base model, must have
    more bytes of weights on the device."""
    typed = [*MODELS["llama"], "weights=streamed", "precision=bf16-master", "loss=tiled", f"adapter={adapter}"]
    typed += [f"gradient_checkpointing={policy}", "batch_size=2", "max_steps=3", "val_every=3", "optim=adamw"]
    _, folder = fit(*typed)
    found, phases = measured(folder), traced(config(*typed)).phases
    for phase in PHASES:
        assert found[phase]["live_peak_bytes"] == phases[phase].total, phase
    assert phases["evaluation"].host == found["evaluation"]["host_tensor_bytes"]
    stays = traced(config(*typed, "weights=resident")).phases
    assert stays["evaluation"].bytes["weights"] > phases["evaluation"].bytes["weights"]
