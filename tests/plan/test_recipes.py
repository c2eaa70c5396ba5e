"""Recipes: derived from small traces as exactly as if each were traced, ranked, and only what may be changed is."""

import time
from dataclasses import replace
from functools import cache

import pytest

from lowmem.config import cards
from lowmem.config.cards import Card
from lowmem.config.declarations import CHANGEABLE, techniques
from lowmem.config.settle import run_of
from lowmem.config.typed_lines import CONF, replaced
from lowmem.memory.tracker import Point
from lowmem.plan.cost.machine import Machine
from lowmem.plan.cost.step_time import of_trace
from lowmem.plan.prediction import Need, Prediction, needs
from lowmem.plan.search import recipes, trace_all
from lowmem.plan.search.candidates import COMPUTED, Typed, candidates, micro_batches, stands_alone, trainings
from lowmem.plan.search.derive import Derivation, bilinear
from lowmem.plan.target import Target
from lowmem.plan.tracing.operator_cost import Work
from lowmem.plan.tracing.trace import Trace, trace
from lowmem.system.errors import Refused

DEPTH = 7
ON_CARD = Target(on_card=True)
SHAPE = [
    *("model.architecture.n_embd=64", f"model.architecture.n_layer={DEPTH}", "model.architecture.n_head=2"),
    *("model.architecture.vocab_size=1000", "seq_len=128", "batch_size=8"),
]
RECIPES = [
    ("bf16", "adamw", "none", "full", 8),
    ("bf16", "adam8bit", "every_layer", "chunked", 8),
    ("bf16", "adafactor", "selective", "full", 2),
    ("bf16-sr", "adamw", "every_layer", "full", 4),
    ("bf16-sr", "adafactor", "none", "chunked", 8),
    ("bf16-sr", "adam8bit", "offload", "chunked", 1),
    ("bf16-master", "adamw8bit", "every_layer", "chunked", 8),
    ("bf16-master", "adamw", "none", "full", 2),
    ("bf16-master", "adafactor", "offload", "chunked", 4),
    ("32", "adamw", "selective", "chunked", 4),
    ("16", "adamw", "every_layer", "full", 8),
    ("16-master", "adamw8bit", "none", "chunked", 2),
    ("bf16-master", "adamw8bit", "every_layer", "tiled", 4),
    ("bf16", "adamw", "none", "tiled", 8),
    ("16-true", "adafactor", "offload", "tiled", 2),
]

# an update on the host, offloaded boundaries and a loss in chunks
FIRST = [("bf16-master", "adafactor", "offload", "chunked", 4)]


def machine():
    return Machine("a card", **cards.named(cards.REFERENCE).rates)


def card(size, **said):
    return Card(size, "made up", **said)


def as_override(precision, optim, checkpointing, loss, batch_size):
    recipe = {"precision": precision, "optim": optim, "gradient_checkpointing": checkpointing, "loss": loss}
    recipe |= {"batch_size": str(batch_size)}
    windows = 8 // batch_size
    return recipe | ({"accumulation": "fixed", "accumulation.batches": str(windows)} if windows > 1 else {})


@pytest.fixture
def composed(config):
    def make(recipe):
        part = {"chunked": ["loss.rows=256"], "tiled": ["loss.columns=256"]}.get(recipe.get("loss"), [])
        lines = [line for line in SHAPE if line.split("=")[0] not in recipe]
        cfg = config(*lines, *(f"{key}={value}" for key, value in recipe.items()), *part)
        return cfg.resolved()

    return make


@pytest.mark.parametrize("ways", [FIRST, pytest.param(RECIPES, marks=pytest.mark.matrix)], ids=["first", "every"])
def test_derived_recipes_are_those_that_are_traced(composed, ways):
    rates = replace(machine(), overhead=0.0)
    derivation = Derivation(composed, DEPTH, (1, 8), ON_CARD, rates)
    for way in ways:
        recipe = as_override(*way)
        cfg = composed(recipe)
        shapes, seconds = derivation.derive(recipe, cfg)
        itself = trace(cfg, on_card=True)
        assert seconds == pytest.approx(of_trace(rates, cfg, itself).seconds, rel=0.01), way
        derived, traced = (needs(found, cfg, ON_CARD, 0) for found in (shapes, itself))
        for phase, need in traced.phases.items():
            # to the byte where a place is linear in depth and batch; scalars and rounded rates make the rest
            assert derived.phases[phase].host == pytest.approx(need.host, rel=0.01), (way, phase)
            if phase == "evaluation":  # its highest place changes with the batch, and a line between two is above both
                assert derived.phases[phase].device >= 0.99 * need.device, way
            else:
                assert derived.phases[phase].device == pytest.approx(need.device, rel=0.01), (way, phase)
        assert derived.device_peak == pytest.approx(traced.device_peak, rel=0.01), way


