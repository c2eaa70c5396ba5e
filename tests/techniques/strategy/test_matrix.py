"""Several processes train what one does on the joint batch: every strategy with every feature, or a sentence says why
not. `python -m benchmarks.strategies` writes the whole table down."""

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

# The seam of each strategy: what its engine does by itself with gradients, and who skips a step.
SEAM = {
    "ddp": "16-true, an overflow on one rank",
    "fsdp": "clip and clip_value",
    "tensor_parallel": "clip and clip_value",
    "pipeline": "clip and clip_value",
}
# What a strategy refuses about a model that it divides, when it does. What a config tells, `refusals.py` has.
REFUSED_BY_CONFIG = {*(f"optim={name}" for name in (*IN_BLOCKS, "adafactor", "muon"))}
REFUSED_BY_CONFIG |= {"compile.activation_memory_budget", "compile=blocks", "adapter=qlora"}
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
# A gradient is not finite on one rank alone only where each has another part of it.
WHOLE = ("ddp",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def ranks(processes):
    """A case -> what each of its ranks answers."""
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
def test_strategy_trains_as_one_process_on_the_joint_batch(ranks, folder, strategy, name):
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
    # what 16 bits may be off by does not hide a mistake
    ("ddp", "precision=bf16-true", "mean of means"),
    ("fsdp", "precision=bf16-true", "local norm"),
    ("fsdp", "precision=16-true", "mean of means"),
)


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("strategy", "name", "mistake"),
    [pytest.param(*one, marks=() if number in (0, 5) else pytest.mark.matrix) for number, one in enumerate(WRONG)],
)
def test_planted_distributed_mistake_is_caught(ranks, folder, strategy, name, mistake):
    case, bands = features(folder)[name]
    # a row for each rank: two rows have nearly equal numbers of tokens, and bf16's products differ between processors
    case = replace(typed(case, strategy), together=2)
    try:
        found = apart(ranks(replace(case, wrong=mistake)), alone(case))
    except AssertionError:  # ranks that no longer agree
        return
    assert any(found[what] > 3 * band for what, band in bands.items()), found


PAIRED = ("loss=dpo", "loss.columns=64", "loss.beta=0.5", "data=preference", "data.path=x")
RATED = ("loss=kto", "loss.columns=64", "loss.beta=0.5", "data=preference", "data.path=x")


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor_parallel"])
def test_pairs_divided_over_devices_have_the_loss_of_one_device(ranks, strategy):
    case = typed(Case((*WINDOWS, *PLAIN, CLIP, *PAIRED)), strategy)
    right = alone(case)
    found = apart(ranks(case), right)
    assert all(found[what] <= band for what, band in FP32.items()), found
    other = tuple(line.replace("beta=0.5", "beta=0.4") for line in case.lines)
    assert any(apart(ranks(replace(case, lines=other)), right)[what] > 3 * band for what, band in FP32.items())


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("fsdp", "tensor_parallel"))]
)
def test_rated_answers_of_all_devices_share_one_z(ranks, strategy):
    case = typed(Case((*WINDOWS, *PLAIN, CLIP, *RATED)), strategy)
    right = alone(case)
    found = apart(ranks(case), right)
    assert all(found[what] <= band for what, band in FP32.items()), found
    if strategy != "tensor_parallel":  # whose ranks read the same rows
        found = apart(ranks(replace(case, wrong="own z")), right)
        assert any(found[what] > 3 * band for what, band in FP32.items()), found


@pytest.mark.wrong
def test_step_skipped_by_one_rank_only_is_caught(ranks, folder):
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


# --- what travels, and what each holds ------------------------------------------------------------------------------


def test_ddp_reduces_gradients_once_per_window(ranks, folder):
    """However many micro-batches it has. The other number that is added is the window's loss."""
    seen = {}
    for batches, together in ((1, 8), (4, 2)):
        lines = (*features(folder)["clip"][0].lines, f"accumulation.batches={batches}")
        case = typed(replace(features(folder)["clip"][0], lines=lines, together=together, counted=True), "ddp")
        seen[batches] = ranks(case)[0]["collectives"]
    assert seen[1] == seen[4]
    assert seen[1][-1] == {"allreduce": 2}


@pytest.mark.parametrize(("strategy", "share"), [("fsdp", 1 / 2), pytest.param("ddp", 1, marks=pytest.mark.matrix)])
def test_each_rank_holds_its_share_of_weights_and_state(ranks, folder, strategy, share):
    case = features(folder)["clip and clip_value"][0]
    whole = alone(typed(case, strategy))["bytes"]
    for rank in ranks(typed(case, strategy)):
        assert {kind: rank["bytes"][kind] / whole[kind] for kind in whole} == pytest.approx(
            dict.fromkeys(whole, share), rel=0.03
        )


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resumed_multi_rank_run_ends_with_the_same_bits(ranks, small, tmp_path, strategy):
    """With dropout, which each rank goes on drawing where it stopped."""

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
def test_chunked_loss_is_evaluated_with_sharded_weights(ranks, small, tmp_path):
    lines = (*small, "loss=chunked", "loss.rows=7", "val_every=2", "logger=none", "sample_tokens=3")
    one = pair.fitted(Fitted(lines, str(tmp_path / "one")))["val_loss"]
    of_two = (*lines, "strategy=fsdp", "devices=2", "batch_size=2", "strategy.timeout=40")
    for rank in ranks(Fitted(of_two, str(tmp_path / "two")), 2):
        assert rank["val_loss"] == pytest.approx(one, rel=1e-5)
