"""Tests that every technique equals the oracle (plain fp32 PyTorch) within its tolerance, alone and in every pair with
a technique of another group, unless the pair is refused. The tests are generated from conf/.

A new choice in conf/ is tested alone and with every choice of the other groups. tolerances.py must state its allowed
deviation, and an optimizer other than AdamW needs its update rule in oracle.py.
"""

from functools import reduce
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F

import parity
from devices import each_device, each_device_slowly
from lowmem.config.refusals import refused
from lowmem.data.loader import IGNORED
from lowmem.step.optimizer import DeviceOptimizer
from lowmem.techniques.loss import cross_entropy, preference
from lowmem.techniques.optim import build
from lowmem.techniques.precision.fp32_weights import has_tf32
from lowmem.training.module import CausalLM
from tolerances import EXACT, LOW_BIT_STATE, allowed, within
from tolerances import PAIRS as PREFERENCES

pytestmark = pytest.mark.kernels


# choices whose optimizer is compiled are tested with one shape, at the end of this file
CHOICES = [choice for choice in parity.CHOICES if choice not in parity.COMPILED] + ["optim.in_backward=true"]
PAIRS = [(a, b) for a, b in combinations(CHOICES, 2) if a.split("=")[0] != b.split("=")[0]]
# Combinations in experiments, and other combinations that are common on a card.
MIXED = (
    "precision=16-master optim=adamw8bit gradient_checkpointing=every_layer loss=chunked accumulation=fixed",
    "precision=bf16-master optim=adamw8bit gradient_checkpointing=offload loss=chunked accumulation=effective_batch",
    "precision=16 optim=adam8bit gradient_checkpointing=every_layer accumulation=fixed",
    "precision=bf16-sr optim=adafactor gradient_checkpointing=selective loss=chunked",
    "precision=32 optim=adafactor optim.in_backward=true gradient_checkpointing=offload",
    "precision=bf16 optim=lion8bit gradient_checkpointing=sqrt loss=chunked",
    "precision=bf16-true optim=muon gradient_checkpointing=every_k",
)
CHECKPOINTED = list(product(*([c for c in CHOICES if c.startswith(g)] for g in ("precision=", "gradient_check"))))


def deviations(config, *techniques, overrides=()):
    """Returns the deviations from the oracle, or the messages if the combination is refused."""
    cfg = config(*parity.overrides(*techniques), *overrides, base=())
    return list(refused(cfg)) or parity.deviations(cfg, *techniques)


@pytest.mark.matrix_rows(*parity.SIBLINGS)
@pytest.mark.parametrize("technique", CHOICES)
def test_technique_equals_the_oracle(config, technique):
    found = deviations(config, technique)
    assert within(found, allowed(technique)), parity.missing(technique, found)


@pytest.mark.gpu
@pytest.mark.parametrize("technique", CHOICES)
def test_technique_on_a_card_equals_the_oracle(config, technique):
    found = deviations(config, technique, overrides=["device=cuda"])
    assert within(found, allowed(technique, on_card=True)), found


@each_device_slowly
@pytest.mark.parametrize("recipe", MIXED, ids=str)
def test_mixed_recipe_equals_the_oracle(config, recipe, device):
    techniques = recipe.split()
    found = deviations(config, *techniques, overrides=[f"device={device}"])
    assert within(found, allowed(*techniques, on_card=device == "cuda")), found


@each_device
def test_tf32_is_as_close_to_the_oracle_as_fp32_only_on_a_device_without_tf32(config, device):
    found = deviations(config, "precision=tf32", overrides=[f"device={device}"])
    assert within(found[:2], EXACT) != has_tf32(device), found


@pytest.mark.parametrize("policy", ["none", "every_layer"])
def test_compiled_blocks_with_a_memory_budget_equal_the_oracle(config, policy):
    found = deviations(config, f"gradient_checkpointing={policy}", overrides=parity.BUDGET)
    assert within(found, allowed("compile.activation_memory_budget")), found


@pytest.mark.gpu  # on a CPU, inductor takes half a minute, and test_blocks.py covers it
def test_activation_memory_budget_with_inductor_on_a_card_equals_the_oracle(config):
    found = deviations(config, "compile=blocks", overrides=[*parity.BUDGET, "compile.backend=inductor", "device=cuda"])
    assert within(found, allowed("compile.activation_memory_budget", on_card=True)), found