@pytest.mark.matrix
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_derived_activations_in_host_memory_are_those_that_are_traced(composed, weights):
    """With offload_attention a block keeps several, of which two do not grow with the micro-batch."""
    recipe = as_override("bf16-master", "sgd", "offload_attention", "full", 2) | {"weights": weights, "clip": "null"}
    if weights == "streamed":  # all of a window's micro-batches pass through a block together
        recipe |= {"weights.order": "by_layer", "accumulation.batches": "6"}
    cfg = composed(recipe)
    derived, _ = Derivation(composed, 5, (1, 4), ON_CARD, machine()).derive(recipe, cfg)
    assert sorted(derived.pinned) == sorted(trace(cfg, True, 5).pinned)


@pytest.mark.matrix
def test_slices_of_the_sequence_leave_every_place_linear_in_the_batch(composed, monkeypatch):
    """And in the depth: they are of the sequence, so that all of them grow with the batch."""
    monkeypatch.setattr("test_recipes.SHAPE", [*SHAPE, "tile.tokens=50"])
    recipe = as_override("bf16-master", "adamw8bit", "every_layer", "chunked", 4)
    cfg = composed(recipe)
    shapes, _ = Derivation(composed, DEPTH, (1, 8), ON_CARD, machine()).derive(recipe, cfg)
    derived, itself = (needs(found, cfg, ON_CARD, 0) for found in (shapes, trace(cfg, on_card=True)))
    for phase in ("forward", "backward", "step"):
        assert derived.phases[phase].device == pytest.approx(itself.phases[phase].device, rel=0.01), phase


@pytest.mark.wrong
def test_a_derivation_from_another_depth_differs_from_the_trace(composed):
    recipe = as_override(*RECIPES[0])
    cfg = composed(recipe)
    wrong = Derivation(composed, DEPTH - 1, (1, 8), ON_CARD, machine())
    derived = needs(wrong.derive(recipe, cfg)[0], cfg, ON_CARD, 0)
    assert derived.device_peak != pytest.approx(needs(trace(cfg, on_card=True), cfg, ON_CARD, 0).device_peak, rel=0.01)


@pytest.mark.rows("every_k-True", "none-False")
@pytest.mark.parametrize(
    ("checkpointing", "bends"),
    [
        ("none", False),
        ("every_layer", False),
        ("selective", False),
        ("offload", False),
        ("sqrt", True),
        ("every_k", True),
    ],
)
def test_a_third_depth_tells_where_blocks_do_not_add_the_same(composed, checkpointing, bends):
    derivation = Derivation(composed, 48, (1, 8), ON_CARD, machine())
    recipe = as_override("bf16", "adamw", checkpointing, "full", 8)
    why = derivation.estimate(recipe, composed(recipe))
    assert (why is not None) == bends
    assert not bends or f"with gradient_checkpointing={checkpointing} not every block adds the same" in why


def test_two_lines_make_a_plane():
    corners = [(d, b, 7 + 3 * d + 5 * b + 2 * d * b) for d in (3, 4) for b in (1, 8)]
    assert bilinear(corners, 48, 4) == 7 + 3 * 48 + 5 * 4 + 2 * 48 * 4
    assert bilinear(corners[::2], 48, 1) == 7 + 3 * 48 + 5 + 2 * 48
    knee = [(d, b, d * min(b, 2)) for d in (3, 4) for b in (1, 2, 8)]
    assert [bilinear(knee, 10, b) for b in (1, 2, 4, 8)] == [10, 20, 20, 20]


@cache
def plain(lines):
    return run_of(lines).resolved()


def typed(*lines, may_change=None):
    def compose(recipe):
        return plain(tuple(replaced(lines, recipe)))

    return Typed(compose({}), lines, compose, may_change)


def all_of(asked, card=None):
    return [one for training in trainings(asked, card) for one in candidates(asked, training)]


@cache
def found_for(*lines, may_change=None):
    """Candidates of one micro-batch and one way to compute."""
    return all_of(typed(*lines, "batch_size=1", "gradient_checkpointing=none", "loss=full", may_change=may_change))


def of(found, *groups):
    return {tuple(one.option[group] for group in groups) for one in found}


@pytest.mark.matrix
def test_what_was_typed_is_not_touched_and_the_update_keeps_its_size():
    found = [one.option for one in all_of(typed("batch_size=12", "precision=bf16", "optim=sgd"))]
    assert {(r["precision"], r["optim"]) for r in found} == {("bf16", "sgd")}
    assert {int(r["batch_size"]) * int(r.get("accumulation.batches", 1)) for r in found} == {12}
    lines = ("precision=bf16", "optim=sgd", "batch_size=12", "accumulation=by_step", "accumulation.sizes={0: 3}")
    found = [one.option for one in all_of(typed(*lines))]
    assert {r["batch_size"] for r in found} == {"12"} and not any("accumulation" in r for r in found)
    auto = ("batch_size=auto", "accumulation=effective_batch", "accumulation.size=6", "memory.limit=1GiB")
    assert {one.option["batch_size"] for one in all_of(typed(*lines[:2], *auto))} == {"1", "2", "3", "6"}


