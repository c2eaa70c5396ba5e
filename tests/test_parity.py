"""Every technique, and every pair of techniques, computes what the oracle computes. Generated from conf/.

A choice that is new in conf/ is run by itself and with every choice of the other groups; what it may deviate stands in
tolerances.py, and an optimizer that is not AdamW needs its rule in oracle.py.
"""

from itertools import combinations, product

import pytest
import torch

import oracle
import parity
from conftest import ROOT
from lowmem.module import CausalLM
from lowmem.optim import build
from lowmem.precision.plugin import Float16Autocast
from lowmem.precision.sixteen import Float16Weights
from lowmem.refusals import refused
from tolerances import EXACT, LOW_BIT_STATE, UPDATE

GROUPS = ("precision", "optim", "accumulation", "gradient_checkpointing", "loss")
COMPILED = ("optim=adamw4bit", "optim=adamw_fp8")  # seconds per shape: on one shape, below
CHOICES = [f"{group}={file.stem}" for group in GROUPS for file in sorted((ROOT / "conf" / group).glob("*.yaml"))]
CHOICES = [choice for choice in CHOICES if choice not in COMPILED] + ["optim.in_backward=true"]
PAIRS = [(a, b) for a, b in combinations(CHOICES, 2) if a.split("=")[0] != b.split("=")[0]]
CHECKPOINTED = list(product(*([c for c in CHOICES if c.startswith(g)] for g in ("precision=", "gradient_check"))))


def deviations(config, *techniques, overrides=()):
    cfg = config(*parity.overrides(*techniques), *overrides, base=())
    said = list(refused(cfg))
    if said:
        return said
    chosen = dict(technique.split("=") for technique in techniques)
    start, theirs = parity.expected(cfg, chosen.get("optim", "adamw"), chosen.get("accumulation", "none"))
    before, ours = parity.run(cfg)
    assert all(torch.equal(before[name], start[name]) for name in start)
    return parity.errors(start, ours, theirs)


def allowed(*techniques):
    each = [UPDATE.get(technique, EXACT) for technique in techniques]
    return sum(matrices for matrices, _ in each), sum(vectors for _, vectors in each)


def within(found, most):
    return all(one <= other for one, other in zip(found, most, strict=True))


@pytest.mark.parametrize("technique", CHOICES)
def test_a_technique_is_the_oracle(config, technique):
    found = deviations(config, technique)
    assert within(found, allowed(technique)), found


@pytest.mark.parametrize("technique", [c for c in CHOICES if c.startswith(("precision=16", "precision=bf16"))])
def test_a_16_bit_precision_is_the_oracle_also_without_units_for_it(config, without_units, technique):
    found = deviations(config, technique)
    assert within(found, allowed(technique)), found


MASTERS = ("precision=16-master", "precision=bf16-master")
REFUSED_PAIRS = {
    frozenset((other, "optim.in_backward=true"))
    for other in CHOICES
    if other in ("precision=16", "precision=16-true", *MASTERS)
    or (other.startswith("accumulation=") and other != "accumulation=none")
} | {frozenset((master, f"optim=paged_{optim}")) for master in MASTERS for optim in ("adamw8bit", "adamw32bit")}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_is_the_oracle_or_is_refused(config, pair):
    found = deviations(config, *pair)
    if frozenset(pair) in REFUSED_PAIRS:
        assert "Type " in found[0]
    else:
        assert within(found, allowed(*pair)), found


@pytest.mark.slow
@pytest.mark.parametrize("pair", CHECKPOINTED, ids="+".join)
def test_any_precision_with_any_checkpointing_and_the_chunked_loss(config, pair):
    found = deviations(config, *pair, "loss=chunked")
    assert within(found, allowed(*pair, "loss=chunked")), found


# --- deliberately wrong variants: each must be outside the tolerance of every technique it can occur in --------------


def short_window_divided_by_the_full_one(monkeypatch):
    right = CausalLM.training_step

    def wrong(self, window, index):
        sequences = sum(len(batch.labels) for batch in window.micro_batches)
        return right(self, window._replace(tokens=window.tokens * (8 if sequences == 1 else 1)), index)

    monkeypatch.setattr(CausalLM, "training_step", wrong)


def last_micro_batch_dropped(monkeypatch):
    right = CausalLM.training_step

    def wrong(self, window, index):
        return right(self, window._replace(micro_batches=window.micro_batches[:-1] or window.micro_batches), index)

    monkeypatch.setattr(CausalLM, "training_step", wrong)


def norms_decay(monkeypatch):
    right = build.parameter_groups

    def wrong(model):
        return [{key: value for key, value in group.items() if key != "weight_decay"} for group in right(model)]

    monkeypatch.setattr(build, "parameter_groups", wrong)


WRONG = (short_window_divided_by_the_full_one, last_micro_batch_dropped, norms_decay)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("technique", CHOICES)
def test_a_wrong_variant_is_outside_the_tolerance(config, technique, wrong, monkeypatch):
    alone = technique in ("accumulation=none", "optim.in_backward=true")  # windows of one micro-batch
    if alone and wrong is last_micro_batch_dropped:
        pytest.skip("one micro-batch cannot be dropped from a window of one")
    techniques = [technique] if technique.startswith("accum") or alone else [technique, "accumulation=fixed"]
    wrong(monkeypatch)
    found = deviations(config, *techniques, overrides=["clip=null"])
    assert not within(found, allowed(*techniques)), found


@pytest.mark.parametrize(("precision", "plugin"), [("16", Float16Autocast), ("16-true", Float16Weights)])
def test_clipping_gradients_that_are_still_scaled_is_outside_the_tolerance(config, precision, plugin, monkeypatch):
    right = plugin.unscale

    def wrong(self, optimizer):
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
        return right(self, optimizer)

    monkeypatch.setattr(plugin, "unscale", wrong)
    found = deviations(config, f"precision={precision}", "optim=sgd")
    assert not within(found, allowed(f"precision={precision}", "optim=sgd")), found


# --- torchao's optimizers, compiled: one shape ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw4bit", "adamw_fp8"])
@pytest.mark.parametrize("wrong", [False, True])
def test_torchaos_state_on_one_matrix(config, optim, wrong):
    from lowmem.build import optimizer

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 128, bias=False)
    theirs, state = model.weight.detach().clone(), {}
    start = theirs.clone()
    made = optimizer(config(f"optim={optim}", "lr=1e-2"))(model)
    direction = torch.randn(128, 64)
    for step in range(1, 21):
        g = direction + torch.randn(128, 64)
        model.weight.grad = (g * (step % 2)) if wrong else g  # wrong: every second gradient lost
        made.step()
        theirs = oracle.adamw(theirs, g, state, step, 1e-2, 0.1, "matrix")
    error = ((model.weight.detach() - theirs).norm() / (theirs - start).norm()).item()
    assert (error > LOW_BIT_STATE[optim]) == wrong, error
