"""Recipes: derived from small traces as exactly as if each were traced, ranked, and only what may be changed is."""

import time

import pytest
from omegaconf import OmegaConf

from lowmem import gpus
from lowmem.errors import Refused
from lowmem.gpus import Card
from lowmem.plan import recipes
from lowmem.plan.derive import Derivation, bilinear
from lowmem.plan.machine import Machine
from lowmem.plan.prediction import needs
from lowmem.plan.trace import trace
from lowmem.plan.work import Work
from lowmem.techniques import techniques

DEPTH = 7
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
]


def machine():
    return Machine("a card", steps={}, **gpus.named(gpus.REFERENCE).rates)


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
        rows = ["loss.rows=256"] if recipe.get("loss") == "chunked" else []
        lines = [line for line in SHAPE if line.split("=")[0] not in recipe]
        cfg = config(*lines, *(f"{key}={value}" for key, value in recipe.items()), *rows)
        return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))

    return make


@pytest.mark.parametrize("ways", [RECIPES[::4], pytest.param(RECIPES, marks=pytest.mark.slow)])
def test_derived_recipes_are_those_that_are_traced(composed, ways):
    derivation = Derivation(composed, DEPTH, (1, 8), True, machine())
    for way in ways:
        recipe = as_override(*way)
        cfg = composed(recipe)
        derived = needs(derivation.trace(recipe, cfg)[0], cfg, True, 0)
        traced = needs(trace(cfg, on_card=True), cfg, True, 0)
        for phase, need in traced.phases.items():
            # to the byte where a place is linear in depth and batch; scalars and rounded rates make the rest
            assert derived.phases[phase].host == pytest.approx(need.host, rel=0.01), (way, phase)
            if phase == "evaluation":  # its highest place changes with the batch, and a line between two is above both
                assert derived.phases[phase].device >= 0.99 * need.device, way
            else:
                assert derived.phases[phase].device == pytest.approx(need.device, rel=0.01), (way, phase)
        assert derived.device_peak == pytest.approx(traced.device_peak, rel=0.01), way


def test_a_derivation_from_another_depth_is_not(composed):
    recipe = as_override(*RECIPES[0])
    cfg = composed(recipe)
    wrong = Derivation(composed, DEPTH - 1, (1, 8), True, machine())
    derived = needs(wrong.trace(recipe, cfg)[0], cfg, True, 0)
    assert derived.device_peak != pytest.approx(needs(trace(cfg, on_card=True), cfg, True, 0).device_peak, rel=0.01)


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
    derivation = Derivation(composed, 48, (1, 8), True, machine())
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


def test_what_was_typed_is_not_touched_and_the_update_keeps_its_size(config):
    cfg = config("batch_size=12", "precision=bf16", "optim=sgd")
    found = list(recipes.candidates(cfg, ["precision=bf16", "optim=sgd"]))
    assert {(r["precision"], r["optim"]) for r in found} == {("bf16", "sgd")}
    assert {int(r["batch_size"]) * int(r.get("accumulation.batches", 1)) for r in found} == {12}
    typed = ["batch_size=12", "accumulation=by_step"]
    cfg = config(*typed, "accumulation.sizes={0: 3}")
    assert {r["batch_size"] for r in recipes.candidates(cfg, typed)} == {"12"}
    assert not any("accumulation" in r for r in recipes.candidates(cfg, typed))
    cfg = config("batch_size=auto", "accumulation=effective_batch", "accumulation.size=6", "memory.limit=1GiB")
    assert {r["batch_size"] for r in recipes.candidates(cfg, ["batch_size=auto"])} == {"1", "2", "3", "6"}


def test_masters_step_with_the_optimizer_that_is_made_for_the_host(config):
    def config_of(recipe):
        return config(*(f"{key}={value}" for key, value in recipe.items()))

    for typed, optimizers in (([], {"adamw", "adamw8bit", "adafactor"}), (["optim=adam8bit"], {"adam8bit"})):
        options = recipes.candidates(config(), [*typed, "batch_size=8", "gradient_checkpointing=none", "loss=full"])
        found = [option for option, _ in recipes.workable(options, typed, config_of, devices=1)]
        assert {r["optim"] for r in found if r["precision"] == "bf16-master"} == optimizers
        assert "adam8bit" in {r["optim"] for r in found if r["precision"] == "bf16"}


def test_a_card_without_bf16_products_is_given_fp16(config):
    def config_of(recipe):
        return config(*(f"{key}={value}" for key, value in recipe.items()))

    def precisions(typed, has):
        typed = [*typed, "batch_size=8", "gradient_checkpointing=none", "loss=full"]
        options = recipes.candidates(config(*typed), typed, has)
        return {option["precision"] for option, _ in recipes.workable(options, typed, config_of, 1, has)}

    t4, other = gpus.named("t4"), gpus.named("rtx3060")
    assert not t4.has_bf16 and other.has_bf16 and card(1).has_bf16
    assert precisions([], t4) == {"16", "16-master"}
    assert precisions([], other) == precisions([], None) == {"bf16", "bf16-sr", "bf16-master"}
    assert precisions(["precision=32"], t4) == {"32"} and not precisions(["precision=bf16"], t4)