@pytest.mark.matrix
def test_masters_step_with_the_optimizer_that_is_made_for_the_host():
    for lines, optimizers in (([], {"adamw", "adamw8bit", "adafactor"}), (["optim=adam8bit"], {"adam8bit"})):
        found = found_for(*lines)
        assert {r.option["optim"] for r in found if r.option["precision"] == "bf16-master"} == optimizers
        assert "adam8bit" in {r.option["optim"] for r in found if r.option["precision"] == "bf16"}


@pytest.mark.matrix
def test_a_card_without_bf16_products_is_given_fp16():
    def precisions(lines, card):
        asked = typed(*lines, "optim=adamw", "batch_size=8", "gradient_checkpointing=none", "loss=full")
        return {precision for (precision,) in of(all_of(asked, card), "precision")}

    t4, other = cards.named("t4"), cards.named("rtx3060")
    assert [one.multiplies("bfloat16") for one in (t4, other, card(1))] == [False, True, True]
    assert precisions([], t4) == {"32", "16", "16-master"}
    assert precisions([], other) == precisions([], None) == {"32", "bf16", "bf16-sr", "bf16-master"}
    assert precisions(["precision=32"], t4) == {"32"} and not precisions(["precision=bf16"], t4)


def test_and_what_was_typed_for_it_is_refused():
    with pytest.raises(Refused, match=r"no bf16 units.*Type precision=16, 16-master or 32"):
        recipes.search(typed("precision=bf16", "batch_size=8"), Target(True, cards.named("t4")))


# --- what a recipe changes --------------------------------------------------------------------------------------------


@pytest.mark.rows("lines[1457]-*", "lines12-*")
@pytest.mark.parametrize(
    ("lines", "precision", "optim", "tier", "says"),
    [
        ([], "32", "adamw", 1, []),
        ([], "bf16", "adamw", 2, ["bf16"]),
        ([], "bf16-master", "adamw", 2, ["bf16-master"]),
        ([], "32", "adam8bit", 2, ["8-bit state"]),
        ([], "bf16-master", "adamw8bit", 2, ["bf16-master", "8-bit state"]),
        ([], "bf16-sr", "adamw", 3, ["bf16-sr"]),
        ([], "32", "adafactor", 3, ["adafactor for adamw"]),
        ([], "bf16-sr", "adafactor", 3, ["bf16-sr", "adafactor for adamw"]),
        (["precision=bf16-true"], "bf16-sr", "adamw", 3, ["bf16-sr"]),  # with may_change
        (["precision=bf16-sr"], "bf16-master", "adamw", 2, ["bf16-master"]),
        (["optim=adamw8bit"], "32", "adam8bit", 2, ["8-bit state"]),
        (["precision=bf16"], "bf16", "adam8bit", 2, ["8-bit state"]),
        (["precision=bf16-true"], "bf16-true", "adamw", 1, []),
        (["optim=adafactor"], "bf16", "adafactor", 2, ["bf16"]),
        (["optim=adam8bit"], "bf16-master", "adam8bit", 2, ["bf16-master"]),
        (["optim=lion8bit"], "32", "lion8bit", 1, []),
    ],
)
def test_a_recipe_says_what_it_changes_and_how_far_that_is(lines, precision, optim, tier, says):
    may_change = None if {f"precision={precision}", f"optim={optim}"} & {*lines} or not lines else CHANGEABLE
    found = found_for(*lines, may_change=may_change)
    (one,) = [one for one in found if (one.option["precision"], one.option["optim"]) == (precision, optim)]
    assert (one.training.tier, [change.says for change in one.training.changes]) == (tier, says)


def test_masters_of_the_precision_that_was_typed_are_no_change():
    found = [
        one
        for one in found_for("precision=bf16", may_change=("precision",))
        if one.option["precision"] == "bf16-master"
    ]
    assert found and all(one.training.tier == 1 for one in found)


def test_may_change_names_the_groups_that_do_typed_or_not():
    for said, may_change, precisions, optimizers in (
        ([], (), {"32"}, {"adamw"}),
        (["precision=bf16"], ("precision",), {"bf16", "bf16-sr", "bf16-master"}, {"adamw"}),
        (["precision=bf16"], ("optim",), {"bf16"}, {"adamw", "adam8bit", "adafactor"}),
        (["precision=bf16"], None, {"bf16"}, {"adamw", "adam8bit", "adafactor"}),
    ):
        found = of(found_for(*said, may_change=may_change), "precision", "optim")
        assert ({p for p, _ in found}, {o for _, o in found}) == (precisions, optimizers), (said, may_change)


