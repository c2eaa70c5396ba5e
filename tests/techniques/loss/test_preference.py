"""Compares preference losses and their gradients with an independent fp64 implementation, and tests training and its
memory."""

import json
import random

import pytest
import torch

import pair_oracle
from conftest import SMALL, beside
from lowmem.data.pairs import PairBatch
from lowmem.fit import fit as fit_run
from lowmem.model import packed_attention
from lowmem.system.errors import Refused
from lowmem.techniques.loss import preference
from networks import network

pytestmark = pytest.mark.kernels
LOSSES = {"dpo": preference.DPO, "ipo": preference.IPO, "orpo": preference.ORPO, "simpo": preference.SimPO}
OPTIONS = [
    ("dpo", {}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.2}),
    ("ipo", {"beta": 0.3}),
    ("orpo", {}),
    ("orpo", {"beta": 1.0}),
    ("simpo", {}),
    ("simpo", {"gamma": 0.5, "label_smoothing": 0.1}),
]
# Tolerance for the rounding of fp32 products and sums in a small network, relative to the largest element. A loss with
# a wrong beta differs by at least 5e-3.
FP32 = 1e-6
PAIRS, LENGTH = 5, 16


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(ours, theirs):
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest


def rows(model, packed=False):
    pairs = pair_oracle.RaggedPairs(PAIRS, LENGTH, model.config.vocab_size, packed)
    return pairs.micro_batch(torch.arange(PAIRS).numpy())


def expected(name, model, batch, **options):
    """Returns the oracle's loss and gradients in fp64."""
    wide = model.double()
    loss = pair_oracle.mean_loss(name, wide, batch, **options)
    found = loss.item(), gradients(wide, loss)
    model.float()
    return found


@pytest.mark.parametrize("columns", [7, 64, 10_000], ids=["narrow", "tiles", "whole"])
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=lambda value: str(value))
def test_preference_loss_and_gradient_equal_the_fp64_reference(name, options, columns):
    model = network("llama")
    batch = rows(model)
    loss, theirs = expected(name, model, batch, **options)
    found = LOSSES[name](**options, columns=columns)(model, batch) / batch.weight
    assert found.item() == pytest.approx(loss, rel=FP32)
    assert apart(gradients(model, found), theirs) < FP32
    wrong, _ = expected(name, model, batch, **options | {"beta": 3.0})
    assert abs(found.item() / wrong - 1) > 5e-3


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "qwen3"])
def test_dpo_loss_and_gradient_equal_the_fp64_reference_with_tied_and_capped_heads(model_type):
    model = network(model_type)
    batch = rows(model)
    loss, theirs = expected("dpo", model, batch)
    found = preference.DPO(columns=64)(model, batch) / batch.weight
    assert found.item() == pytest.approx(loss, rel=FP32) and apart(gradients(model, found), theirs) < 5 * FP32


@pytest.mark.parametrize("name", LOSSES)
def test_packed_pairs_have_the_preference_loss_and_gradient_of_padded_pairs(name):
    model = network("llama")
    packed, padded = rows(model, packed=True), rows(model)
    theirs = LOSSES[name]()(model, padded)
    theirs = theirs.item(), gradients(model, theirs)
    packed_attention.separate(model)
    ours = LOSSES[name]()(model, packed)
    assert packed.weight == padded.weight == PAIRS
    assert ours.item() == pytest.approx(theirs[0], rel=FP32) and apart(gradients(model, ours), theirs[1]) < FP32


def test_dpo_losses_and_gradients_of_micro_batches_add_up_to_the_whole_batch():
    model, loss = network("llama"), preference.DPO()
    batch = rows(model)
    parts = [batch.each(lambda tensor, at=at: tensor[at : at + 2]) for at in range(0, 2 * PAIRS, 2)]
    together = loss(model, batch)
    whole, each = gradients(model, together), [loss(model, part) for part in parts]
    assert sum(one.item() for one in each) == pytest.approx(together.item(), rel=FP32)
    assert apart(gradients(model, sum(each)), whole) < FP32


def test_orpo_micro_batch_without_pairs_has_zero_loss_and_zero_gradients():
    model = network("llama")
    empty = rows(model).nothing
    loss = preference.ORPO()(model, empty)
    assert empty.weight == 0 and loss.item() == 0.0
    assert all(torch.isfinite(gradient).all() and not gradient.any() for gradient in gradients(model, loss).values())


