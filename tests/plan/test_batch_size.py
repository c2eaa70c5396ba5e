"""Tests batch_size=auto: it finds the largest divisor of the effective batch that fits, and does not change the
effective batch."""

import pytest

from devices import each_device_slowly
from lowmem.config import cards
from lowmem.config.accumulation import divisors
from lowmem.fit import OutOfMemory
from lowmem.plan import batch_size
from lowmem.plan.prediction import predict
from lowmem.plan.target import Target
from lowmem.system.errors import Refused
from lowmem.training.training import training_session

AUTO = ("batch_size=auto", "accumulation=effective_batch", "accumulation.size=12")


def test_bisection_finds_the_largest_fitting_batch_size_divisor_in_at_most_3_tries():
    for most in range(14):
        tried = []
        found = batch_size.largest(divisors(12), lambda n, most=most, tried=tried: tried.append(n) or n <= most)
        assert found == max((d for d in (1, 2, 3, 4, 6, 12) if d <= most), default=None)
        assert len(tried) <= 3


@pytest.mark.process
def test_batch_size_auto_limited_to_the_peak_of_batch_size_4_finds_4_and_keeps_the_effective_batch(fit):
    typed = {n: fit(*AUTO[1:], f"batch_size={n}", folder=f"typed{n}")[0] for n in (4, 6)}
    room = typed[4]["peak_bytes"]["device"]
    assert room < typed[6]["peak_bytes"]["device"]
    summary, _ = fit(*AUTO, f"memory.limit={room}", folder="auto")  # exactly the peak
    assert summary["batch_size"] == 4 and summary["peak_bytes"]["device"] == room
    # the effective batch is unchanged
    assert summary["tokens"] == typed[6]["tokens"] == 12 * 16 * 4
    assert summary["train_loss"] == pytest.approx(typed[6]["train_loss"], rel=1e-4)
    with pytest.raises(OutOfMemory, match="batch_size=3"):
        fit(*AUTO[1:], "batch_size=6", f"memory.limit={room}", folder="larger")


MIDDLE = tuple(f"model.architecture.{line}" for line in ("n_layer=6", "n_embd=512", "n_head=8", "vocab_size=4096"))
# Memory limits between the needs of two batch sizes: of 2 and 4 sequences on a CPU, and of 16 (2.9 GiB) and 32 (5.5
# GiB) on a card.
CAPPED = {
    "cpu": ("accumulation.size=8", "memory.limit=1100KiB"),
    "cuda": ("accumulation.size=64", "memory.limit=4GiB", *MIDDLE, "seq_len=512"),
}


@pytest.mark.process
@each_device_slowly
@pytest.mark.parametrize("plan", ["off", "check"])
def test_batch_size_twice_the_result_of_auto_does_not_fit(fit, config, device, plan):
    """With plan=off, trials alone find the batch size; with plan=check, a prediction first excludes sizes."""
    lines = (AUTO[1], *CAPPED[device], f"device={device}", "precision=bf16")
    larger = 2 * fit(*lines, "batch_size=auto", f"plan={plan}")[0]["batch_size"]
    assert not batch_size.fits(config(*lines, f"batch_size={larger}"), larger)


@pytest.mark.process
def test_batch_size_auto_on_the_command_line_finds_4_within_1_gib_and_trains(command):
    code, said = command(*AUTO[:2], "accumulation.size=4", "memory.limit=1GiB", "plan=check", "max_steps=1")
    assert code == 0 and "batch_size=4 fits." in said and "1 micro-batch per optimizer step" in said, said


@pytest.mark.process
def test_batch_size_trial_over_the_memory_limit_is_reported_as_not_fitting(config):
    cfg = config(*AUTO, "memory.limit=100KiB")
    assert not batch_size.fits(cfg, 1)


@pytest.mark.parametrize("keeps", [False, True])
def test_training_session_writes_checkpoints_only_if_keeps_is_true_and_never_a_model(config, tmp_path, keeps):
    with training_session(config(), tmp_path, keeps=keeps) as training:
        assert training.trainer.global_step == 4
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"memory.csv", "metrics.csv", *(["checkpoints"] if keeps else [])}


def test_batch_size_auto_without_a_fitting_size_is_refused_with_advice(config, monkeypatch):
    monkeypatch.setattr(batch_size, "fits", lambda cfg, size: False)
    with pytest.raises(Refused, match="gradient_checkpointing=every_layer"):
        batch_size.resolve(config(*AUTO, "memory.limit=100KiB"))


@pytest.mark.process
def test_batch_size_trial_that_fails_for_another_reason_than_memory_is_refused(config):
    cfg = config(*AUTO, "memory.limit=1GiB", "model.architecture.n_head=7")
    with pytest.raises(Refused, match=r"the trial with batch_size=\d+ failed"):
        batch_size.resolve(cfg)


def test_numeric_batch_size_starts_no_trials(config, monkeypatch):
    monkeypatch.setattr(batch_size, "fits", None)
    cfg = config("batch_size=4")
    assert batch_size.resolve(cfg) is cfg


def test_predicted_batch_size_is_tried_first_and_bisection_continues_below(config, monkeypatch):
    monkeypatch.setattr(batch_size, "could_fit", lambda cfg: cfg.batch_size <= 4)
    for most, tries in ((4, [4]), (2, [4, 2, 3])):
        tried = []
        monkeypatch.setattr(batch_size, "fits", lambda _, n, most=most, tried=tried: tried.append(n) or n <= most)
        cfg = config(*AUTO, "memory.limit=1MiB", "plan=check")
        assert batch_size.resolve(cfg).batch_size == most and tried == tries


def test_batch_size_predicted_not_to_fit_is_not_tried(config, monkeypatch):
    monkeypatch.setattr(batch_size, "fits", None)  # a trial would raise
    with pytest.raises(Refused, match=r"even one sequence of seq_len=\d+ does not fit"):
        batch_size.resolve(config(*AUTO, "memory.limit=100KiB", "plan=check"))


RECIPES = (
    "precision=bf16 optim=adamw",
    "precision=bf16 optim=adamw gradient_checkpointing=every_layer",
    "precision=16-master optim=adamw8bit gradient_checkpointing=every_layer loss=chunked",
)
FAILS = 0.97  # share of the peak of live tensors, which is predicted to within 0.5 % on a card


@pytest.mark.process
@each_device_slowly
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_run_fits_in_its_predicted_memory_but_not_in_97_percent_of_its_live_tensors(config, recipe, device):
    """On a card, the predicted memory includes memory that the caching allocator reserves beyond live tensors."""
    sizes = (*MIDDLE, "seq_len=512") if device == "cuda" else ()
    cfg = config(*recipe.split(), *sizes, f"device={device}").sized().resolved()
    found = predict(cfg, Target(True, cards.here()) if device == "cuda" else Target(False))
    caps = (found.device.total - found.device.context, round(FAILS * found.allocated))
    assert [batch_size.fits(cfg.knowing(memory={"limit": cap}), cfg.batch_size) for cap in caps] == [True, False]