def test_state_in_fewer_bits_keeps_the_other_arguments_of_the_optimizer():
    """Shipped, adam8bit has no weight decay, and adamw has."""
    (eight,) = [one.option for one in found_for("precision=32") if one.option["optim"] == "adam8bit"]
    assert {key: value for key, value in eight.items() if key.startswith("optim.")} == {"optim.weight_decay": "0.1"}
    own = ("optim.weight_decay=0.3", "optim.betas=[0.8,0.9]")  # what was typed reaches every optimizer that takes it
    assert {one.option["optim"] for one in found_for(*own, "precision=32")} == {"adamw", "adam8bit"}
    for one in found_for(*own, "precision=32"):
        if one.option["optim"] == "adam8bit":
            assert one.run.optim.weight_decay == 0.3 and list(one.run.optim.betas) == [0.8, 0.9]
        assert not any(key.startswith("optim.") for key in one.option)


def test_a_part_that_nothing_reads_is_put_in_its_place():
    """As if it were composed, in a tenth of the time."""
    asked = typed("device=cpu", "seq_len=64")
    for checkpointing, loss, more in (("offload", "chunked", {}), ("every_k", "full", {"precision": "bf16-sr"})):
        recipe = {"gradient_checkpointing": checkpointing, "loss": loss, **more}
        assert asked.config(recipe) == asked.compose(recipe) != asked.run
    for group, names in ((group, techniques(group)) for group in COMPUTED):
        assert all(stands_alone(group, name) for name in names), group
    assert not stands_alone("optim", "adamw")  # which reads lr
    assert not stands_alone("precision", "bf16")  # which sets the plugin
    assert not stands_alone("data", "stdlib") or "${data." not in "".join(f.read_text() for f in CONF.rglob("*.yaml"))
    assert not stands_alone("batch_size", "8")  # no group


@pytest.mark.matrix
def test_gradients_step_in_backward_where_nothing_forbids_it():
    lines = ("precision=bf16", "optim=adamw", "gradient_checkpointing=none", "loss=full")
    assert not any("optim.in_backward" in one.option for one in all_of(typed(*lines)))  # clip=1.0
    found = [one.option for one in all_of(typed(*lines, "clip=null"))]
    in_backward = [option for option in found if "optim.in_backward" in option]
    assert [option["batch_size"] for option in in_backward] == ["8"]  # not in several micro-batches
    assert len(found) == 5
    masters = all_of(typed("precision=bf16-master", *lines[1:], "clip=null"))
    assert not any("optim.in_backward" in one.option for one in masters)
    said = all_of(typed(*lines, "clip=null", "optim.in_backward=false"))
    assert not any("optim.in_backward" in one.option for one in said)


@pytest.fixture
def ranked(monkeypatch):
    """(may_change, room) -> the plan of made-up recipes: tier by their changes, bytes and seconds as given."""

    def make(recipes_, room, may_change=None):
        asked = typed("batch_size=1", "gradient_checkpointing=none", "loss=full", may_change=may_change)

        class Made:
            traces, machine = 0, machine()

            def __init__(self, *_, **__):
                pass

            def needed(self, *_):
                return ({}, (1, 1)), ({}, (1, 1))

            def has(self, *_):
                return True

            def of_parameters(self, option, cfg):
                return Trace(
                    0, 0, 0, 0, 0, 0, False, phases={"step": Point("step", {"weights": self.bytes(option)}, 0)}
                )

            def bytes(self, option):
                return recipes_[option["precision"], option["optim"]][0]

            def derive(self, option, cfg):
                size, seconds = recipes_[option["precision"], option["optim"]]
                return size, seconds

            def estimate(self, *_):
                return None

        def prediction(size):
            return Prediction({"step": Need(size, 0)}, {}, {}, size, size, 0, True)

        monkeypatch.setattr(recipes, "Derivation", Made)
        monkeypatch.setattr(recipes, "machine", lambda *_: None)
        monkeypatch.setattr(recipes, "needs", lambda size, *_: prediction(size))
        monkeypatch.setattr(recipes, "predict", lambda cfg, _: prediction(recipes_[cfg.made]))
        found = [one for one in trainings(asked) if tuple(one.chosen.values()) in recipes_]
        monkeypatch.setattr(recipes, "trainings", lambda *_: found)
        monkeypatch.setattr(recipes._Search, "_confirmed", lambda _, ranked: ranked)  # they are made up
        return recipes.search(asked, Target(True, card(room)))

    return make


MADE = {  # (precision, optimizer) -> (bytes, seconds)
    ("32", "adamw"): (100, 9.0),
    ("bf16", "adamw"): (80, 3.0),
    ("bf16-master", "adamw8bit"): (40, 4.0),
    ("bf16-sr", "adafactor"): (20, 1.0),
}