def test_and_what_was_typed_for_it_is_refused(composed):
    typed = ["precision=bf16", "batch_size=8"]
    cfg = composed({"precision": "bf16"})
    with pytest.raises(Refused, match=r"no units for it.*Type precision=16, 16-master or 32"):
        recipes.search(cfg, typed, composed, gpus.named("t4"), None, True)


def test_sqrt_is_never_preferred():
    assert not techniques("gradient_checkpointing")["sqrt"].tried


def test_the_fastest_that_fits_comes_first_and_then_what_does_not_fit(config):
    typed = ["precision=bf16", "optim=adamw", "gradient_checkpointing=none", "loss=full"]

    def compose(recipe):
        lines = {**dict(line.split("=", 1) for line in [*SHAPE, *typed]), **recipe}
        return OmegaConf.create(OmegaConf.to_container(config(*(f"{k}={v}" for k, v in lines.items())), resolve=True))

    everything = recipes.search(compose({}), typed, compose, card(2**40), 2**40, True)
    assert everything.chosen.traced and len(everything.recipes) == 4
    needed = sorted(r.prediction.device_need for r in everything.recipes)
    some = recipes.search(compose({}), typed, compose, card(needed[1]), 2**40, True)
    fits = [r.fits(some.gpu, some.ram) for r in some.recipes]
    assert fits == sorted(fits, reverse=True) and 1 <= sum(fits) <= 3
    assert recipes.search(compose({}), typed, compose, card(1000), 2**40, True).chosen is None


def test_the_depth_is_that_of_the_architecture(config):
    for name, depth in (("gpt2-xl", 48), ("llama-3.2-1b", 16), ("qwen3-0.6b", 28)):
        cfg = OmegaConf.create(OmegaConf.to_container(config(f"model={name}"), resolve=True))
        assert recipes.model_depth(cfg) == (depth, 1)


def test_a_model_that_is_no_stack_of_equal_blocks_is_refused_a_search(config):
    cfg = OmegaConf.create(OmegaConf.to_container(config(), resolve=True))
    cfg.model.architecture = {"model_type": "gemma3_text", "num_hidden_layers": 6}
    with pytest.raises(Refused, match="search=false"):
        recipes.model_depth(cfg)


def test_a_search_says_that_it_takes_long_before_it_does(config, composed, capsys, monkeypatch):
    cfg = composed({"batch_size": "2"})
    options = [{"gradient_checkpointing": name, "loss": "full", "precision": "32"} for name in ("none", "every_layer")]
    said = []

    class Slow:
        def traced(self, recipe, batches):
            said.append(capsys.readouterr().err)
            time.sleep(0.01)

    monkeypatch.setattr(recipes, "WAIT", 0.005)
    recipes._trace_all(cfg, Slow(), [(option, (1, 2)) for option in options])
    assert "Tracing 2 ways" in said[0] and "which takes about" in said[1]


def test_a_model_that_cannot_be_traced_is_refused_a_search(composed):
    class Untraceable:
        def traced(self, recipe, batches):
            raise RuntimeError("numbers are asked for")

    with pytest.raises(Refused, match=r"numbers are asked for.*search=false"):
        recipes._trace_all(composed({"batch_size": "2"}), Untraceable(), [({}, (1, 1))])


# --- time -------------------------------------------------------------------------------------------------------------


def test_an_operator_takes_what_is_slower():
    import torch

    rates = Machine("", {"float32": 100.0, "bfloat16": 400.0}, 10.0, 1.0)
    assert rates.operator(Work(torch.float32, 1000, 20)) == 10 + 1
    assert rates.operator(Work(torch.bfloat16, 1000, 20)) == 2.5 + 1
    assert rates.operator(Work(torch.float32, 0, 20)) == 2 + 1


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


def taking_turns(config, recipe, depth=9):
    """Gemma 2's blocks see a window of 4 tokens or all, in turns. Without a flash kernel the scores are T x T."""
    keys = {"model_type": "gemma2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    keys |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "num_hidden_layers": depth}
    keys |= dict.fromkeys([f"{name}_token_id" for name in ("pad", "bos", "eos")], 0)
    lines = ["model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3"]
    cfg = config(*lines, *(f"{key}={value}" for key, value in recipe.items()))
    cfg.model.architecture = keys
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))


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
    assert recipes.model_depth(cfg) == (depth, 2)
    derivation = Derivation(composed, depth, (1, 4), True, machine(), period=rounds)
    derived, traced = needs(derivation.trace(recipe, cfg)[0], cfg, True, 0), needs(trace(cfg, True), cfg, True, 0)
    assert (derived.device_peak == pytest.approx(traced.device_peak, rel=0.002)) == (rounds == 2)
    assert rounds == 1 or derivation.estimate(recipe, cfg) is None


@pytest.mark.parametrize("period", range(1, 9))
def test_the_depths_that_are_traced_end_as_the_model_does(period):
    for depth in range(2 * period, 60):
        derivation = Derivation(None, depth, (1, 1), True, None, period=period)
        one, two = derivation.depths
        assert 3 <= one < two <= derivation.third and {n % period for n in (one, two, derivation.third)} == {
            depth % period
        }
    assert (Derivation(None, 48, (1, 1), True, None).depths, Derivation(None, 48, (1, 1), True, None).third) == (
        (3, 4),
        7,
    )