@pytest.mark.parametrize("technique", [c for c in CHOICES if c.startswith(("precision=16", "precision=bf16"))])
def test_16_bit_precision_on_a_cpu_without_16_bit_units_equals_the_oracle(config, without_units, technique):
    found = deviations(config, technique)
    assert within(found, allowed(technique)), parity.missing(technique, found)


@pytest.mark.parametrize("technique", [c for c in CHOICES if c.startswith("optim=") and "8bit" in c])
def test_optimizer_with_8_bit_state_without_a_compiler_equals_the_oracle(config, without_compiler, technique):
    found = deviations(config, technique)
    assert within(found, allowed(technique)), found


MASTERS = ("precision=16-master", "precision=bf16-master")
REFUSED_PAIRS = {
    frozenset((other, "optim.in_backward=true"))
    for other in CHOICES
    if other in ("precision=16", "precision=16-true", *MASTERS)
    or (other.startswith("accumulation=") and other != "accumulation=none")
} | {frozenset((master, f"optim=paged_{optim}")) for master in MASTERS for optim in ("adamw8bit", "adamw32bit")}
NOT_STREAMED = [c for c in CHOICES if c.startswith("precision=") and c not in (*MASTERS, "precision=bf16-sr")]
NOT_STREAMED += ["gradient_checkpointing=none"]
NOT_STREAMED += ["optim=paged_adamw8bit", "optim=paged_adamw32bit", "optim.in_backward=true"]
REFUSED_PAIRS |= {frozenset(("weights=streamed", other)) for other in NOT_STREAMED}
REFUSED_PAIRS |= {
    frozenset(("compile=blocks", other))
    for other in ("gradient_checkpointing=selective", "gradient_checkpointing=offload_attention", "adapter=dora")
}


@pytest.mark.matrix
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pair_of_techniques_equals_the_oracle_or_is_refused(config, pair):
    found = deviations(config, *pair)
    if frozenset(pair) in REFUSED_PAIRS:
        assert "Type " in found[0]
    else:
        assert within(found, allowed(*pair)), found


@pytest.mark.matrix
@pytest.mark.parametrize("pair", CHECKPOINTED, ids="+".join)
def test_any_precision_and_checkpointing_with_chunked_loss_equals_the_oracle(config, pair):
    found = deviations(config, *pair, "loss=chunked")
    assert within(found, allowed(*pair, "loss=chunked")), found


# --- wrong on purpose: each variant must exceed the tolerance of every technique in which it can occur ---------------


