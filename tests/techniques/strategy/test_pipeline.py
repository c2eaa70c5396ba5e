"""Tests that a pipeline of processes, each with some of the blocks, trains like one process."""

from contextlib import nullcontext

import pytest
import torch
from benchmarks import architectures
from pipelined import UNTIED, together, trained

from lowmem.system.errors import Refused
from lowmem.techniques.strategy.pipeline import Pipeline
from lowmem.techniques.strategy.stages import divided

pytestmark = pytest.mark.kernels
SAME = 1e-9
GPIPE, OVERFLOWS = "strategy.schedule=gpipe", "precision.init_scale=1e8"
CASES = {
    "1f1b": ([], "float64", None),
    "gpipe": ([GPIPE], "float64", None),
    "untied, chunked, segments over the cut": (
        [UNTIED, "loss=chunked", "loss.rows=7", "gradient_checkpointing=every_k", "gradient_checkpointing.k=3"],
        "float64",
        None,
    ),
    "scaled": ([], "float64", "gradients are means over micro-batches"),
    "apart": ([GPIPE], "float64", "tied gradients are not added"),
    "16": (["precision=16", OVERFLOWS], None, None),
    "bf16-sr": (["precision=bf16-sr"], None, None),
    "bf16-sr apart": (["precision=bf16-sr"], None, "each holder rounds for itself"),
}
EXACT = ("1f1b", "gpipe", "untied, chunked, segments over the cut")
TIED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def pair(processes, tmp_path_factory):
    return together(processes, tmp_path_factory.mktemp("pair"), CASES)


def alone(case):
    lines, dtype, _ = case
    return trained([line for line in lines if not line.startswith("strategy.")], dtype)


def largest_error(ranks, one):
    """Returns the largest error of all gradients of all windows and of the final weights. Each error is relative to the
    largest element of its tensor."""
    assert {name for rank in ranks for name in rank["weights"]} == one["weights"].keys()
    pairs = [(p, one["weights"][name]) for rank in ranks for name, p in rank["weights"].items()]
    for rank in ranks:
        for ours, theirs in zip(rank["gradients"], one["gradients"], strict=True):
            pairs += [(gradient, theirs[name]) for name, gradient in ours.items()]
    return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)


@pytest.mark.parametrize("name", EXACT)
def test_pipeline_gradients_and_weights_equal_one_process(pair, name):
    """The run makes three AdamW steps with norm clipping. Its second window has a single row."""
    one = alone(CASES[name])
    assert largest_error(pair[name], one) < SAME
    for rank in pair[name]:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert rank["norms"] == pytest.approx(one["norms"], rel=SAME)


@pytest.mark.wrong
@pytest.mark.parametrize("name", ["scaled", "apart"])
def test_pipeline_with_a_deliberate_gradient_fault_differs_from_one_process(pair, name):
    assert largest_error(pair[name], alone(CASES[name])) > 1e-3


def test_tied_weight_is_equal_on_both_pipeline_stages_unless_each_stage_rounds_separately(pair):
    for name in ("1f1b", "bf16-sr"):
        first, last = (rank["weights"][TIED] for rank in pair[name])
        assert torch.equal(first, last)
    first, last = (rank["weights"][TIED] for rank in pair["bf16-sr apart"])
    assert not torch.equal(first, last)


def test_overflowing_step_is_skipped_on_all_pipeline_stages(pair):
    first, last = pair["16"]
    assert first["stepped"] == last["stepped"] == alone(CASES["16"])["stepped"]
    assert False in first["stepped"] and first["stepped"][-1]


def test_pipeline_stages_hold_equal_bytes_that_add_up_to_one_process_plus_the_second_tied_weight(pair):
    one = alone(CASES["1f1b"])
    for key, times in (("weight_bytes", 1), ("state_bytes", 2)):  # AdamW has two moments
        parts = [rank[key] for rank in pair["1f1b"]]
        assert sum(parts) == one[key] + times * one["weights"][TIED].nbytes
        assert max(parts) / min(parts) < 1.03


def test_pipeline_generates_the_tokens_of_one_process(pair):
    """Each stage caches the keys and values of its own blocks."""
    for name in EXACT[1:]:
        written = alone(CASES[name])["written"]
        assert written.shape == (1, 11) and all(torch.equal(rank["written"], written) for rank in pair[name])