@pytest.mark.parametrize(
    ("room", "may_change", "chosen"),
    [
        (100, None, "as typed"),  # though others are faster
        (99, None, "bf16"),
        (79, None, "bf16-master, 8-bit state"),
        (39, None, "bf16-sr, adafactor for adamw"),
        (19, None, None),
        (100, ["precision", "optim"], "bf16"),  # asked for: what is close is taken where it is faster
        (39, ["precision", "optim"], "bf16-sr, adafactor for adamw"),  # and what is not, where nothing else fits
    ],
)
def test_what_is_closest_to_the_typed_training_comes_first(ranked, room, may_change, chosen):
    plan = ranked(MADE, room, may_change)
    assert (plan.chosen and plan.chosen.says) == chosen
    if chosen == "as typed":
        assert len(plan.recipes) == 1 and plan.hopeless == 0  # nothing else was looked at
    if chosen is None:
        assert plan.hopeless == 3 and [r.says for r in plan.recipes] == ["bf16-sr, adafactor for adamw"]


@pytest.mark.matrix
def test_every_config_of_a_search_is_what_would_be_composed():
    lines = ("device=cpu", "gradient_checkpointing=none", "loss=chunked", "loss.rows=256", "optim=adamw")
    asked = typed(*lines, "optim.betas=[0.8,0.9]", "batch_size=8", may_change=("precision",))
    derivation = Derivation(asked.config, DEPTH, (1, 8), ON_CARD, machine())
    for one in all_of(asked):
        assert asked.config(one.option) == asked.compose(one.option)
        passes, parameters = (recipe for recipe, _ in derivation.needed(one.option, one.run))
        # what was typed for adamw and for a loss in chunks means nothing to these
        assert asked.config(passes) == asked.compose({"optim.betas": None, **passes})
        assert asked.config(parameters) == asked.compose({"loss.rows": None, **parameters})


@pytest.mark.parametrize(
    ("named", "strategy", "sequences"),
    [
        ("strategy=tensor_parallel", "tensor_parallel", 8),  # of which all eight read the same
        ("strategy=fsdp", "fsdp", 8),
        ("strategy=ddp", "ddp", 8),  # where none is typed, too
        ("strategy=ddp", "tensor_parallel", 64),
    ],
)
def test_a_window_of_several_devices_has_as_many_sequences_as_typed(named, strategy, sequences):
    """Each device that reads data of its own counts."""
    asked = typed("devices=8", "device=cpu", "batch_size=8", named)
    asked = replace(asked, lines=())
    tried = micro_batches(asked, asked.config({"strategy": strategy}))
    assert {size * int(more.get("accumulation.batches", 1)) for size, more in tried} == {sequences}


@pytest.mark.matrix
def test_where_everything_is_refused_the_reason_is_said():
    with pytest.raises(Refused, match=r"Type memory\.limit"):
        recipes.search(typed("batch_size=auto", "accumulation=effective_batch", "device=cpu"), Target(on_card=False))


def test_equally_fast_is_what_changes_least(ranked):
    near = {("bf16", "adamw"): (80, 3.0), ("bf16", "adam8bit"): (40, 3.0)}
    assert ranked(near, 80).chosen.says == "bf16"
    near["bf16", "adam8bit"] = (40, 2.5)
    assert ranked(near, 80).chosen.says == "bf16, 8-bit state"


def test_sqrt_is_never_preferred():
    assert not techniques("gradient_checkpointing")["sqrt"].tried


@pytest.mark.matrix
def test_the_fastest_that_fits_comes_first_and_then_what_does_not_fit():
    lines = ("device=cpu", "precision=bf16", "optim=adamw", "gradient_checkpointing=none", "loss=full")
    asked = typed(*SHAPE, *lines, may_change=[])
    asked = replace(asked, lines=[line for line in asked.lines if not line.startswith("batch_size")])
    everything = recipes.search(asked, Target(True, card(2**40), 2**40))
    assert everything.chosen.traced and len(everything.recipes) == 4
    needed = sorted(r.prediction.device_need for r in everything.recipes)
    some = recipes.search(asked, Target(True, card(needed[1]), 2**40))
    fits = [*map(some.fits, some.recipes)]
    assert fits == sorted(fits, reverse=True) and 1 <= sum(fits) <= 3
    assert recipes.search(asked, Target(True, card(1000), 2**40)).chosen is None


def test_the_depth_is_that_of_the_architecture(config):
    for name, depth in (("gpt2-xl", 48), ("llama-3.2-1b", 16), ("qwen3-0.6b", 28)):
        cfg = config(f"model={name}").resolved()
        assert recipes.depth_and_period(cfg) == (depth, 1)


def test_a_model_that_is_no_stack_of_equal_blocks_is_refused_a_search(config):
    cfg = config().resolved()
    cfg = cfg.replacing("model.architecture", {"model_type": "gemma3_text", "num_hidden_layers": 6})
    with pytest.raises(Refused, match="search=false"):
        recipes.depth_and_period(cfg)


