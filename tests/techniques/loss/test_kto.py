"""Compares KTO's loss, gradients and KL estimate (z) with an independent fp64 implementation, and tests its runs."""

import csv
import json
import random

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from test_preference import COLOURS, FP32, apart, gradients, preferences

import pair_oracle
from conftest import SMALL, beside
from lowmem.config.instantiate import instantiate
from lowmem.data.loader import Share, WindowLoader
from lowmem.fit import fit as fit_run
from lowmem.model import loading
from lowmem.offload.host_weight import HostWeight
from lowmem.offload.master_weights import MasterWeights
from lowmem.system.errors import Refused
from lowmem.techniques.loss.preference import KTO
from lowmem.techniques.precision.masters import BFloat16Master
from lowmem.training import training
from lowmem.training.build import callbacks, causal_lm
from lowmem.training.module import CausalLM
from networks import network
from parity import deviations, overrides, trainer
from streams import Sees
from tolerances import WINDOW_IN_MICRO_BATCHES, allowed, within
from wrong_variants import z_of_each_micro_batch

pytestmark = pytest.mark.kernels
ANSWERS, LENGTH = 8, 16
OPTIONS = [{}, {"beta": 0.5}, {"desirable_weight": 1.3, "undesirable_weight": 0.4}]


def rows(model):
    return pair_oracle.RaggedAnswers(ANSWERS, LENGTH, model.config.vocab_size)


def looked_ahead(loss, model, batches):
    """Sets the KL estimate of the loss from the micro-batches of a window, as `MismatchedPass` does."""
    found = []
    with torch.no_grad():
        for batch in batches:
            loss(model, batch.mismatched)
            found.append(loss.log_ratios())
    loss.set_kl(torch.stack(found).sum(0))


def expected(model, batch, **options):
    """Returns the oracle's loss and gradients in fp64."""
    wide = model.double()
    loss = pair_oracle.mean_loss("kto", wide, batch, **options)
    found = loss.item(), gradients(wide, loss)
    model.float()
    return found


@pytest.mark.parametrize("columns", [7, 64, 10_000], ids=["narrow", "tiles", "whole"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kto_loss_and_gradient_equal_the_fp64_reference(options, columns):
    model = network("llama")
    batch = rows(model).micro_batch(np.arange(ANSWERS))
    loss, theirs = expected(model, batch, **options)
    kto = KTO(**options, columns=columns)
    looked_ahead(kto, model, [batch])
    assert kto._kl > 0.5  # large enough to change the loss
    found = kto(model, batch) / batch.weight
    assert batch.weight == ANSWERS and found.item() == pytest.approx(loss, rel=FP32)
    assert apart(gradients(model, found), theirs) < FP32
    # wrong variants: without the KL estimate, with exchanged ratings, with another beta
    kto.set_kl(torch.tensor([0.0, 1.0]))
    assert abs((kto(model, batch) / ANSWERS).item() / loss - 1) > 5e-3
    exchanged = batch.each(lambda tensor: ~tensor if tensor.dtype is torch.bool else tensor)
    for other, changed in ((exchanged, options), (batch, options | {"beta": 3.0})):
        wrong, gradient = expected(model, other, **changed)
        assert abs(wrong / loss - 1) > 5e-3 and apart(gradient, theirs) > 0.1


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "qwen3"])
def test_kto_loss_and_gradient_equal_the_fp64_reference_with_tied_and_capped_heads(model_type):
    model, kto = network(model_type), KTO(columns=64)
    batch = rows(model).micro_batch(np.arange(ANSWERS))
    loss, theirs = expected(model, batch)
    looked_ahead(kto, model, [batch])
    found = kto(model, batch) / batch.weight
    assert found.item() == pytest.approx(loss, rel=FP32) and apart(gradients(model, found), theirs) < 5 * FP32


def test_kto_kl_estimate_is_zero_if_the_reference_model_gives_mismatched_answers_higher_probabilities():
    """The oracle's KL estimate is also 0, and its loss equals lowmem's."""
    model, kto = network("llama"), KTO(beta=1.0)
    drawn = rows(model)
    drawn.reference[:, 1] += 20
    batch = drawn.micro_batch(np.arange(ANSWERS))
    looked_ahead(kto, model, [batch])
    assert kto._kl == 0.0
    loss, _ = expected(model, batch, beta=1.0)
    assert (kto(model, batch) / ANSWERS).item() == pytest.approx(loss, rel=FP32)


