"""Tests that the log-probabilities of the reference model equal the log-probabilities of a second model bit for bit,
that they are cached, and that they are computed again if the reference model changes."""

import csv
import gc
import json
import logging
import math
import shutil
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

import pair_oracle
from conftest import SMALL
from lowmem.data.rated import RatedAnswers
from lowmem.fit import fit as fit_run
from lowmem.system.errors import Refused
from lowmem.training import build, reference
from lowmem.training.module import CausalLM
from tolerances import FP32_REORDERED
from wrong_variants import z_of_each_micro_batch

PREFERS = "data=preference", "loss=dpo", "seq_len=32", "batch_size=2", "max_steps=4", "data.val_fraction=0.2"
CONSTANT = "scheduler=constant"
WINDOW = "accumulation=fixed", "accumulation.batches=2", "max_steps=2"
BOTH = pytest.mark.parametrize("loss", ["loss=dpo", "loss=kto"])
STREAMED = "weights=streamed", "precision=bf16-master", "gradient_checkpointing=every_layer"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = ["one", "two", "three", "four", "five", "six"]
    records = [
        {"prompt": f"{n}: ", "chosen": " ".join(words[: 1 + n % 5]), "rejected": " ".join(words[n % 4 :])}
        for n in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    return file


@pytest.fixture
def preferring(config, pairs, tmp_path):
    """Returns a function that takes overrides and returns the settings of a run on `pairs`, whose cache is in
    `tmp_path`."""

    def make(*lines: str):
        typed = {line.split("=")[0] for line in lines}
        ours = *PREFERS, f"data.path={pairs}", f"cache_dir={tmp_path / 'cache'}"
        return config(*(line for line in ours if line.split("=")[0] not in typed), *lines)

    return make


@pytest.fixture
def computed(caplog):
    """Returns a function that counts the pairs (with KTO, the answers) whose reference log-probabilities were computed
    since its last call."""
    caplog.set_level(logging.INFO, "lowmem")

    def count() -> int:
        said = [
            record.getMessage()
            for record in caplog.records
            if "Computing the reference model's log-probabilities" in record.getMessage()
        ]
        caplog.clear()
        return sum(int(line.split()[6].replace(",", "")) for line in said)

    return count


def numbers(folder: Path, split: str) -> np.ndarray:
    (file,) = folder.glob(f"cache/preference-*/{split}_reference_*.npy")
    return np.load(file)


def stored_by(preferring, tmp_path, *lines) -> np.ndarray:
    """Returns the reference log-probabilities that a run stores for the training pairs; NaN for pairs that the run does
    not read."""
    fit_run(preferring(*lines, f"cache_dir={tmp_path / 'own' / 'cache'}"), tmp_path / "own" / "run")
    found = numbers(tmp_path / "own", "train")
    shutil.rmtree(tmp_path / "own")
    return found


def second_model(run):
    """Returns a reference model beside the trained model, as other trainers keep it in memory, and micro-batches of all
    training rows."""
    data = build.data(run)
    seed_everything(run.seed, verbose=False)
    second, rows = build.module(run, data), data.train.sequences
    return second, reference._Batches(rows, np.arange(len(rows)), build.share_of(run, second.ranks), 1)


@pytest.mark.rows("padded")
@pytest.mark.kernels
@pytest.mark.parametrize("lines", [(), ("data.packing=documents",)], ids=["padded", "packed"])
def test_reference_log_probabilities_equal_a_second_model_bit_exactly(preferring, tmp_path, lines):
    fit_run(preferring(*lines, "max_steps=100"), tmp_path / "run")
    stored, (second, batches) = numbers(tmp_path, "train"), second_model(preferring(*lines).resolved())
    for number, (batch,) in enumerate(batches):
        with torch.no_grad():
            answers, real = second.own_loss.answers(second.model.eval(), batch)
            whole, _ = pair_oracle.log_probabilities(second.model, batch)
        assert np.array_equal(answers.logp[real].numpy(), stored[batches.units[number]])
        # The oracle computes all logits in fp32. For answers of up to ten tokens the measured error is 2e-6; with
        # another model it is 0.1.
        assert torch.allclose(answers.logp[real], whole, rtol=0, atol=1e-5)
    assert not np.isnan(stored).any()


@pytest.mark.matrix
@pytest.mark.kernels
def test_reference_of_rated_answers_equals_a_second_model_bit_exactly(preferring, tmp_path):
    """Compares both log-probabilities of a prompt: with its own answer, and with the answer to another prompt (the
    mismatched row)."""
    fit_run(preferring("loss=kto", "max_steps=100"), tmp_path / "run")
    stored, (second, batches) = numbers(tmp_path, "train"), second_model(preferring("loss=kto").resolved())
    for number, (batch,) in enumerate(batches):
        for side, read in enumerate((batch, batch.mismatched)):
            with torch.no_grad():
                answers, real = second.own_loss.answers(second.model.eval(), read)
                whole, _ = pair_oracle.log_probabilities(second.model, read)
            assert np.array_equal(answers.logp[real].numpy()[:, 0], stored[batches.units[number], side])
            assert torch.allclose(answers.logp[real], whole, rtol=0, atol=1e-5)  # the tolerance of the test above
    assert not np.isnan(stored).any() and not np.allclose(stored[:, 0], stored[:, 1])


@pytest.mark.rows("loss=kto")
@BOTH
def test_reference_log_probabilities_with_streamed_weights_equal_resident_weights_bit_exactly(
    preferring, tmp_path, loss
):
    resident = stored_by(preferring, tmp_path, loss, *STREAMED[1:])
    streamed = stored_by(preferring, tmp_path, loss, *STREAMED)
    by_layer = stored_by(preferring, tmp_path, loss, *STREAMED, "weights.order=by_layer", *WINDOW)
    known = ~np.isnan(resident)
    assert (
        known.any()
        and np.array_equal(resident[known], streamed[known])
        and np.array_equal(by_layer[known], resident[known])
    )
    fp32 = stored_by(preferring, tmp_path, loss)
    assert not np.array_equal(resident[known], fp32[known])


@pytest.mark.matrix
def test_reference_log_probabilities_with_lora_equal_the_base_model_and_are_shared_by_all_adapter_sizes(
    preferring, tmp_path, computed
):
    """The reference is the model without its adapter, so a run with another `adapter.r` reads the cached values."""
    plain = stored_by(preferring, tmp_path)
    fit_run(preferring("adapter=lora"), tmp_path / "a")
    known = ~np.isnan(plain)
    assert np.array_equal(numbers(tmp_path, "train")[known], plain[known])
    computed()
    fit_run(preferring("adapter=lora", "adapter.r=4"), tmp_path / "b")
    assert computed() == 0


def test_reference_log_probabilities_are_computed_for_read_pairs_only_and_cached(preferring, tmp_path, computed):
    fit_run(preferring(), tmp_path / "first")
    val = len(numbers(tmp_path, "val"))
    assert computed() == 4 * 2 + val
    fit_run(preferring("lr=1e-2", "optim=sgd"), tmp_path / "second")
    assert computed() == 0
    fit_run(preferring("max_steps=6"), tmp_path / "longer")
    assert computed() == 4


@pytest.mark.rows("killed")
@pytest.mark.parametrize(
    ("killed", "lines"),
    [(True, ()), (False, ()), pytest.param(True, STREAMED, marks=pytest.mark.matrix)],
    ids=["killed", "interrupted", "streamed"],
)
def test_interrupted_reference_pass_computes_only_missing_pairs_and_equals_the_uninterrupted_pass(
    preferring, tmp_path, computed, monkeypatch, killed, lines
):
    """The second run computes the missing log-probabilities in the micro-batches of an uninterrupted pass, so their
    bits are equal too."""
    whole = stored_by(preferring, tmp_path, "max_steps=20", *lines)
    computed()
    store, stored = reference.ReferenceLogProbs.store, []

    def ends_at_the_third(self, numbers):
        """Ends the run in the third call; if `killed`, before this call has stored anything. The first call is at the
        start of the pass."""
        stored.append(self.name)
        if len(stored) <= 3 or not killed:
            store(self, numbers)
        if len(stored) == 3:
            raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(reference, "STORED_EVERY", 0)
        patch.setattr(reference.ReferenceLogProbs, "store", ends_at_the_third)
        fit_run(preferring("max_steps=20", *lines), tmp_path / "ended")
    unknown = int(np.isnan(numbers(tmp_path, "train")).any(1).sum())
    asked = computed()
    assert set(stored) == {"train"} and 0 < unknown < asked == len(whole)
    fit_run(preferring("max_steps=20", *lines), tmp_path / "again")
    assert computed() == unknown + len(numbers(tmp_path, "val"))
    assert np.array_equal(numbers(tmp_path, "train"), whole)


@pytest.mark.matrix
def test_run_with_fewer_reference_values_keeps_the_values_stored_by_a_concurrent_run(preferring, tmp_path):
    """The run that has computed fewer values writes last."""
    fit_run(preferring("max_steps=20"), tmp_path / "run")
    complete = numbers(tmp_path, "train")
    run = preferring("max_steps=20").resolved()
    data = build.data(run)
    seed_everything(run.seed, verbose=False)
    (behind, _) = reference._wanted(run, data, build.module(run, data).identity["start"])
    assert np.array_equal(behind.read(), complete)
    behind.store(np.full_like(complete, np.nan))
    assert np.array_equal(numbers(tmp_path, "train"), complete) and not np.isnan(complete).any()


def test_unwritable_reference_cache_is_refused_before_the_reference_pass(preferring, tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    fit_run(preferring("loss=simpo"), tmp_path / "tokens")
    monkeypatch.setattr(reference, "atomic_write", full)
    monkeypatch.setattr(CausalLM, "predict_step", lambda *_: pytest.fail("the pass has begun"))
    with pytest.raises(Refused, match=r"cannot be written to .* \(No space left on device\)\. Type cache_dir="):
        fit_run(preferring(), tmp_path / "run")


@pytest.mark.matrix
def test_reference_of_a_model_with_another_seed_dtype_or_head_count_is_computed_again(preferring, tmp_path, computed):
    fit_run(preferring(), tmp_path / "first")
    before = computed()
    fit_run(preferring("seed=1"), tmp_path / "other")
    assert computed() == before > 0
    fit_run(preferring("precision=bf16-true"), tmp_path / "rounded")
    assert computed() == before
    fit_run(preferring("model.architecture.n_head=1"), tmp_path / "of the same shapes")
    assert computed() == before


@pytest.mark.matrix
def test_damaged_reference_cache_is_computed_again(preferring, tmp_path, computed):
    fit_run(preferring(), tmp_path / "first")
    before = computed()
    for file in tmp_path.glob("cache/preference-*/*_reference_*.npy"):
        file.write_bytes(file.read_bytes()[:100])
    fit_run(preferring(), tmp_path / "second")
    assert computed() == before


class OfTwoPairs:
    """A split of two pairs, without their rows."""

    unit_count = 2


def test_corrupted_reference_value_is_detected_and_an_older_format_is_read(tmp_path, caplog):
    wanted, numbers = object.__new__(reference.ReferenceLogProbs), np.array([[1.0, 2.0], [3.0, np.nan]])
    wanted.rows, wanted.file = OfTwoPairs(), tmp_path / "train_reference.npy"
    wanted.store(numbers)
    assert np.array_equal(wanted.read(), numbers, equal_nan=True)
    content = bytearray(wanted.file.read_bytes())
    content[-30] ^= 1
    with caplog.at_level(logging.INFO, "lowmem"):
        for damaged in (content, content[:-4] + b"\0", content[:100], b""):
            wanted.file.write_bytes(damaged)
            assert np.isnan(wanted.read()).all()
    assert caplog.text.count("is damaged, so its log-probabilities are computed again") == 4
    np.save(wanted.file, numbers)  # the older format has no checksum
    assert np.array_equal(wanted.read(), numbers, equal_nan=True)


@pytest.mark.rows("loss=dpo")
@BOTH
def test_resumed_preference_run_computes_missing_reference_values_and_has_the_unbroken_val_loss(
    preferring, tmp_path, computed, loss
):
    """The resumed run computes missing log-probabilities with the initial model, not with the weights of the
    checkpoint. If the cache is gone, all log-probabilities are missing."""
    longer = partial(preferring, "max_steps=8", CONSTANT, loss)
    unbroken = fit_run(longer(), tmp_path / "unbroken")["val_loss"]
    shutil.rmtree(tmp_path / "cache")
    fit_run(preferring("max_steps=4", CONSTANT, loss), tmp_path / "run")
    computed()
    resumed = f"resume={tmp_path / 'run'}"
    assert fit_run(longer(resumed), tmp_path / "on")["val_loss"] == unbroken
    assert computed() == 4 * 2
    shutil.rmtree(tmp_path / "cache")
    assert fit_run(longer(resumed), tmp_path / "anew")["val_loss"] == unbroken
    assert computed() > 8 * 2


@pytest.mark.matrix
def test_resume_of_a_dpo_run_with_another_initial_model_is_refused(preferring, tmp_path):
    fit_run(preferring("max_steps=2"), tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(Refused, match=r"compares with the initial model of the run.*Type the model="):
        fit_run(preferring("max_steps=8", f"resume={tmp_path / 'run'}", "seed=1"), tmp_path / "on")


def test_evaluation_of_an_exported_model_without_its_reference_is_refused_for_dpo_but_not_for_simpo(
    preferring, tmp_path
):
    fit_run(preferring(), tmp_path / "run")
    with pytest.raises(Refused, match="which an exported model does not name"):
        fit_run(preferring(f"evaluate={tmp_path / 'run' / 'model'}"), tmp_path / "evaluated")
    simpo = preferring(f"evaluate={tmp_path / 'run' / 'model'}", "loss=simpo")
    assert fit_run(simpo, tmp_path / "simpo")["validation"][0]["accuracy"] >= 0


def test_non_finite_reference_log_probabilities_are_refused(preferring, tmp_path, monkeypatch):
    monkeypatch.setattr(
        CausalLM,
        "predict_step",
        lambda self, batches, *_: [torch.full((len(batch.labels) // 2, 2), torch.nan) for batch in batches],
    )
    with pytest.raises(Refused, match=r"log-probability .* is not finite"):
        fit_run(preferring(), tmp_path / "run")


def test_early_stop_on_accuracy_ends_a_dpo_run_and_is_refused_with_loss_full(config, preferring, tmp_path):
    run = preferring("early_stop.patience=1", "early_stop.watch=accuracy", "val_every=1", "max_steps=50", "lr=1e-9")
    summary = fit_run(run, tmp_path / "run")
    assert summary["stopped_early"] and summary["steps"] < 50
    with pytest.raises(Refused, match=r"early_stop\.watch=accuracy: loss="):
        lines = "data=random", "loss=full", "early_stop.patience=1", "early_stop.watch=accuracy"
        fit_run(config(*lines, base=SMALL), tmp_path / "tokens")


@pytest.mark.kernels
def test_kto_loss_does_not_depend_on_the_micro_batch_size(preferring, tmp_path, monkeypatch, no_picture):
    """Compares the loss of the second window in fp32, because in the first window the KL estimate is 0. The optimizer
    is SGD, because its step does not amplify rounding. Rows are not sorted by length, because the rows of a window
    would then depend on the micro-batch size. Wrong variant: each micro-batch has its own KL estimate."""
    monkeypatch.setattr(RatedAnswers, "arranged", lambda self, permutation, rows_per_step: permutation)
    size = "max_steps=2", "optim=sgd", "lr=3", "loss=kto", "loss.beta=0.5", "val_every=1000"

    def second(*lines, folder):
        fit_run(preferring(*size, *lines), tmp_path / folder)
        _, row, *_ = csv.DictReader((tmp_path / folder / "metrics.csv").open())
        return float(row["train_loss"])

    cut = "batch_size=2", "accumulation=fixed", "accumulation.batches=4"
    whole = second("batch_size=8", "accumulation=none", folder="whole")
    assert second(*cut, folder="cut") == pytest.approx(whole, rel=FP32_REORDERED)
    z_of_each_micro_batch(monkeypatch)
    assert abs(second(*cut, folder="wrong") / whole - 1) > 100 * FP32_REORDERED


def test_dpo_training_disables_dropout_so_its_first_loss_is_log_2(preferring, tmp_path):
    """Without dropout, the trained model equals the reference in the first step, and the DPO loss of equal models is
    log 2."""
    dropout = "model.architecture.resid_pdrop=0.5", "model.architecture.embd_pdrop=0.5"
    fit_run(preferring(*dropout, "max_steps=1"), tmp_path / "run")
    (first, *_) = csv.DictReader((tmp_path / "run" / "metrics.csv").open())
    assert float(first["train_loss"]) == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.rows("resident")
@pytest.mark.parametrize("lines", [(), STREAMED], ids=["resident", "streamed"])
def test_reference_and_trained_model_are_never_in_memory_together(preferring, tmp_path, monkeypatch, lines):
    """Whenever a model is built, no earlier model may exist. In particular, the trainer that computed the reference
    must not keep its model."""
    built, alive, make = [], [], build.module

    def counted(*args, **kwargs):
        alive.append(sum(reference() is not None for reference in built))
        module = make(*args, **kwargs)
        built.append(weakref.ref(module.model))
        return module

    monkeypatch.setattr(build, "module", counted)
    fit_run(preferring(*lines), tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    gc.collect()  # the model of the previous run
    fit_run(preferring(*lines, "max_steps=6", f"resume={tmp_path / 'run'}"), tmp_path / "on")
    assert len(alive) == 5 and not any(alive)