def test_a_search_says_that_it_takes_long_before_it_does(config, composed, capsys, monkeypatch):
    cfg = composed({"batch_size": "2"})
    options = [{"gradient_checkpointing": name, "loss": "full", "precision": "32"} for name in ("none", "every_layer")]
    said = []

    class Slow:
        def has(self, *_):
            return False

        def traced(self, recipe, batches):
            said.append(capsys.readouterr().err)
            time.sleep(0.01)

    monkeypatch.setattr(trace_all, "WAIT", 0.005)
    trace_all.trace_all(cfg, Slow(), [(option, (1, 2)) for option in options])
    assert "Tracing 2 ways" in said[0] and "which takes 0 to 0 s" in said[1]


def test_a_model_that_cannot_be_traced_is_refused_a_search(composed):
    class Untraceable:
        def has(self, *_):
            return False

        def traced(self, recipe, batches):
            raise RuntimeError("numbers are asked for")

    with pytest.raises(Refused, match=r"numbers are asked for.*search=false"):
        trace_all.trace_all(composed({"batch_size": "2"}), Untraceable(), [({}, (1, 1))])


# --- time -------------------------------------------------------------------------------------------------------------


def test_an_operator_takes_what_is_slower():
    import torch

    rates = Machine("", {"float32": 100.0, "bfloat16": 400.0}, 10.0, 1.0)
    assert rates.operator(Work(torch.float32, 1000, 20)) == 10 + 1
    assert rates.operator(Work(torch.bfloat16, 1000, 20)) == 2.5 + 1
    assert rates.operator(Work(torch.float32, 0, 20)) == 2 + 1


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float64", "int64"])
def test_products_of_a_dtype_without_a_rate_are_refused(name):
    import torch

    rates = Machine("a card", {"float32": 1e12}, 10.0, 1.0)
    with pytest.raises(Refused, match=f"of a card is known for float32, but .* matrices in {name},.*search=false"):
        rates.operator(Work(getattr(torch, name), 10**12, 0))
    assert rates.operator(Work(getattr(torch, name), 0, 20)) == 2 + 1  # reading and writing asks for no rate


def test_recomputation_costs_a_forward_pass_of_the_blocks(composed):
    plain, again = (
        trace(composed(as_override("32", "sgd", checkpointing, "full", 8)), on_card=False)
        for checkpointing in ("none", "every_layer")
    )

    def flops(found, *phases):
        return sum(work.flops * times for (phase, work), times in found.work.items() if phase in phases)

    more = flops(again, "backward") - flops(plain, "backward")
    head, last = 2 * 8 * 128 * 64 * 1000, DEPTH * 2 * 8 * 128 * 64 * 256  # nobody needs a block's last product again
    assert more == pytest.approx(flops(plain, "forward") - head - last, rel=1e-6)
    parameters = 12 * 64 * 64 * DEPTH
    attention = 4 * 8 * 128 * 128 * 64 * DEPTH
    assert flops(plain, "forward") == 2 * 8 * 128 * parameters + attention + head


WORKSPACES = "other"  # four times as large as all else of so small a model, and alike for every depth