def short_window_divided_by_the_full_one(monkeypatch):
    right = CausalLM.training_step

    def wrong(self, window, index):
        sequences = sum(len(batch.labels) // batch.ROWS for batch in window.micro_batches)
        return right(self, window._replace(weight=window.weight * (8 if sequences == 1 else 1)), index)

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


@pytest.mark.wrong
@pytest.mark.rows("optim=adamw-short_window*", "precision=bf16-master-short_window*", "loss=dpo-norms*")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("technique", CHOICES)
def test_wrong_variant_of_a_technique_exceeds_the_tolerance(config, technique, wrong, monkeypatch):
    alone = technique in ("accumulation=none", "optim.in_backward=true")  # their windows have one micro-batch
    if alone and wrong is last_micro_batch_dropped:
        pytest.skip("one micro-batch cannot be dropped from a window of one")
    if wrong is norms_decay and not parity.trains_vectors(config(*parity.overrides(technique), base=())):
        pytest.skip("no norm and no bias is trained")
    techniques = [technique] if technique.startswith("accum") or alone else [technique, "accumulation=fixed"]
    wrong(monkeypatch)
    weights = deviations(config, *techniques, overrides=["clip=null"])[:2]
    assert not within(weights, allowed(*techniques)[:2]), (
        f"{wrong.__name__} is off by {weights} only: what UPDATE of tolerances.py allows {technique} hides it"
    )


@pytest.mark.parametrize("technique", ["optim=adam8bit", "optim=paged_adamw8bit", "optim=paged_adamw32bit"])
def test_late_weight_decay_of_bitsandbytes_exceeds_the_tolerance_unless_corrected(config, technique, monkeypatch):
    monkeypatch.setattr(build, "in_one_pass", lambda optimizer: None)  # bitsandbytes' own kernels
    parity.decay_late(monkeypatch)
    assert within(deviations(config, technique), allowed(technique))
    monkeypatch.setattr(build, "_decay_before_the_update", lambda optimizer: None)
    assert not within(deviations(config, technique)[:2], allowed(technique)[:2])


def test_loss_without_the_last_micro_batch_exceeds_the_loss_tolerance_of_every_pair_of_techniques(config, monkeypatch):
    last_micro_batch_dropped(monkeypatch)
    assert deviations(config, "accumulation=fixed")[2] > max(allowed(a, b)[2] for a, b in PAIRS)


@pytest.mark.parametrize("loss", [choice for choice in CHOICES if choice in PREFERENCES])
def test_preference_loss_with_exchanged_answers_exceeds_the_tolerance_of_every_precision(config, monkeypatch, loss):
    """Wrong on purpose: chosen and rejected answers are exchanged, so both the update and the loss must exceed the
    tolerance."""
    kind = preference.KTO if loss == "loss=kto" else preference.PreferenceLoss
    right = kind.answers

    def wrong(self, model, batch):
        answers, real = right(self, model, batch)
        if kind is preference.KTO:
            return answers._replace(desirable=~answers.desirable), real
        return preference.AnswerLogProbs(*(values.flip(1) for values in answers[:3])), real

    monkeypatch.setattr(kind, "answers", wrong)
    found = deviations(config, loss)
    widest = allowed("precision=bf16-sr", loss)
    assert found[0] > 0.5 > widest[0] and found[2] > 0.1 > widest[2], found


def test_loss_summed_in_bf16_exceeds_the_tolerance_of_bf16_true(config, monkeypatch):
    """Wrong on purpose: every addition is rounded to bf16. If only the final sum were rounded, the error could be small
    by chance."""

    def full(model, batch):
        logits = model(**batch.inputs, use_cache=False).logits.flatten(0, 1)
        losses = F.cross_entropy(logits.float(), batch.labels.flatten(), ignore_index=IGNORED, reduction="none")
        return reduce(torch.add, losses.bfloat16())

    monkeypatch.setattr(cross_entropy, "full", full)
    assert deviations(config, "precision=bf16-true")[2] > allowed("precision=bf16-true")[2]


def two_wrong_signs(monkeypatch):
    right, windows = DeviceOptimizer.finish, []

    def wrong(self, *how):
        gradients = right(self, *how)
        windows.append(gradients)
        if len(windows) == 1:
            next(p for group in self.param_groups for p in group["params"] if p.dim() < 2).grad[:2].neg_()
        return gradients

    monkeypatch.setattr(DeviceOptimizer, "finish", wrong)


@pytest.mark.parametrize("wrong", [norms_decay, two_wrong_signs])
def test_decayed_norms_or_two_wrong_signs_exceed_the_tolerance_of_one_rounded_sign(config, wrong, monkeypatch):
    pair = "precision=16", "optim=adafactor"
    wrong(monkeypatch)
    assert deviations(config, *pair)[1] > allowed(*pair)[1]


@pytest.mark.parametrize("precision", ["16", "16-true"])
def test_clipping_gradients_before_unscaling_exceeds_the_tolerance_of_fp16_precisions(config, precision, monkeypatch):
    right = DeviceOptimizer.finish

    def wrong(self, *how):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.5)
        return right(self, *how)

    monkeypatch.setattr(DeviceOptimizer, "finish", wrong)
    weights = deviations(config, f"precision={precision}", "optim=sgd")[:2]
    assert not within(weights, allowed(f"precision={precision}", "optim=sgd")[:2]), weights


# --- torchao's optimizer, compiled: one shape -------------------------------------------------------------------------


@each_device_slowly
@pytest.mark.parametrize("wrong", [False, True])
def test_adamw4bit_on_one_matrix_equals_adamw_within_tolerance_unless_every_second_gradient_is_zero(
    config, wrong, device
):
    off = parity.off_on_one_matrix(config("optim=adamw4bit", "lr=1e-2", f"device={device}"), wrong)
    assert (off > LOW_BIT_STATE["adamw4bit"]) == wrong, off
