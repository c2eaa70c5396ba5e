"""Tests that training with 16-bit weights on the device and fp32 masters on the host is bit-identical to a naive loop
with two complete models."""

from functools import partial

import pytest
import torch
from torch import nn

from conftest import ROOT
from host_masters import made
from lowmem.offload import host_weight
from lowmem.offload.host_optimizer import HostOptimizer
from lowmem.offload.master_weights import MasterWeights
from lowmem.step import fp32_halves
from lowmem.techniques.optim.build import MakeOptimizer
from pairwise import pairwise
from two_models import CLIPS, OPTIMIZERS, PRECISIONS, configured, equal, naive, ours

SCHEDULERS, ACCUMULATIONS, CHECKPOINTINGS, LOSSES = (
    sorted(file.stem for file in (ROOT / "conf" / group).glob("*.yaml"))
    for group in ("scheduler", "accumulation", "gradient_checkpointing", "loss")
)
LOSSES.remove("kto")  # the naive loop does not look ahead, unlike loss=kto (tests/techniques/loss/test_kto.py)
INIT_SCALE = "precision.init_scale={}"


# --- bit-equality -----------------------------------------------------------------------------------------------------

QUICK = [("none", "cosine"), ("fixed", "linear"), ("by_epoch", "constant")]


@pytest.mark.rows(
    "bf16-master-norm-adamw", "16-master-both-adamw8bit", "bf16-master-off-adafactor", "16-master-value-adamw"
)
@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_have_the_bits_of_a_naive_training_loop(config, precision, clip, optim):
    for accumulation, scheduler in QUICK[:: 1 if optim == "adamw" else 2]:
        cfg = configured(config, precision, optim, clip, accumulation, scheduler)
        assert equal(ours(cfg), naive(cfg)), (accumulation, scheduler)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("precision", "clip", "optim", "accumulation", "scheduler"),
    pairwise(PRECISIONS, CLIPS, OPTIMIZERS, ACCUMULATIONS, SCHEDULERS),
)
def test_masters_have_the_bits_of_a_naive_training_loop_with_every_accumulation_and_schedule(
    config, precision, clip, optim, accumulation, scheduler
):
    cfg = configured(config, precision, optim, clip, accumulation, scheduler)
    assert equal(ours(cfg), naive(cfg))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("precision", "clip", "optim", "checkpointing", "loss"),
    pairwise(PRECISIONS, ("norm", "off"), OPTIMIZERS, CHECKPOINTINGS, LOSSES),
)
def test_masters_have_the_bits_of_a_naive_training_loop_with_every_checkpointing_policy_and_every_loss_but_kto(
    config, precision, clip, optim, checkpointing, loss
):
    more = (f"gradient_checkpointing={checkpointing}", f"loss={loss}")
    cfg = configured(config, precision, optim, clip, "fixed", "linear", *more)
    assert equal(ours(cfg), naive(cfg))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_with_checkpointing_and_chunked_loss_have_the_bits_of_a_naive_training_loop(config, precision):
    """One case for `make test`, which leaves out the matrix test above."""
    more = ("gradient_checkpointing=every_layer", "loss=chunked")
    cfg = configured(config, precision, "adamw8bit", "both", "fixed", "cosine", *more)
    assert equal(ours(cfg), naive(cfg))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_on_a_cpu_without_16_bit_units_have_the_bits_of_a_naive_training_loop(config, without_units, precision):
    cfg = configured(config, precision, "adamw8bit", "norm", "fixed", "linear")
    assert equal(ours(cfg), naive(cfg))


@pytest.mark.rows("norm")
@pytest.mark.parametrize("clip", ["norm", "off"])
def test_overflow_with_masters_skips_the_steps_that_a_naive_loss_scaler_skips(config, clip):
    cfg = configured(config, "16-master", "adamw", clip, "fixed", "linear", INIT_SCALE.format(2.0**30))
    found = ours(cfg)
    assert found[2] > 3 and equal(found, naive(cfg))


