"""Tests each strategy with each feature: either several processes train like one process on the joint batch, or the
combination is refused. `python -m benchmarks.strategies` writes the complete table."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import pair
from lowmem.system.errors import Refused
from matrix import CLIP, FP32, IN_BLOCKS, OF_PARTS, STRATEGIES, WINDOWS, features, typed, why_not, written
from pair import PLAIN, Case, Failed, Fitted, Ranks, alone, apart, composed
from same import same

pytestmark = pytest.mark.kernels

# The feature of each strategy that `make test` runs: clipping, or a step that all ranks must skip.
SEAM = {
    "ddp": "16-true, an overflow on one rank",
    "fsdp": "clip and clip_value",
    "tensor_parallel": "clip and clip_value",
    "pipeline": "clip and clip_value",
}
# Features that `refusals.py` refuses from the config alone:
REFUSED_BY_CONFIG = {*(f"optim={name}" for name in (*IN_BLOCKS, "adafactor", "muon"))}
REFUSED_BY_CONFIG |= {"compile.activation_memory_budget", "compile=blocks", "adapter=qlora"}
# Features that are refused only when a strategy divides the model:
REFUSED = {
    ("tensor_parallel", "adapter=dora"): "DoRA needs the norms of full rows",
    ("tensor_parallel", "adapter=qlora"): "NF4Linear, and only linear layers can be sharded",
    ("tensor_parallel", "a mixture's auxiliary loss"): "unsupported sharding style",
    ("tensor_parallel", "adapter.experts=lora"): "unsupported sharding style",
    ("pipeline", "freeze"): "has no trainable weights on stage 0",
    ("pipeline", "a mixture's auxiliary loss"): "adds an auxiliary loss",
    ("pipeline", "adapter.experts=lora"): "adds an auxiliary loss",
}
REFUSED |= {(f"fsdp_{strategy}", name): why for (strategy, name), why in REFUSED.items() if strategy != "pipeline"}
DROPOUT = ("model.architecture.resid_pdrop=0.1",)
# With these strategies all ranks have equal gradients, so a gradient cannot overflow on one rank alone.
WHOLE = ("ddp",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def ranks(processes):
    """Yields a function that takes a case and a number of ranks (None: the `devices` of the case), and returns a list
    with the results of all ranks."""
    started = {size: Ranks(processes, size) for size in (2, 4)}
    yield lambda case, size=None: started[size or composed(case).devices](case)
    for one in started.values():
        one.close()


def every():
    for strategy in STRATEGIES:
        for name in features(Path()):
            if strategy in WHOLE and name == OF_PARTS:
                continue
            mark = pytest.mark.seam if name == SEAM.get(strategy) else pytest.mark.matrix
            yield pytest.param(strategy, name, marks=mark, id=f"{strategy}, {name}")


@pytest.mark.parametrize(("strategy", "name"), list(every()))
def test_each_feature_under_a_strategy_trains_like_one_process_on_the_joint_batch_or_is_refused_with_the_reason(
    ranks, folder, strategy, name
):
    case, bands = features(folder)[name]
    case = typed(case, strategy)
    if why_not(case):
        assert name in REFUSED_BY_CONFIG and strategy not in WHOLE, why_not(case)
        return
    if (strategy, name) in REFUSED:
        with pytest.raises(Refused, match=REFUSED[strategy, name]):
            ranks(case)
        return
    found = apart(ranks(case), alone(case))
    assert all(found[what] <= band for what, band in bands.items()), found


WRONG = (
    ("ddp", "clip", "mean of means"),
    ("ddp", "clip", "never synced"),
    ("ddp", "clip", "without factor"),
    ("fsdp", "clip", "mean of means"),
    ("fsdp", "clip", "without factor"),
    ("fsdp", "clip", "local norm"),
    ("tensor_parallel", "clip", "local norm"),
    ("pipeline", "clip", "local norm"),
    # 16-bit tolerances must not hide a fault
    ("ddp", "precision=bf16-true", "mean of means"),
    ("fsdp", "precision=bf16-true", "local norm"),
    ("fsdp", "precision=16-true", "mean of means"),
)


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("strategy", "name", "mistake"),
    [pytest.param(*one, marks=() if number in (0, 5) else pytest.mark.matrix) for number, one in enumerate(WRONG)],
)
def test_strategy_with_a_deliberate_fault_differs_from_one_process(ranks, folder, strategy, name, mistake):
    case, bands = features(folder)[name]
    # One row per rank. With two rows, the numbers of tokens of the ranks are nearly equal, so a fault changes little.
    # Differences of bf16 products between processors could then hide the fault.
    case = replace(typed(case, strategy), together=2)
    of_ranks, of_one = ranks(replace(case, wrong=mistake)), alone(case)
    try:
        found = apart(of_ranks, of_one)
    except AssertionError:  # ranks that no longer agree
        return
    assert any(found[what] > 3 * band for what, band in bands.items()), found


PAIRED = ("loss=dpo", "loss.columns=64", "loss.beta=0.5", "data=preference", "data.path=x")
RATED = ("loss=kto", "loss.columns=64", "loss.beta=0.5", "data=preference", "data.path=x")


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor_parallel"])
def test_dpo_pairs_divided_over_devices_train_like_one_device(ranks, strategy):
    case = typed(Case((*WINDOWS, *PLAIN, CLIP, *PAIRED)), strategy)
    right = alone(case)
    found = apart(ranks(case), right)
    assert all(found[what] <= band for what, band in FP32.items()), found
    other = tuple(line.replace("beta=0.5", "beta=0.4") for line in case.lines)
    assert any(apart(ranks(replace(case, lines=other)), right)[what] > 3 * band for what, band in FP32.items())


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("fsdp", "tensor_parallel"))]
)
def test_kto_answers_divided_over_devices_share_one_kl_estimate_and_train_like_one_device(ranks, strategy):
    case = typed(Case((*WINDOWS, *PLAIN, CLIP, *RATED)), strategy)
    right = alone(case)
    found = apart(ranks(case), right)
    assert all(found[what] <= band for what, band in FP32.items()), found
    if strategy != "tensor_parallel":  # ranks of tensor_parallel read the same rows
        found = apart(ranks(replace(case, wrong="own z")), right)
        assert any(found[what] > 3 * band for what, band in FP32.items()), found


@pytest.mark.wrong
def test_step_that_only_one_fsdp_rank_skips_fails_the_run(ranks, folder):
    case, _ = features(folder)[OF_PARTS]
    case = replace(typed(case, "fsdp"), wrong="local norm")
    case = replace(case, lines=(*case.lines, "strategy.timeout=5"))
    with pytest.raises((Failed, AssertionError)):
        apart(ranks(case), alone(case))


@pytest.mark.matrix
def test_absent_rank_fails_the_run_at_the_timeout(ranks, folder, monkeypatch):
    case, _ = features(folder)["clip"]
    monkeypatch.setattr(pair, "LIMIT", 4)
    with pytest.raises(Failed, match=r"Rank \d (is gone|hangs)|did not answer|[Tt]imed out|timeout"):
        ranks(replace(typed(case, "ddp"), wrong="silent"))


# --- collectives, and memory of each rank -----------------------------------------------------------------------------


def test_ddp_reduces_gradients_once_per_window(ranks, folder):
    """Windows of one or four micro-batches each have two all-reduces: of the gradients, and of the window's loss."""
    seen = {}
    for batches, together in ((1, 8), (4, 2)):
        lines = (*features(folder)["clip"][0].lines, f"accumulation.batches={batches}")
        case = typed(replace(features(folder)["clip"][0], lines=lines, together=together, counted=True), "ddp")
        seen[batches] = ranks(case)[0]["collectives"]
    assert seen[1] == seen[4]
    assert seen[1][-1] == {"allreduce": 2}


