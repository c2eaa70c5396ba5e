"""Tests the search for recipes: which settings it may change, and which recipe it chooses among those that fit."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest

from lowmem.config import cards
from lowmem.config.cards import Card
from lowmem.config.declarations import CHANGEABLE, COMPUTED, techniques
from lowmem.config.refusals import refused
from lowmem.config.settle import Run, run_of
from lowmem.config.typed_lines import CONF, replaced
from lowmem.plan.column import DeviceBytes, DriveBytes, HostBytes
from lowmem.plan.cost.machine import Machine
from lowmem.plan.prediction import Need, Prediction
from lowmem.plan.search import candidates, recipes
from lowmem.plan.search.candidates import PrecisionAndOptimizer, Typed, micro_batches, routes, stands_alone, trainings
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import trace
from lowmem.system.errors import Refused

DEPTH = 7
SHAPE = [
    *("model.architecture.n_embd=64", f"model.architecture.n_layer={DEPTH}", "model.architecture.n_head=2"),
    *("model.architecture.vocab_size=1000", "seq_len=128", "batch_size=8"),
]


def machine():
    return Machine("a card", **cards.named(cards.REFERENCE).rates)


def card(size, **said):
    return Card(size, "made up", **said)


@cache
def plain(lines):
    return run_of(lines).resolved()


def typed(*lines, may_change=None):
    def compose(recipe):
        return plain(tuple(replaced(lines, recipe)))

    return Typed(compose({}), lines, compose, may_change)


@dataclass(frozen=True)
class Candidate:
    """A recipe: its overrides (values by group or key), its composed run, and its precision and optimizer."""

    option: dict
    run: Run
    training: PrecisionAndOptimizer

    @property
    def streams(self):
        return self.run.streams


def all_of(asked, card=None):
    """Returns every recipe that the climb search may try."""
    found = []
    for training in trainings(asked, card):
        for route in routes(asked, training):
            for way in product(route.checkpointings, route.losses):
                computed = {**route.option, **dict(zip(COMPUTED, way, strict=True))}
                if not any(refused(run := asked.config(computed))):
                    sizes = [{"batch_size": str(size), **more} for size, more in route.micro_batches]
                    found += [Candidate({**computed, **size}, run, training) for size in sizes]
    return found


@cache
def found_for(*lines, may_change=None):
    """Returns the candidates with batch_size=1, no checkpointing and the full loss."""
    return all_of(typed(*lines, "batch_size=1", "gradient_checkpointing=none", "loss=full", may_change=may_change))


def of(found, *groups):
    return {tuple(one.option[group] for group in groups) for one in found}


@pytest.mark.matrix
def test_search_keeps_typed_choices_and_the_effective_batch():
    found = [one.option for one in all_of(typed("batch_size=12", "precision=bf16", "optim=sgd"))]
    assert {(r["precision"], r["optim"]) for r in found} == {("bf16", "sgd")}
    assert {int(r["batch_size"]) * int(r.get("accumulation.batches", 1)) for r in found} == {12}
    lines = ("precision=bf16", "optim=sgd", "batch_size=12", "accumulation=by_step", "accumulation.sizes={0: 3}")
    found = [one.option for one in all_of(typed(*lines))]
    assert {r["batch_size"] for r in found} == {"12"} and not any("accumulation" in r for r in found)
    auto = ("batch_size=auto", "accumulation=effective_batch", "accumulation.size=6", "memory.limit=1GiB")
    assert {one.option["batch_size"] for one in all_of(typed(*lines[:2], *auto))} == {"1", "2", "3", "6"}


@pytest.mark.matrix
def test_recipes_with_masters_use_the_host_variant_of_the_8_bit_optimizer():
    for lines, optimizers in (([], {"adamw", "adamw8bit", "adafactor"}), (["optim=adam8bit"], {"adam8bit"})):
        found = found_for(*lines)
        assert {r.option["optim"] for r in found if r.option["precision"] == "bf16-master"} == optimizers
        assert "adam8bit" in {r.option["optim"] for r in found if r.option["precision"] == "bf16"}


@pytest.mark.matrix
def test_card_without_bf16_units_gets_fp16_recipes():
    def precisions(lines, card):
        asked = typed(*lines, "optim=adamw", "batch_size=8", "gradient_checkpointing=none", "loss=full")
        return {precision for (precision,) in of(all_of(asked, card), "precision")}

    t4, other = cards.named("t4"), cards.named("rtx3060")
    assert [one.multiplies("bfloat16") for one in (t4, other, card(1))] == [False, True, True]
    assert precisions([], t4) == {"32", "16", "16-master"}
    assert precisions([], other) == precisions([], None) == {"32", "bf16", "bf16-sr", "bf16-master"}
    assert precisions(["precision=32"], t4) == {"32"} and not precisions(["precision=bf16"], t4)


def test_typed_bf16_on_a_card_without_bf16_units_is_refused():
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
        (["precision=bf16-true"], "bf16-sr", "adamw", 3, ["bf16-sr"]),
        (["precision=bf16-sr"], "bf16-master", "adamw", 2, ["bf16-master"]),
        (["optim=adamw8bit"], "32", "adam8bit", 2, ["8-bit state"]),
        (["precision=bf16"], "bf16", "adam8bit", 2, ["8-bit state"]),
        (["precision=bf16-true"], "bf16-true", "adamw", 1, []),
        (["optim=adafactor"], "bf16", "adafactor", 2, ["bf16"]),
        (["optim=adam8bit"], "bf16-master", "adam8bit", 2, ["bf16-master"]),
        (["optim=lion8bit"], "32", "lion8bit", 1, []),
    ],
)
def test_recipe_lists_its_changes_to_the_typed_training_and_their_tier(lines, precision, optim, tier, says):
    may_change = None if {f"precision={precision}", f"optim={optim}"} & {*lines} or not lines else CHANGEABLE
    found = found_for(*lines, may_change=may_change)
    (one,) = [one for one in found if (one.option["precision"], one.option["optim"]) == (precision, optim)]
    assert (one.training.tier, [change.says for change in one.training.changes]) == (tier, says)


def test_masters_added_to_the_typed_precision_count_as_no_change():
    found = [
        one
        for one in found_for("precision=bf16", may_change=("precision",))
        if one.option["precision"] == "bf16-master"
    ]
    assert found and all(one.training.tier == 1 for one in found)


def test_may_change_selects_the_groups_that_the_search_varies():
    for said, may_change, precisions, optimizers in (
        ([], (), {"32"}, {"adamw"}),
        (["precision=bf16"], ("precision",), {"bf16", "bf16-sr", "bf16-master"}, {"adamw"}),
        (["precision=bf16"], ("optim",), {"bf16"}, {"adamw", "adam8bit", "adafactor"}),
        (["precision=bf16"], None, {"bf16"}, {"adamw", "adam8bit", "adafactor"}),
    ):
        found = of(found_for(*said, may_change=may_change), "precision", "optim")
        assert ({p for p, _ in found}, {o for _, o in found}) == (precisions, optimizers), (said, may_change)


def test_recipe_with_8_bit_state_keeps_the_other_arguments_of_the_optimizer():
    """In conf/, adamw has a weight decay of 0.1 and adam8bit has none, so the recipe sets the weight decay of adamw."""
    (eight,) = [one.option for one in found_for("precision=32") if one.option["optim"] == "adam8bit"]
    assert {key: value for key, value in eight.items() if key.startswith("optim.")} == {"optim.weight_decay": "0.1"}
    own = ("optim.weight_decay=0.3", "optim.betas=[0.8,0.9]")  # typed arguments reach every optimizer that accepts them
    assert {one.option["optim"] for one in found_for(*own, "precision=32")} == {"adamw", "adam8bit"}
    for one in found_for(*own, "precision=32"):
        if one.option["optim"] == "adam8bit":
            assert one.run.optim.weight_decay == 0.3 and list(one.run.optim.betas) == [0.8, 0.9]
        assert not any(key.startswith("optim.") for key in one.option)


def test_candidate_config_with_swapped_groups_equals_a_composed_one():
    """The search swaps groups in a composed config, which takes a tenth of the time of composing a new one."""
    asked = typed("device=cpu", "seq_len=64")
    for checkpointing, loss, more in (("offload", "chunked", {}), ("every_k", "full", {"precision": "bf16-sr"})):
        recipe = {"gradient_checkpointing": checkpointing, "loss": loss, **more}
        assert asked.config(recipe) == asked.compose(recipe) != asked.run
    for group, names in ((group, techniques(group)) for group in COMPUTED):
        assert all(stands_alone(group, name) for name in names), group
    assert not stands_alone("optim", "adamw")  # its yaml reads lr
    assert not stands_alone("precision", "bf16")  # its yaml sets the plugin
    assert not stands_alone("data", "stdlib") or "${data." not in "".join(f.read_text() for f in CONF.rglob("*.yaml"))
    assert not stands_alone("batch_size", "8")  # not a group


@pytest.mark.matrix
def test_optimizer_step_in_backward_is_tried_only_without_clipping_accumulation_and_masters():
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


def test_recipes_with_typed_optimizer_step_in_backward_have_one_micro_batch():
    lines = ("precision=bf16", "optim=adamw", "gradient_checkpointing=none", "loss=full", "clip=null")
    found = [one.option for one in all_of(typed(*lines, "optim.in_backward=true"))]
    assert [option["batch_size"] for option in found] == ["8"]


@pytest.mark.seam
def test_search_with_typed_optimizer_step_in_backward_finds_a_recipe():
    lines = ("precision=bf16", "optim=adamw", "clip=null", "optim.in_backward=true", "model.architecture.n_layer=2")
    plan = recipes.search(typed(*SHAPE, *lines), Target(True, card(2**40)))
    assert plan.chosen is not None and not any("batch_size" in line for line in plan.chosen.overrides)
    plan = recipes.search(typed(*SHAPE, *lines), Target(True, card(2**20)))
    assert plan.chosen is None and plan.recipes[0].traced


def test_refused_recipe_is_skipped_and_its_reason_is_kept(monkeypatch):
    """Some recipes are refused only while they are traced."""
    honest = recipes.predict

    def predict(run, *given):
        if not run.loss.arguments:
            raise Refused("loss=full: made up.")
        return honest(run, *given)

    monkeypatch.setattr(recipes, "predict", predict)
    monkeypatch.setattr(recipes, "machine", lambda *_: machine())
    lines = ("precision=bf16", "optim=adamw", "gradient_checkpointing=none", "model.architecture.n_layer=2")
    state = recipes._Search(typed(*SHAPE, *lines), Target(True, card(2**40)))
    assert state.fits_in(1) and "loss=full: made up." in [*state.refused()]


def test_search_on_two_devices_for_a_model_that_cannot_be_traced_is_refused(monkeypatch):
    def untraceable(*_):
        raise RuntimeError("The tensor has no numbers.")

    monkeypatch.setattr(recipes, "trace", untraceable)
    with pytest.raises(Refused, match="The tensor has no numbers"):
        recipes.search(typed(*SHAPE, "devices=2"), Target(True, card(2**40)))


def test_lower_bound_of_device_memory_of_a_sharded_run_is_below_its_traced_memory():
    """The bound omits weights in host memory, and divides weights and optimizer state in device memory by the number of
    devices."""
    lines = [*SHAPE, "precision=bf16", "optim=adamw", "devices=2", "accumulation=none", "gradient_checkpointing=none"]
    target = Target(True, card(2**40))
    for strategy in ("fsdp", "fsdp_offload", "pipeline"):
        asked = typed(*lines, f"strategy={strategy}", "loss=full")
        state = recipes._Search(asked, target)
        (route, *_) = routes(asked, state.trainings[0], [strategy])
        exact = recipes.predict(asked.run, target)
        assert state._least_of_card(route) <= exact.device.total, strategy


WIDE = [*SHAPE[1:-1], "model.architecture.n_embd=2048", "optim=adamw", "loss=full"]  # 0.7 GB of 16-bit weights
STREAMED = ["precision=bf16-sr", "weights=streamed"]
HOST = {
    "masters": ["precision=bf16-master", "weights=resident"],
    "masters that step early": ["precision=bf16-master", "weights=resident", "clip=null"],
    "streamed": STREAMED,
    "streamed from a drive": [*STREAMED, "weights.drive=FOLDER", "weights.drive_holds=all"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", HOST)
def test_lower_bound_of_host_memory_of_a_recipe_is_below_its_traced_memory(name):
    asked = typed(*WIDE, *HOST[name])
    state = recipes._Search(asked, Target(True, card(2**40), 2**50))
    every = [*routes(asked, state.trainings[0])]
    assert {route.sums for route in every} == {True, False}
    for route in every:
        least, traced = state._least_of_host(route), state._climb(route).of_least_memory().prediction.host.total
        assert 0.5 * traced < least <= traced


@pytest.mark.seam
def test_single_micro_batch_is_chosen_if_the_host_has_no_room_for_gradient_sums():
    asked, gpu = typed(*WIDE, *HOST["masters"]), card(2**40)
    (whole,) = (route for route in routes(asked, trainings(asked)[0]) if not route.sums)
    looked = recipes._Search(asked, Target(True, gpu))._climb(whole).of_least_memory()
    plan = recipes.search(asked, Target(True, gpu, round(1.01 * looked.prediction.host.total)))
    assert plan.chosen is not None and not any("accumulation" in line for line in plan.chosen.overrides)
    sums = [recipe for recipe in plan.recipes if "accumulation=fixed" in recipe.overrides]
    assert not any(map(plan.fits, sums))


@pytest.mark.seam
@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_order_by_layer_needs_less_host_memory_than_by_micro_batch_only_without_clipping(monkeypatch, clip):
    """With order=by_layer and without clipping, the gradients of a block are freed before the next block computes its
    gradients. Clipping needs all gradients at once."""
    # both predictions contain the memory of this process, which grows with the tests that ran in it before
    monkeypatch.setattr(recipes.process, "rss_bytes", lambda: 2**28)
    window = ("batch_size=1", "accumulation=fixed", "accumulation.batches=8", "gradient_checkpointing=offload")
    asked = typed(*WIDE, *STREAMED, *window, f"clip={clip}")
    of_run = recipes._Search(asked, Target(True, card(2**40)))
    first, second = (
        of_run._climb(route).of_least_memory().prediction.host.total for route in routes(asked, of_run.trainings[0])
    )
    assert second < 0.9 * first if clip == "null" else second > 0.95 * first
    plan = recipes.search(asked, Target(True, card(2**40), round(0.95 * first)))
    assert (plan.chosen is not None) == (clip == "null")


@pytest.fixture
def ranked(monkeypatch):
    """Returns a function that takes recipes, the bytes of the card and `may_change`, and returns the plan of a search
    among these recipes. Args: recipes: maps (precision, optimizer) to made-up (bytes, seconds)."""

    def make(recipes_, room, may_change=None):
        asked = typed("batch_size=1", "gradient_checkpointing=none", "loss=full", may_change=may_change)

        def made(training):
            return recipes_[tuple(training.chosen.values())]

        def tried(state, overrides, run, changed, tracer=None):
            size, seconds = next(made(one) for one in found if one.changes == changed)
            columns = DeviceBytes("step", size), HostBytes("step"), DriveBytes()
            facts = {"reserved": size, "parameters": 0, "on_card": True, "trace": SimpleNamespace(streamed=0)}
            need = Prediction({"step": Need(size, 0)}, *columns, **facts)
            return state.tried.setdefault(overrides, recipes.Recipe(overrides, need, seconds, changed))

        found = [one for one in trainings(asked) if tuple(one.chosen.values()) in recipes_]
        monkeypatch.setattr(recipes, "machine", lambda *_: machine())
        monkeypatch.setattr(recipes, "trainings", lambda *_: found)
        monkeypatch.setattr(recipes._Search, "_tried", tried)
        monkeypatch.setattr(recipes._Search, "_least_of_card", lambda _, route: made(route.training)[0])
        monkeypatch.setattr(recipes, "routes", lambda *given: (r for r in routes(*given) if not r.run.streams))
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
        (100, None, "as typed"),  # although other recipes are faster
        (99, None, "bf16"),
        (79, None, "bf16-master, 8-bit state"),
        (39, None, "bf16-sr, adafactor for adamw"),
        (19, None, None),
        (100, ["precision", "optim"], "bf16"),  # may_change allows a faster recipe of tier 2
        (39, ["precision", "optim"], "bf16-sr, adafactor for adamw"),  # tier 3 only if nothing else fits
    ],
)
def test_fitting_recipe_closest_to_the_typed_training_is_chosen_unless_may_change_allows_a_faster_one(
    ranked, room, may_change, chosen
):
    plan = ranked(MADE, room, may_change)
    assert (plan.chosen and plan.chosen.says) == chosen
    if chosen == "as typed":
        assert len(plan.recipes) == 1 and plan.too_large == 0  # no other recipe was traced
    if chosen is None:
        assert plan.too_large == 4 and [r.says for r in plan.recipes] == ["bf16-sr, adafactor for adamw"]


@pytest.mark.matrix
def test_every_candidate_config_of_a_search_equals_a_composed_one():
    lines = ("device=cpu", "gradient_checkpointing=none", "loss=chunked", "loss.rows=256", "optim=adamw")
    asked = typed(*lines, "optim.betas=[0.8,0.9]", "batch_size=8", may_change=("precision",))
    for one in all_of(asked):
        assert asked.config(one.option) == asked.compose(one.option)


@pytest.mark.parametrize(
    ("named", "strategy", "sequences"),
    [
        ("strategy=tensor_parallel", "tensor_parallel", 8),  # all eight devices read the same data
        ("strategy=fsdp", "fsdp", 8),
        ("strategy=ddp", "ddp", 8),
        ("strategy=ddp", "tensor_parallel", 64),
    ],
)
def test_optimizer_step_on_several_devices_keeps_the_typed_number_of_sequences(named, strategy, sequences):
    """Only devices that read different data multiply the number of sequences."""
    asked = typed("devices=8", "device=cpu", "batch_size=8", named)
    asked = replace(asked, lines=())
    tried = micro_batches(asked, asked.config({"strategy": strategy}))
    assert {size * int(more.get("accumulation.batches", 1)) for size, more in tried} == {sequences}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), [(8, {"accumulation": "fixed", "accumulation.batches": "2"})]),
        (("accumulation=none",), [(8, {"accumulation": "fixed", "accumulation.batches": "2"})]),
        (
            ("accumulation=fixed", "accumulation.batches=3"),
            [(8, {"accumulation": "fixed", "accumulation.batches": "6"})],
        ),
        (("accumulation=by_epoch", "accumulation.sizes={0: 1, 2: 4}"), []),
        (("accumulation=effective_batch", "accumulation.size=32"), [(8, {})]),
    ],
)
def test_route_with_fewer_data_ranks_keeps_the_effective_batch_of_a_typed_batch_size_or_is_left_out(lines, expected):
    asked = typed("devices=2", "device=cpu", "batch_size=8", "strategy=ddp", *lines)
    assert [*micro_batches(asked, asked.config({"strategy": "tensor_parallel"}))] == expected


def test_route_whose_block_inputs_exceed_only_the_host_does_not_rule_out_the_route_with_a_drive(monkeypatch):
    """With block inputs on the card, the first route exceeds the memory of the card."""
    asked = typed(*WIDE, *HOST["streamed"])
    state = recipes._Search(asked, Target(True, card(10), host_memory=10))
    (route, *_) = routes(asked, state.trainings[0])
    on_drive = route.on_drive("folder", "state")

    def least_memory(way):
        offloads = techniques("gradient_checkpointing")[way.checkpointings[0]].inputs_on_host
        host = 7 if "weights.drive" in way.option else 12
        columns = DeviceBytes("step", 5 if offloads else 20), HostBytes("step", weights=host - 3, activations=3)
        return recipes.Recipe((), SimpleNamespace(device=columns[0], host=columns[1]), 1.0)

    monkeypatch.setattr(state, "_share", lambda _: 0.0)
    monkeypatch.setattr(state, "_fits", lambda r: r.prediction.device.total <= 10 and r.prediction.host.total <= 10)
    monkeypatch.setattr(state, "_climb", lambda way: SimpleNamespace(of_least_memory=lambda: least_memory(way)))
    assert state._hopeful([route]) == [] and state._hopeful([on_drive]) == [on_drive]


@pytest.mark.matrix
def test_search_without_an_allowed_recipe_is_refused_with_the_reason():
    asked = typed("batch_size=1", "device=cpu", "weights=streamed", "precision=32", "gradient_checkpointing=none")
    with pytest.raises(Refused, match=r"weights=streamed.*Type precision"):
        recipes.search(asked, Target(on_card=False))


def test_recipe_with_fewer_changes_wins_at_equal_speed(ranked):
    near = {("bf16", "adamw"): (80, 3.0), ("bf16", "adam8bit"): (40, 3.0)}
    assert ranked(near, 80).chosen.says == "bf16"
    near["bf16", "adam8bit"] = (40, 2.5)
    assert ranked(near, 80).chosen.says == "bf16, 8-bit state"


def test_sqrt_checkpointing_is_declared_as_not_tried_by_the_search():
    assert not techniques("gradient_checkpointing")["sqrt"].tried


@pytest.mark.matrix
def test_fastest_fitting_recipe_ranks_first_and_unfitting_recipes_last():
    lines = ("device=cpu", "precision=bf16", "optim=adamw", "loss=full")
    asked = typed(*SHAPE, *lines, may_change=[])
    asked = replace(asked, lines=[line for line in asked.lines if not line.startswith("batch_size")])
    plan = recipes.search(asked, Target(True, card(2**40), 2**40))
    whole = plan.chosen
    assert whole.traced and whole.overrides == () and len(plan.recipes) == 2  # the chosen recipe and the smallest
    some = recipes.search(asked, Target(True, card(int(0.8 * whole.prediction.device.total)), 2**40))
    fits = [*map(some.fits, some.recipes)]
    assert fits == sorted(fits, reverse=True) and sum(fits) < len(fits)
    assert some.chosen.traced and some.chosen.seconds == min(recipe.seconds for recipe in some.fitting)
    none = recipes.search(asked, Target(True, card(1000), 2**40))
    assert none.chosen is None and len(none.recipes) == 1


# --- time -------------------------------------------------------------------------------------------------------------


def test_traced_recomputation_costs_one_forward_pass_of_the_blocks():
    kept, again = (
        trace(plain((*SHAPE, "device=cpu", "optim=sgd", f"gradient_checkpointing={checkpointing}")), on_card=False)
        for checkpointing in ("none", "every_layer")
    )

    def flops(found, *phases):
        return sum(work.flops * times for (phase, work), times in found.work.items() if phase in phases)

    more = flops(again, "backward") - flops(kept, "backward")
    head, last = (
        2 * 8 * 128 * 64 * 1000,
        DEPTH * 2 * 8 * 128 * 64 * 256,
    )  # the last product of a block is not recomputed
    assert more == pytest.approx(flops(kept, "forward") - head - last, rel=1e-6)
    parameters = 12 * 64 * 64 * DEPTH
    attention = 4 * 8 * 128 * 128 * 64 * DEPTH
    assert flops(kept, "forward") == 2 * 8 * 128 * parameters + attention + head


# --- streamed weights -------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_recipes_with_streamed_weights_update_on_the_host_and_recompute_blocks():
    lines = ("optim=adamw", "batch_size=1", "loss=full")
    found = all_of(typed(*lines, "precision=bf16-master")) + all_of(typed(*lines, "precision=bf16"))
    ways = {(c.option["precision"], c.option["gradient_checkpointing"]) for c in found if c.streams}
    assert ways == {("bf16-master", way) for way in ("every_layer", "offload", "selective")}
    asked = typed(*lines[1:], "precision=bf16-sr", "gradient_checkpointing=offload", may_change=["optim"])
    at_random = [c.option for c in all_of(asked) if c.streams]
    assert {option["optim"] for option in at_random} == {
        "adamw",
        "adamw8bit",
        "adafactor",
    }  # which can update on the host
    said = all_of(typed(*lines, "precision=bf16-master", "weights=resident"))
    assert said and not any(c.streams for c in said)


def test_search_tries_both_orders_of_micro_batches_with_streamed_weights():
    lines = ("optim=adamw", "loss=full", "precision=bf16-master", "weights=streamed", "gradient_checkpointing=offload")

    def orders(*more):
        found = [candidate.option for candidate in all_of(typed(*lines, *more))]
        return {(option.get("weights.order"), option["batch_size"]) for option in found}

    assert orders("batch_size=2") == {(None, "2")}  # one micro-batch has no order
    both = {(order, "2") for order in ("by_layer", "by_micro_batch")}
    assert orders("batch_size=2", "accumulation=fixed") == both
    assert orders("batch_size=2", "accumulation=fixed", "weights.order=by_layer") == {(None, "2")}
    others = ("batch_size=2", "accumulation=fixed")
    assert orders(*others, "gradient_checkpointing=sqrt") == {("by_micro_batch", "2")}
    assert orders(*others, "gradient_checkpointing=every_layer") == both


@pytest.mark.matrix
def test_search_streams_only_the_blocks_that_do_not_fit():
    """If not all blocks fit on the card, the blocks that fit stay resident. No streamed recipe is listed if the
    resident recipe fits."""
    lines = ("model.architecture.n_embd=1024", *SHAPE[1:3], "model.architecture.vocab_size=300", "seq_len=16")
    lines += ("batch_size=1", "device=cpu", "precision=bf16-master", "optim=adamw", "loss=full")
    asked = typed(*lines, "gradient_checkpointing=offload", may_change=[])

    def planned(size):
        return recipes.search(asked, Target(True, card(size), 2**40))

    (only,) = planned(2**40).recipes
    assert only.overrides == () and only.traced
    plan = planned(int(0.95 * only.prediction.device.total))
    assert plan.chosen.overrides == ("weights=streamed", "weights.resident_blocks=4")
    assert plan.chosen.traced and plan.chosen.changes == ()
    none = next(recipe for recipe in plan.recipes if recipe.overrides == ("weights=streamed",))
    assert none.seconds > plan.chosen.seconds and none.prediction.device.total < plan.chosen.prediction.device.total
    assert planned(none.prediction.device.total // 2).chosen is None


@pytest.mark.parametrize("loss", ["full", "chunked", "tiled"])
def test_search_tries_losses_from_full_to_tiled_and_no_two_choices_of_a_group_declare_equal_memory(loss):
    """Choices are ordered by their declared share of activation memory, and the last one is used for the recipe of
    least memory. With equal shares, the order of the config files would decide."""
    asked = replace(typed(f"loss={loss}"), lines=())  # nothing is typed, as if an experiment chose the loss
    for group in COMPUTED:
        tried = [name for name, technique in techniques(group).items() if technique.tried]
        shares = [techniques(group)[name].saves.get("activations", 1.0) for name in tried]
        assert len({*shares}) == len(shares), f"{group}: two of {tried} declare the same share"
    assert candidates._fastest_first(asked, "loss") == ["full", "chunked", "tiled"]