def test_dpo_loss_at_the_reference_is_log_2_and_exchanged_answers_flip_the_margin():
    model, loss = network("llama"), preference.DPO(beta=1.0)
    batch = rows(model)
    with torch.no_grad():
        loss(model, batch)
        logp = loss.take()[0].logp
        same = PairBatch(**batch.tensors | {"reference": logp.view(-1, 1)})
        assert (loss(model, same) / PAIRS).item() == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-7)
        figures = loss.figures()
        assert figures["margin"] == 0 and figures["log_ratio"] == 0 and figures["accuracy"] == 0
        loss(model, batch)
        margin = loss.figures()["margin"]
        turned = batch.each(lambda tensor: tensor.view(PAIRS, 2, -1).flip(1).flatten(0, 1))
        loss(model, turned)
        assert loss.figures()["margin"] == pytest.approx(-margin.item())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: preference.DPO(beta=0), "loss.beta=0: the model would learn nothing"),
        (lambda: preference.DPO(beta="x"), "loss.beta=x: give a number"),
        (lambda: preference.DPO(label_smoothing=0.5), "loss.label_smoothing=0.5: from 0.5 on"),
        (lambda: preference.SimPO(gamma=-1), "loss.gamma=-1: give a number"),
        (lambda: preference.IPO(columns=0), "loss.columns=0"),
    ],
)
def test_invalid_preference_loss_arguments_are_refused(make, words):
    with pytest.raises(Refused, match=words):
        make()


# --- runs -----------------------------------------------------------------------------------------------------------

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "pink", "brown")


def preferences(folder, exchanged=False, count=300, words=1):
    """Writes pairs of two colours, of which the alphabetically first is chosen, or the second if `exchanged`. Each
    answer repeats its colour `words` times. Returns the path of the file."""
    draw, lines = random.Random(0), []
    for _ in range(count):
        first, second = sorted(draw.sample(COLOURS, 2))
        prompt = f"{' or '.join(draw.sample([first, second], 2))}? "
        better, worse = (" ".join([word] * words) for word in ((second, first) if exchanged else (first, second)))
        lines.append(json.dumps({"prompt": prompt, "chosen": better, "rejected": worse}))
    file = folder / f"pairs_{exchanged}_{words}.jsonl"
    file.write_text("\n".join(lines))
    return file


SHAPE = ("val_every=1000", "batch_size=8", "lr=3e-3", "model.architecture.n_embd=64")


def trained(fit, file, *lines):
    pairs = "data=preference", f"data.path={file}", "data.val_fraction=0.1"
    return fit(*beside((*SHAPE, "max_steps=100", "seq_len=64", *pairs), lines))[0]


@pytest.mark.matrix_rows("loss=ipo", "loss=orpo", "loss=simpo")
@pytest.mark.parametrize("loss", [f"loss={name}" for name in LOSSES])
def test_training_with_a_preference_loss_reaches_over_90_percent_accuracy(fit, tmp_path, loss):
    summary = trained(fit, preferences(tmp_path), loss)
    assert summary["validation"][0]["accuracy"] > 0.9 and summary["validation"][0]["margin"] > 0
    assert summary["bits_per_byte"] is None


@pytest.mark.wrong
def test_dpo_training_with_exchanged_answers_lowers_the_accuracy_below_a_half(fit, tmp_path, monkeypatch):
    """In the deliberately wrong variant, the loss exchanges chosen and rejected answers, but the metrics do not."""
    losses = preference.DPO.losses
    flipped = lambda self, answers: losses(self, preference.AnswerLogProbs(*(each.flip(1) for each in answers[:3])))  # noqa: E731
    monkeypatch.setattr(preference.DPO, "losses", flipped)
    summary = trained(fit, preferences(tmp_path), "loss=dpo")
    assert summary["validation"][0]["accuracy"] < 0.5


@pytest.mark.matrix
def test_peak_of_dpo_is_within_3_percent_of_fine_tuning_and_1_percent_of_its_prediction(fit, config, tmp_path):
    """All three runs train on micro-batches of 16 full rows. If DPO computes all logits at once, its peak is over 10 %
    higher."""
    lines = "max_steps=8", "seq_len=64", "data.too_long=cut", "model.architecture.vocab_size=1024", "plan=check"
    file = preferences(tmp_path, count=100, words=60)
    pairs = trained(fit, file, "loss=dpo", "loss.columns=128", *lines)
    whole = trained(fit, file, "loss=dpo", "loss.columns=1024", *lines)
    text = "data=random", "batch_size=16", "loss=tiled", "loss.columns=128"
    typed = beside((*SMALL, *SHAPE), (*lines[:2], *lines[3:], *text))
    tuned = fit_run(config(*typed, base=()), tmp_path / "tuned")
    peak = pairs["peak_bytes"]["device"]
    assert peak == pytest.approx(tuned["peak_bytes"]["device"], rel=0.03)
    assert whole["peak_bytes"]["device"] > 1.1 * peak
    predicted = max(phase["device"] for phase in pairs["predicted"]["phases"].values())
    assert predicted == pytest.approx(peak, rel=0.01)