def test_early_updates_of_masters_have_the_bits_of_late_updates(config):
    """With accumulation=fixed, the last of several micro-batches adds to the summed gradients of the others before the
    early update."""
    for accumulation in ("none", "fixed"):
        early, late = (
            ours(
                configured(
                    config, "bf16-master", "adamw8bit", "value", accumulation, "linear", f"precision.early_step={e}"
                )
            )
            for e in ("true", "false")
        )
        assert equal(early, late)


def test_tied_weights_with_masters_stay_tied_and_have_the_bits_of_a_naive_training_loop(config):
    def both(tied):
        cfg = configured(
            config, "bf16-master", "adamw", "norm", "fixed", "linear", f"model.architecture.tie_word_embeddings={tied}"
        )
        return ours(cfg), naive(cfg)

    (tied, theirs), (untied, _) = both("true"), both("false")
    assert len(tied[0]) == len(untied[0]) - 1 and equal(tied, theirs)


def tied():
    """Returns a bf16 weight before and after a step. Its master is halfway between two bf16 numbers."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(1 + 2**-8)
    masters = made(layer)
    start = layer.weight.item()
    optimizer = masters.optimizer(MakeOptimizer(partial(torch.optim.SGD, lr=1.0)), layer)
    layer.weight.grad = torch.full_like(layer.weight, -(2**-6))
    optimizer.collect(layer.weight)
    optimizer.step()
    masters.arrived()
    assert masters.full_precision(layer.weight).item() == 1 + 2**-6 + 2**-8
    return start, layer.weight.item()


def test_master_at_a_bf16_tie_is_rounded_up_at_start_and_after_a_step(monkeypatch):
    assert tied() == (1 + 2**-7, 1 + 2**-6 + 2**-7)
    monkeypatch.setattr(fp32_halves, "round_into", lambda wide, out: out.copy_(wide))
    assert tied() == (1.0, 1 + 2**-6)  # wrong: ties to even


# --- deliberately wrong variants --------------------------------------------------------------------------------------


def masters_from_rounded_weights(monkeypatch):
    right = MasterWeights.make

    def wrong(self, module):
        for p in module.parameters():
            p.data = p.data.to(self.precision.dtype).float()
        right(self, module)

    monkeypatch.setattr(MasterWeights, "make", wrong)


def clipped_before_unscaling(monkeypatch):
    right = HostOptimizer.finish

    def wrong(self, loss, scale):
        gradients = right(self, loss, scale)
        return gradients._replace(norm=gradients.norm * scale)

    monkeypatch.setattr(HostOptimizer, "finish", wrong)


def one_gradient_dropped(monkeypatch):
    right = host_weight.HostWeight.add

    def wrong(self, start, piece):
        if not (self.complete and "layers.1.mlp.up" in self.name):  # drops all gradients of a window after the first
            right(self, start, piece)

    monkeypatch.setattr(host_weight.HostWeight, "add", wrong)


def summed_in_16_bits(monkeypatch):
    right = host_weight.HostWeight.add

    def wrong(self, start, piece):
        if self.complete:
            self.sum = self.sum.to(piece.dtype)
            self.sum[start : start + piece.numel()].add_(piece)
        else:
            right(self, start, piece)

    monkeypatch.setattr(host_weight.HostWeight, "add", wrong)


@pytest.mark.wrong
@pytest.mark.rows("one_gradient*", "clipped*")
@pytest.mark.parametrize(
    "wrong", [masters_from_rounded_weights, clipped_before_unscaling, one_gradient_dropped, summed_in_16_bits]
)
def test_masters_with_a_deliberate_fault_differ_from_a_naive_training_loop(config, wrong, monkeypatch):
    cfg = configured(config, "16-master", "adamw", "norm", "fixed", "linear")
    assert equal(ours(cfg), naive(cfg))
    wrong(monkeypatch)
    assert not equal(ours(cfg), naive(cfg))