def test_kto_micro_batch_without_answers_adds_nothing_to_loss_gradients_and_kl_estimate():
    model, kto = network("llama"), KTO()
    batch = rows(model).micro_batch(np.arange(ANSWERS))
    looked_ahead(kto, model, [batch])
    z = kto._kl
    looked_ahead(kto, model, [batch, batch.nothing])
    assert kto._kl == z
    loss = kto(model, batch.nothing)
    assert batch.nothing.weight == 0 and loss.item() == 0.0
    assert all(torch.isfinite(gradient).all() and not gradient.any() for gradient in gradients(model, loss).values())


def test_kto_metrics_are_means_over_desirable_or_undesirable_answers():
    model, kto = network("llama"), KTO(beta=0.3)
    batch = rows(model).micro_batch(np.arange(ANSWERS))
    looked_ahead(kto, model, [batch])
    with torch.no_grad():
        kto(model, batch)
        logp = pair_oracle.log_probabilities(model, batch)[0][:, 0]
    figures, good = kto.figures(), batch.desirable[:, 0]
    assert tuple(figures) == kto.shows
    ratio = logp - batch.reference[:, 0]
    bound = FP32 * logp.abs().max().item()  # relative to log-probabilities; a reward is a difference and may be near 0
    for name, values in (("reward", 0.3 * ratio), ("logp", logp)):
        for side, which in (("desirable", good), ("undesirable", ~good)):
            total, count = figures[f"{name}_{side}"].tolist()
            assert count == which.sum() > 0 and total / count == pytest.approx(values[which].mean().item(), abs=bound)
            assert abs(total / count - values[~which].mean()) > 100 * bound
    right = sum((r > kto._kl).item() == rated.item() for r, rated in zip(ratio, good, strict=True))
    assert figures["accuracy"] == right and figures["kl"] / ANSWERS == pytest.approx(kto._kl.item())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0}, "loss.beta=0: the model would learn nothing"),
        ({"desirable_weight": -1}, "loss.desirable_weight=-1: give a number"),
        ({"undesirable_weight": "x"}, "loss.undesirable_weight=x: give a number"),
        ({"desirable_weight": 0, "undesirable_weight": 0}, "loss.desirable_weight=0, loss.undesirable_weight=0: the"),
        ({"columns": 0}, "loss.columns=0"),
    ],
)
def test_invalid_kto_arguments_are_refused(options, words):
    with pytest.raises(Refused, match=words):
        KTO(**options)


# --- windows --------------------------------------------------------------------------------------------------------


def last_micro_batch_counts_less(monkeypatch):
    """In the deliberately wrong variant, the gradient of the last micro-batch is divided by 1.1."""
    right = CausalLM._run_micro_batch

    def wrong(self, micro_batch, weight, sums):
        right(self, micro_batch, weight * 1.1 if self.last_micro_batch else weight, sums)

    monkeypatch.setattr(CausalLM, "_run_micro_batch", wrong)


def products_in_fp32(monkeypatch):
    """Lets precision=bf16-master keep its weights in fp32, so that its matrix products are computed in fp32."""
    monkeypatch.setattr(BFloat16Master, "dtype", torch.float32)
    monkeypatch.setattr(MasterWeights, "_new", lambda self, *args: HostWeight(*args, self.precision.dtype))