def taking_turns(config, recipe, depth=9):
    """Gemma 2's blocks see a window of 4 tokens or all, in turns. Without a flash kernel the scores are T x T."""
    keys = {"model_type": "gemma2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    keys |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "num_hidden_layers": depth}
    keys |= dict.fromkeys([f"{name}_token_id" for name in ("pad", "bos", "eos")], 0)
    lines = ["model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3"]
    cfg = config(*lines, *(f"{key}={value}" for key, value in recipe.items()))
    cfg = cfg.replacing("model.architecture", keys)
    return cfg.resolved()


@pytest.mark.matrix
@pytest.mark.parametrize(("depth", "rounds"), [(9, 2), (10, 2), (10, 1)])
def test_where_blocks_take_turns_rounds_of_them_are_derived(config, monkeypatch, depth, rounds):
    """Wrong on purpose: as if all blocks were equal, and the sliding ones held a map that the others do not."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    plain = Gemma2DecoderLayer.forward

    def heavier(self, hidden_states, *args, **kwargs):
        out = plain(self, hidden_states, *args, **kwargs)
        return out.exp().log() if self.self_attn.sliding_window else out  # keeps two more of its size

    monkeypatch.setattr(Gemma2DecoderLayer, "forward", heavier)
    recipe = as_override("bf16", "adamw", "none", "chunked", 4)

    def composed(recipe):
        return taking_turns(config, recipe, depth)

    cfg = composed(recipe)
    assert recipes.depth_and_period(cfg) == (depth, 2)
    derivation = Derivation(composed, depth, (1, 4), ON_CARD, machine(), period=rounds)
    derived, traced = (
        sum(held for category, held in needs(one, cfg, ON_CARD, 0).by_category.items() if category != WORKSPACES)
        for one in (derivation.derive(recipe, cfg)[0], replace(trace(cfg, True), events=[]))  # a derived one has none
    )
    assert (derived == pytest.approx(traced, rel=0.002)) == (rounds == 2)
    assert rounds == 1 or derivation.estimate(recipe, cfg) is None


@pytest.mark.parametrize("period", range(1, 9))
def test_the_depths_that_are_traced_end_as_the_model_does(period):
    for depth in range(2 * period, 60):
        derivation = Derivation(None, depth, (1, 1), ON_CARD, None, period=period)
        one, two = derivation.depths
        assert 3 <= one < two <= derivation.third and {n % period for n in (one, two, derivation.third)} == {
            depth % period
        }
    assert (Derivation(None, 48, (1, 1), ON_CARD, None).depths, Derivation(None, 48, (1, 1), ON_CARD, None).third) == (
        (3, 4),
        7,
    )


# --- weights that stream ----------------------------------------------------------------------------------------------

STREAMED = [
    ("bf16-master", "adamw8bit", "offload", "chunked", 4, 0),
    ("bf16-master", "adamw", "every_layer", "chunked", 8, 3),
    ("bf16-sr", "adafactor", "selective", "full", 8, 5),
    ("16-master", "adamw", "offload", "full", 2, 2),
]


def window_of(micro_batches):
    return {"accumulation": "fixed", "accumulation.batches": str(micro_batches)}


def streaming(*way):
    *recipe, staying = way
    return as_override(*recipe) | {"weights": "streamed", "weights.resident_blocks": str(staying)}


@pytest.mark.matrix
@pytest.mark.parametrize("way", [STREAMED[0], *(pytest.param(way, marks=pytest.mark.matrix) for way in STREAMED[1:])])
def test_derived_recipes_of_weights_that_stream_are_those_that_are_traced(composed, way):
    """Also where some blocks stay. Wrong on purpose: as if one less of them did."""
    rates, recipe = replace(machine(), overhead=0.0), streaming(*way)
    derivation, cfg = Derivation(composed, DEPTH, (1, 8), ON_CARD, rates), composed(recipe)
    itself = trace(cfg, on_card=True)
    derived, traced = derivation.derive(recipe, cfg), needs(itself, cfg, ON_CARD, 0)
    assert derived[1] == pytest.approx(of_trace(rates, cfg, itself).seconds, rel=0.01)
    assert (derived[0].weights, derived[0].streamed, derived[0].host_bytes) == pytest.approx(
        (itself.weights, itself.streamed, itself.host_bytes), rel=0.001
    )
    assert derived[0].drive == pytest.approx(itself.drive, rel=0.001)
    found = needs(derived[0], cfg, ON_CARD, 0)
    for phase, need in traced.phases.items():
        assert found.phases[phase].host == pytest.approx(need.host, rel=0.01), phase
        assert found.phases[phase].device == pytest.approx(need.device, rel=0.01), phase
    if way[-1]:
        fewer, _ = derivation.derive(recipe | {"weights.resident_blocks": str(way[-1] - 1)}, cfg)
        assert fewer.weights < 0.99 * itself.weights and fewer.streamed > 1.1 * itself.streamed


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("micro_batches", "policy", "clip", "batches"),
    [
        (8, "offload", "null", (4, 4)),
        *(pytest.param(2, "offload", clip, (1, 8), marks=pytest.mark.matrix) for clip in ("1.0", "null")),
        pytest.param(5, "every_layer", "null", (1, 8), marks=pytest.mark.matrix),
        pytest.param(3, "selective", "1.0", (1, 8), marks=pytest.mark.matrix),
    ],
)
def test_derived_windows_whose_micro_batches_pass_through_blocks_together_are_those_that_are_traced(
    composed, micro_batches, policy, clip, batches
):
    """Wrong on purpose: as if the window had one micro-batch less; and as if each micro-batch passed by itself."""
    rates = replace(machine(), overhead=0.0)
    recipe = streaming("bf16-master", "adamw8bit", policy, "chunked", 4, 0)
    recipe |= {"weights.order": "by_layer"} | window_of(micro_batches)
    compose = composed
    composed = lambda recipe: compose({"clip": clip} | recipe)  # noqa: E731
    derivation, cfg = Derivation(composed, DEPTH, batches, ON_CARD, rates), composed(recipe)
    itself = trace(cfg, on_card=True)
    itself = replace(itself, events=[])  # a derived one has none
    (derived, seconds), traced = derivation.derive(recipe, cfg), needs(itself, cfg, ON_CARD, 0)
    assert seconds == pytest.approx(of_trace(rates, cfg, itself).seconds, rel=0.01)
    found = needs(derived, cfg, ON_CARD, 0)
    for phase, need in traced.phases.items():
        assert found.phases[phase].device == pytest.approx(need.device, rel=0.01), phase
    base = sum(traced.host_categories.values()) - traced.host_categories["tensors"]
    assert found.host_peak - base == pytest.approx(traced.host_peak - base, rel=0.01)
    less = recipe | window_of(micro_batches - 1)
    fewer, faster = derivation.derive(less, composed(less))
    assert faster < 0.95 * seconds
    assert fewer.phases["backward"].total < 0.99 * derived.phases["backward"].total
    alone = recipe | {"weights.order": "by_micro_batch"}
    other, _ = derivation.derive(alone, composed(alone))
    assert other.phases["backward"].total < 0.95 * derived.phases["backward"].total


@pytest.mark.matrix
def test_the_device_holds_two_blocks_of_however_many(composed):
    """Weights there are those outside the blocks and two slots, whatever the depth, and those of blocks that stay."""
    recipe = streaming(*STREAMED[0])
    cfg = composed(recipe)
    by_depth = {depth: Derivation(composed, depth, (1, 8), ON_CARD, machine()) for depth in (7, 14)}
    seven, fourteen = (one.of_parameters(recipe, cfg) for one in by_depth.values())
    block = seven.streamed // 7
    assert seven.weights == pytest.approx(fourteen.weights, abs=200)  # a NaN for each parameter
    assert fourteen.streamed == 14 * block and block == pytest.approx(2 * (12 * 64 * 64 + 13 * 64), rel=0.02)
    stay = by_depth[14].of_parameters(recipe | {"weights.resident_blocks": "5"}, cfg)
    assert stay.weights - fourteen.weights == pytest.approx(5 * block, rel=0.02)  # without gaps between parameters
    assert stay.streamed == fourteen.streamed - 5 * block


@pytest.mark.matrix
def test_weights_stream_with_what_steps_on_the_host_and_computes_again():
    lines = ("optim=adamw", "batch_size=1", "loss=full")
    found = all_of(typed(*lines, "precision=bf16-master")) + all_of(typed(*lines, "precision=bf16"))
    ways = {(c.option["precision"], c.option["gradient_checkpointing"]) for c in found if c.streams}
    assert ways == {("bf16-master", way) for way in ("every_layer", "offload", "selective")}
    asked = typed(*lines[1:], "precision=bf16-sr", "gradient_checkpointing=offload", may_change=["optim"])
    at_random = [c.option for c in all_of(asked) if c.streams]
    assert {option["optim"] for option in at_random} == {"adamw", "adamw8bit", "adafactor"}  # stepped on the host
    said = all_of(typed(*lines, "precision=bf16-master", "weights=resident"))
    assert said and not any(c.streams for c in said)


def test_windows_of_weights_that_stream_are_tried_in_both_orders():
    lines = ("optim=adamw", "loss=full", "precision=bf16-master", "weights=streamed", "gradient_checkpointing=offload")

    def orders(*more):
        found = [candidate.option for candidate in all_of(typed(*lines, *more))]
        return {(option.get("weights.order"), option["batch_size"]) for option in found}

    assert orders("batch_size=2") == {(None, "2")}
    both = {(order, "2") for order in (None, "by_micro_batch")}  # without a word: by layer
    assert orders("batch_size=2", "accumulation=fixed") == both
    assert orders("batch_size=2", "accumulation=fixed", "weights.order=by_layer") == {(None, "2")}
    others = ("batch_size=2", "accumulation=fixed")
    assert orders(*others, "gradient_checkpointing=sqrt") == {(None, "2")}
    assert orders(*others, "gradient_checkpointing=every_layer") == {(None, "2"), ("by_layer", "2")}


@pytest.mark.matrix
def test_what_fits_on_the_device_stays_there():
    """If not all blocks fit, as many as fit stay. Wrong: a recipe that streams beside one that fits."""
    lines = ("model.architecture.n_embd=1024", *SHAPE[1:3], "model.architecture.vocab_size=300", "seq_len=16")
    lines += ("batch_size=1", "device=cpu", "precision=bf16-master", "optim=adamw", "loss=full")
    asked = typed(*lines, "gradient_checkpointing=offload", may_change=[])

    def planned(size):
        return recipes.search(asked, Target(True, card(size), 2**40))

    (only,) = planned(2**40).recipes
    assert only.overrides == () and only.traced
    plan = planned(int(0.95 * only.prediction.device_need))
    assert plan.chosen.overrides == ("weights=streamed", "weights.resident_blocks=4")
    assert plan.chosen.traced and plan.chosen.changes == ()
    none = next(recipe for recipe in plan.recipes if recipe.overrides == ("weights=streamed",))
    assert none.seconds > plan.chosen.seconds and none.prediction.device_peak < plan.chosen.prediction.device_peak
    assert planned(none.prediction.device_peak // 2).chosen is None