@pytest.mark.parametrize(("strategy", "share"), [("fsdp", 1 / 2), pytest.param("ddp", 1, marks=pytest.mark.matrix)])
def test_each_fsdp_rank_holds_half_and_each_ddp_rank_all_of_weights_gradients_and_optimizer_state(
    ranks, folder, strategy, share
):
    case = features(folder)["clip and clip_value"][0]
    whole = alone(typed(case, strategy))["bytes"]
    for rank in ranks(typed(case, strategy)):
        assert {kind: rank["bytes"][kind] / whole[kind] for kind in whole} == pytest.approx(
            dict.fromkeys(whole, share), rel=0.03
        )


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resumed_run_of_two_ranks_ends_with_the_bits_of_an_unbroken_run(ranks, small, tmp_path, strategy):
    """Dropout is on, so each rank must continue its sequence of random numbers. The deliberately wrong variant
    (`drawn_anew`) begins new sequences."""

    def ended(name, *lines, **how):
        typed = (*small, *DROPOUT, f"strategy={strategy}", "devices=2", "strategy.timeout=40", "logger=none", *lines)
        losses = ranks(Fitted(typed, str(tmp_path / name), **how), 2)
        return losses, load_file(tmp_path / name / "model" / "model.safetensors")

    losses, weights = ended("whole", "save_every=2", "checkpoint.keep=9")
    (half,) = (tmp_path / "whole" / "checkpoints").glob("*00000002.ckpt")
    again, resumed = ended("resumed", f"resume={half}")
    assert again == losses and same(weights, resumed)
    assert not same(weights, ended("anew", f"resume={half}", drawn_anew=True)[1])


@pytest.mark.matrix
def test_fsdp_evaluation_with_chunked_loss_has_the_val_loss_of_one_process(ranks, small, tmp_path):
    lines = (*small, "loss=chunked", "loss.rows=7", "val_every=2", "logger=none", "sample_tokens=3")
    one = pair.fitted(Fitted(lines, str(tmp_path / "one")))["val_loss"]
    of_two = (*lines, "strategy=fsdp", "devices=2", "batch_size=2", "strategy.timeout=40")
    for rank in ranks(Fitted(of_two, str(tmp_path / "two")), 2):
        assert rank["val_loss"] == pytest.approx(one, rel=1e-5)