def window_of(config, size, lines):
    """Trains one window in micro-batches of `size` answers, and returns its loss and its gradient as a vector. The
    gradient is the update that plain SGD subtracts with lr=1."""
    sgd = "optim=sgd", "optim.weight_decay=0", "lr=1", "scheduler=constant", "max_steps=1", "clip=null"
    cfg = config(*overrides("loss=kto", "optim=sgd"), "loss.beta=1", *sgd, f"batch_size={size}", *lines, base=())
    torch.manual_seed(0)
    module, seen = causal_lm(cfg, loading.describe(cfg)), Sees()
    start = [p.detach().clone() for p in module.model.parameters()]
    drawn = pair_oracle.RaggedAnswers(ANSWERS, LENGTH, 300)
    windows = WindowLoader(drawn, Share(size), lambda *_: ANSWERS // size, seed=0)
    plugins = list(map(instantiate, cfg.plugins))
    trainer(cfg, plugins, [*callbacks(cfg), *module.own_loss.callbacks(), seen]).fit(module, windows)
    return seen.losses.seen[0], torch.cat([(a - b).flatten() for a, b in zip(start, seen.masters, strict=True)])


MASTERS = "precision=bf16-master", "gradient_checkpointing=every_layer"
WEIGHTS = {
    "resident": (),
    "by_micro_batch": (*MASTERS, "weights=streamed", "weights.order=by_micro_batch"),
    "by_layer": (*MASTERS, "weights=streamed", "weights.order=by_layer"),
}
CUT = [("fp32", name) for name in WEIGHTS] + [("bf16", name) for name in WEIGHTS if name != "resident"]


@pytest.mark.parametrize(("products", "weights"), CUT)
def test_kto_window_has_equal_gradients_in_one_and_in_four_micro_batches(config, monkeypatch, products, weights):
    """With fp32 products, the two gradients differ only by the order of fp32 sums. bf16 products add their rounding
    errors."""
    if products == "fp32":
        products_in_fp32(monkeypatch)
    bound = WINDOW_IN_MICRO_BATCHES[products]
    loss, whole = window_of(config, ANSWERS, WEIGHTS[weights])

    def off(size):
        found, gradient = window_of(config, size, WEIGHTS[weights])
        return abs(found / loss - 1), ((gradient - whole).norm() / whole.norm()).item()

    assert max(off(ANSWERS // 4)) < bound
    for wrong in (z_of_each_micro_batch, last_micro_batch_counts_less):
        with monkeypatch.context() as patch:
            wrong(patch)
            assert off(ANSWERS // 4)[1] > 4 * bound


def test_kto_with_a_separate_kl_estimate_per_micro_batch_deviates_from_the_oracle(config, monkeypatch):
    techniques = "loss=kto", "accumulation=fixed"
    cfg = config(*overrides(*techniques), base=())
    assert within(deviations(cfg, *techniques), allowed(*techniques))
    z_of_each_micro_batch(monkeypatch)
    found = deviations(cfg, *techniques)
    assert found[0] > 0.1 and found[2] > 0.02, found


# --- runs -----------------------------------------------------------------------------------------------------------

SHAPE = ("val_every=1000", "batch_size=8", "lr=3e-3", "seq_len=64", "max_steps=50", "model.architecture.n_embd=64")


def ratings(folder):
    """Writes a file of pairs and single rated answers, and returns its path. An answer is desirable if its colour is in
    the first half of COLOURS."""
    draw, lines, half = random.Random(1), [], len(COLOURS) // 2
    for number in range(240):
        good, bad = draw.choice(COLOURS[:half]), draw.choice(COLOURS[half:])
        pair, label = {"chosen": good, "rejected": bad}, draw.random() < 0.5
        answer = pair if number % 3 == 0 else {"completion": good if label else bad, "label": label}
        lines.append(json.dumps({"prompt": f"Colour {number}? "} | answer))
    file = folder / "rated.jsonl"
    file.write_text("\n".join(lines))
    return file


def trained(fit, file, *lines):
    data = "data=preference", f"data.path={file}", "data.val_fraction=0.15", "loss=kto"
    return fit(*beside((*SHAPE, *data), lines))[0]["validation"][0]


def test_kto_training_raises_rewards_of_desirable_and_lowers_rewards_of_undesirable_answers(fit, tmp_path):
    start = trained(fit, ratings(tmp_path), "max_steps=1", "lr=1e-12")
    assert start["accuracy"] == pytest.approx(0.5, abs=0.15) and start["kl"] == pytest.approx(0.0, abs=1e-4)
    assert start["loss"] == pytest.approx(0.5, abs=1e-4)
    learned = trained(fit, ratings(tmp_path))
    assert learned["accuracy"] > 0.9 and learned["reward_desirable"] > 0 > learned["reward_undesirable"]


def test_kto_kl_estimate_is_updated_before_each_optimizer_step_and_each_evaluation(fit, tmp_path, monkeypatch):
    """Undesirable answers have weight 0, so training makes mismatched answers likelier too, and the KL estimate exceeds
    0."""
    given, set_kl = [], KTO.set_kl

    def noted(self, mismatched):
        set_kl(self, mismatched)
        given.append((mismatched[1].item(), self._kl.item()))

    monkeypatch.setattr(KTO, "set_kl", noted)
    learned = trained(fit, ratings(tmp_path), "max_steps=3", "val_sequences=16", "loss.undesirable_weight=0", "lr=1e-2")
    counts, every_z = zip(*given, strict=True)
    assert counts == (8, 8, 8, 8, 16)  # the first evaluation is one micro-batch
    assert learned["kl"] == pytest.approx(every_z[-1]) and every_z[-1] > 0.1


def rated_file(file, labels):
    """Writes one answer per rating, each to a different prompt, and returns the path of the file."""
    answers = ({"prompt": f"{file.stem} {i}? ", "completion": f"{i}", "label": good} for i, good in enumerate(labels))
    file.write_text("\n".join(map(json.dumps, answers)))
    return str(file)


def evaluated(fit, tmp_path, labels, *lines):
    """Trains a run whose validation answers have these ratings. Returns the run's summary and folder."""
    train = rated_file(tmp_path / "train.jsonl", [i % 2 == 0 for i in range(12)])
    data = "data=preference", f"data.path={train}", f"data.val_path={rated_file(tmp_path / 'val.jsonl', labels)}"
    return fit(*beside((*SHAPE, *data, "loss=kto", "val_sequences=99"), lines))


@pytest.mark.parametrize("rated", [True, False], ids=["desirable", "undesirable"])
def test_kto_metrics_of_a_kind_of_answers_absent_from_validation_are_empty(fit, tmp_path, monkeypatch, rated):
    sent = []

    class Sent(DummyLogger):
        def log_metrics(self, metrics, step=None):
            sent.append(metrics)

    monkeypatch.setattr(training, "_loggers", lambda *_: [Sent()])
    watch = "early_stop.watch=accuracy", "early_stop.patience=1"
    summary, folder = evaluated(fit, tmp_path, [rated] * 6, "max_steps=4", "val_every=1", *watch)
    assert summary["steps"] == 4 and not summary["stopped_early"]
    absent, there = ("undesirable", "desirable") if rated else ("desirable", "undesirable")
    (figures,) = summary["validation"]
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    logged = [metrics for metrics in sent if "val/accuracy" in metrics]
    assert len(rows) == len(logged) == 4
    for name in ("reward", "logp"):
        assert figures[f"{name}_{absent}"] is None and figures[f"{name}_{there}"] is not None
        assert all(row[f"{name}_{absent}"] == "" and float(row[f"{name}_{there}"]) for row in rows[1:])
        assert all(f"val/{name}_{absent}" not in metrics and f"val/{name}_{there}" in metrics for metrics in logged)
    assert "nan" not in (folder / "metrics.csv").read_text()


def test_kto_metrics_per_kind_of_answers_do_not_depend_on_the_micro_batch_size(fit, tmp_path):
    """One of nine validation answers is undesirable. With two answers per micro-batch, four of the five micro-batches
    have no undesirable answer."""
    found = []
    for size in (2, 12):
        lines = "max_steps=1", "lr=1e-12", f"batch_size={size}"
        (figures,) = evaluated(fit, tmp_path, [i != 5 for i in range(9)], *lines)[0]["validation"]
        found.append([figures[f"logp_{kind}"] for kind in ("desirable", "undesirable")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # fp32 sums in two orders
    assert max(found[0]) < -0.1


@pytest.mark.wrong
def test_kto_training_with_exchanged_ratings_lowers_the_accuracy_below_a_half(fit, tmp_path, monkeypatch):
    """In the deliberately wrong variant, the loss exchanges desirable and undesirable answers, but the metrics do
    not."""
    losses = KTO.losses
    monkeypatch.setattr(
        KTO, "losses", lambda self, answers: losses(self, answers._replace(desirable=~answers.desirable))
    )
    assert trained(fit, ratings(tmp_path))["accuracy"] < 0.5


@pytest.mark.matrix
def test_peak_of_kto_is_within_3_percent_of_fine_tuning_and_1_percent_of_its_prediction(fit, config, tmp_path):
    """All three runs train on micro-batches of 16 full rows. If KTO computes all logits at once, its peak is over 10 %
    higher."""
    lines = "max_steps=6", "data.too_long=cut", "model.architecture.vocab_size=1024", "batch_size=16"
    file, columns = preferences(tmp_path, count=100, words=60), "loss.columns=128"
    typed = "data=preference", f"data.path={file}", "data.val_fraction=0.15", "loss=kto", columns, "plan=check"
    rated, whole = (fit(*beside((*SHAPE, *typed), (*lines, line)))[0] for line in (columns, "loss.columns=1024"))
    text = lines[0], *lines[2:], "data=random", "loss=tiled", columns
    tuned = fit_run(config(*beside((*SMALL, *SHAPE), text), base=()), tmp_path / "tuned")
    peak = rated["peak_bytes"]["device"]
    assert peak == pytest.approx(tuned["peak_bytes"]["device"], rel=0.03)
    assert whole["peak_bytes"]["device"] > 1.1 * peak
    predicted = max(phase["device"] for phase in rated["predicted"]["phases"].values())
    assert predicted == pytest.approx(peak, rel=0.01)