def bubble(orders):
    """Returns the share of the time in which a stage waits, if backward takes twice as long as forward. `orders` holds
    each stage's operations ("forward" or "backward", micro-batch) in order."""
    ends, free = {}, [0] * len(orders)
    todo = [list(order) for order in orders]
    while any(todo):
        for stage, order in enumerate(todo):
            before = stage - 1 if order and order[0][0] == "forward" else stage + 1
            if not order or (0 <= before < len(orders) and (before, *order[0]) not in ends):
                continue
            what, number = order.pop(0)
            starts = max(free[stage], ends.get((before, what, number), 0))
            free[stage] = ends[stage, what, number] = starts + (1 if what == "forward" else 2)
    work = sum(1 if what == "forward" else 2 for order in orders for what, _ in order)
    return 1 - work / (max(free) * len(orders))


def in_flight(order):
    """Returns the largest number of micro-batches whose activations are kept at once."""
    held = [1 if what == "forward" else -1 for what, _ in order]
    return max(sum(held[: end + 1]) for end in range(len(held)))


def test_pipeline_of_2_stages_and_4_micro_batches_idles_a_fifth_and_keeps_2_with_1f1b_or_4_with_gpipe(pair):
    for name in ("1f1b", "gpipe"):
        orders = [rank["order"] for rank in pair[name]]
        assert bubble(orders) == pytest.approx((2 - 1) / (4 + 2 - 1))
    assert [in_flight(rank["order"]) for rank in pair["1f1b"]] == [2, 1]
    assert [in_flight(rank["order"]) for rank in pair["gpipe"]] == [4, 4]


@pytest.mark.parametrize(
    ("name", "changes", "lines", "says"),
    [
        ("gemma4", {}, [], "different results when its blocks are divided into stages"),
        ("qwen3_moe", {"output_router_logits": True}, [], "auxiliary loss"),
        (
            "llama",
            {},
            ["freeze=[model.embed_tokens*,model.layers.0*,model.layers.1*]"],
            "no trainable weights on stage 0",
        ),
        ("llama", {}, ["freeze=[model.embed_tokens*]"], None),
    ],
)
def test_model_that_pipeline_stages_cannot_train_is_refused_before_the_split(name, changes, lines, says):
    architectures._prepare()
    module, _ = architectures.build_module(architectures.configured(architectures.shrunk(name) | changes, *lines))
    ranks = object.__new__(Pipeline)
    ranks.size = 2
    with pytest.raises(Refused, match=says) if says else nullcontext():
        ranks._check(module, divided(module.model, 2))


SLOW = {
    "16-true": (["precision=16-true", UNTIED, "precision.init_scale=4096"], None, None),
    "bf16-true": (["precision=bf16-true", UNTIED], None, None),
    "lora": (["adapter=lora"], None, None),
    "qlora": (["adapter=qlora"], None, None),
    "dora": (["adapter=dora"], None, None),
    "frozen": (["freeze=[model.embed_tokens*,model.layers.0.mlp*,model.layers.3.mlp*]"], "float64", None),
    "clip_value": (["clip_value=0.001"], "float64", None),
    "tiles": (["tile.tokens=5", UNTIED], None, None),
    "tiled": (["loss=tiled", "loss.columns=64"], None, None),
    "adafactor": (["optim=adafactor", UNTIED], None, None),
    "adam8bit": (
        ["optim=adam8bit", UNTIED, "clip=null"],
        None,
        None,
    ),  # a norm summed in another order would change 8-bit codes
    "selective": (["gradient_checkpointing=selective"], "float64", None),
    "offload": (["gradient_checkpointing=offload"], "float64", None),
    "sqrt": (["gradient_checkpointing=sqrt"], "float64", None),
}


@pytest.mark.matrix
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_and_weights_of_2_or_3_pipeline_stages_equal_one_process_with_each_slow_feature(
    processes, tmp_path, size
):
    """fp64 cases are equal within 1e-9, the other cases within 1e-4."""
    seen = together(processes, tmp_path, SLOW, size)
    off = {name: largest_error(ranks, alone(SLOW[name])) for name, ranks in seen.items()}
    assert not {name: error for name, error in off.items() if error > (SAME if SLOW[name][1] else 1e-4)}
