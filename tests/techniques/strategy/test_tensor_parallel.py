"""Tests that a tensor-parallel group computes what one process computes: losses, gradients, and weights after some
steps."""

import re
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

import tensor_ranks
from as_rank import as_rank
from lowmem.system.errors import Refused
from lowmem.techniques.adapter.lora import DoRA
from lowmem.techniques.adapter.qlora import QLoRA
from lowmem.techniques.strategy.fsdp_tensor_parallel import FullyShardTensorParallel
from lowmem.techniques.strategy.tensor_parallel import TensorParallel, divide

pytestmark = pytest.mark.kernels
EXACT, SINGLE = 1e-9, 1e-6
FP32 = {"dtype": torch.float32, "optimizer": "SGD"}
CASES = {
    "llama": {},
    "qwen3": {"kind": "qwen3"},
    "gpt2": {"kind": "gpt2"},
    "phi3": {"kind": "phi3"},
    "llama fp32": FP32,
    "gpt2 fp32": {"kind": "gpt2", **FP32},
    "lora": {"adapter": True, "checkpointing": "every_layer"},
    "lora gpt2": {"kind": "gpt2", "adapter": True, "checkpointing": "selective"},
    "chunked": {"kind": "qwen3", "loss": "chunked", "checkpointing": "segments"},
    "tiled": {"kind": "qwen3", "loss": "tiled", "tile": 5},
    "odd vocabulary": {"changes": {"vocab_size": 67}},
    "wrong heads": {"kind": "gpt2", "wrong": "heads"},
    "wrong norm": {"wrong": "counted twice", **FP32},
    "wrong sum": {"kind": "qwen3", "wrong": "not summed"},
    "wrong plan": {"kind": "qwen3", "wrong": "no sum in the plan"},
    "wrong tiles": {"kind": "qwen3", "loss": "tiled", "wrong": "own tiles"},
}


ALWAYS = ("llama", "gpt2", "lora", "tiled")  # correct cases that `make test` runs
RIGHT = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.matrix)
    for name in CASES
    if not name.startswith("wrong")
]


class Figures(dict):
    """A dict that maps the name of each case to its results, which `size` processes compute when the name is first
    read."""

    def __init__(self, processes, folder, size, cases):
        super().__init__()
        self.cases, self.calls, self.ranks = cases, [], []
        self.results, theirs = processes.Pipe(duplex=False)
        for rank in range(size):
            heard, call = processes.Pipe(duplex=False)
            what = (rank, size, str(folder / "store"), heard, theirs)
            self.ranks.append(processes.Process(target=tensor_ranks.live, args=what))
            self.ranks[-1].start()
            self.calls.append(call)
        theirs.close()

    def __missing__(self, name):
        for call in self.calls:
            call.send(self.cases[name])
        assert self.results.poll(120), "they did not answer"
        self[name] = self.results.recv()
        return self[name]

    def close(self):
        for call in self.calls:
            call.send(None)
        for one in self.ranks:
            one.join(10)
            one.kill()


@pytest.fixture(scope="module")
def figures(processes, tmp_path_factory):
    with closing(Figures(processes, tmp_path_factory.mktemp("pair"), 2, CASES)) as found:
        yield found


@pytest.mark.parametrize("case", RIGHT)
def test_two_tensor_parallel_ranks_have_the_loss_gradients_norm_and_weights_of_one_process(figures, case):
    found, bound = figures[case], SINGLE if "dtype" in CASES[case] or "tiled" in case else EXACT
    assert found["loss"] < (bound if bound == EXACT else 1e-4)  # a sum of 48 tokens
    assert found["gradients"] < bound and found["norm"] < 1e-6
    assert found["weights"] < (bound if CASES[case].get("loss") != "tiled" else 1e-4)
    assert found["bits"], "what each rank holds has not the same gradient on all"


@pytest.mark.parametrize("case", RIGHT)
def test_tensor_parallel_shards_are_reassembled_to_full_weights_bit_exactly(figures, case):
    assert figures[case]["conversion"] == 0.0 and figures[case]["parts"]


@pytest.mark.matrix
def test_tied_embedding_stays_tied_under_tensor_parallelism(figures):
    assert figures["qwen3"]["tied"] and not figures["llama"]["tied"]


@pytest.mark.parametrize(
    "case", ["llama", pytest.param("qwen3", marks=pytest.mark.matrix), pytest.param("phi3", marks=pytest.mark.matrix)]
)
def test_each_tensor_parallel_rank_holds_half_of_the_weights(figures, case):
    assert 0.5 < figures[case]["share"] < 0.52  # the weights of norms are not divided


@pytest.mark.matrix
def test_tensor_parallelism_with_an_odd_vocabulary_keeps_embedding_and_head_whole(figures):
    assert figures["odd vocabulary"]["share"] > 0.55


@pytest.mark.parametrize("case", ["llama", "gpt2", pytest.param("qwen3", marks=pytest.mark.matrix)])
def test_tensor_parallel_block_reduces_twice_in_forward_and_twice_in_backward(figures, case):
    """Layers that read the same tensor add their gradients before the all-reduce. Outside the two blocks there are
    three collectives: for the embedding's rows, the head's logits, and the gradient of the head's input."""
    assert figures[case]["collectives"] == 2 * (2 + 2) + 3


@pytest.mark.wrong
def test_tensor_parallel_norm_that_counts_a_shard_twice_differs_from_one_process(figures):
    assert figures["wrong norm"]["norm"] > 1e-4  # a hundred times the tolerance


@pytest.mark.wrong
def test_tensor_parallelism_with_a_deliberate_fault_differs_from_one_process(figures):
    assert figures["wrong heads"]["loss"] > 1e-3
    assert figures["wrong sum"]["gradients"] > 1e-6
    assert figures["wrong tiles"]["loss"] > 1e-3
    assert re.search(r"the gradient of .*layers.0.self_attn.q_norm.weight differs.*Type ", figures["wrong plan"])


def built(kind, **shape):
    return tensor_ranks.network(kind, **shape)


def group(size):
    return SimpleNamespace(size=size)


def test_heads_or_widths_that_ranks_cannot_divide_are_refused_with_a_valid_number():
    with pytest.raises(Refused, match=r"k_proj has 2 heads.*devices=2, or .*tensor_parallel_size=2\."):
        divide(built("llama"), group(4))
    with pytest.raises(Refused, match=r"q_proj has 4 heads, not a multiple of 3\. Type devices=2\.$"):
        divide(built("llama"), group(3))
    with pytest.raises(Refused, match=r"over 2 ranks.*gate_proj has 49 rows.*another strategy="):
        divide(built("llama", intermediate_size=49), group(2))
    with pytest.raises(Refused, match=r"c_attn has 4 heads"):
        divide(built("gpt2"), group(8))
    fused = built("gpt_neox", num_attention_heads=8, hidden_size=96)
    layers = "gpt_neox.layers.*.attention"
    fused.tp_plan = {f"{layers}.query_key_value": "colwise", f"{layers}.dense": "rowwise"}
    with pytest.raises(
        Refused, match=r"query_key_value has 8 heads"
    ):  # 3 x 8 heads in the fused layer would be divisible
        divide(fused, group(3))


def test_refusal_of_indivisible_heads_in_one_of_two_groups_does_not_suggest_devices():
    with (
        as_rank(0, 8),
        pytest.raises(Refused, match=r"k_proj has 2 heads.* Type another strategy=.*parallel_size=2\.$"),
    ):
        divide(built("llama"), group(4))


def test_plain_tensor_parallel_strategy_rejects_the_argument_tensor_parallel_size():
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        TensorParallel(tensor_parallel_size=2)


def test_model_with_experts_or_without_a_plan_is_refused_for_tensor_parallelism():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for kind, shape, why in (
        ("qwen3_moe", experts, "experts"),
        ("opt", {"ffn_dim": 48}, "without a tensor-parallel plan"),
    ):
        with pytest.raises(Refused, match=rf"cannot shard .*ForCausalLM: .*{why}.*Type another strategy="):
            divide(built(kind, **shape), group(2))


@pytest.mark.parametrize(("adapter", "why"), [(DoRA, "DoRA needs"), (QLoRA, "and only linear layers can be sharded")])
def test_dora_and_qlora_are_refused_for_tensor_parallelism(adapter, why):
    network = built("llama", dtype=torch.float32, hidden_size=64, intermediate_size=64)
    adapter(r=4)(network)
    with pytest.raises(Refused, match=why):
        divide(network, group(2))


def test_invalid_tensor_parallel_size_for_the_number_of_devices_is_refused():
    assert TensorParallel.data_ranks(4) == 1
    assert FullyShardTensorParallel.data_ranks(8, tensor_parallel_size=2) == 4
    for devices, size in ((6, 4), (2, 4), (4, 0)):
        with pytest.raises(Refused, match=f"tensor_parallel_size={size}.*devices={devices}.*Type "):
            FullyShardTensorParallel.data_ranks(devices, tensor_parallel_size=size)


@pytest.mark.matrix
def test_tensor_parallelism_in_two_data_parallel_groups_has_the_gradients_and_weights_of_one_process(
    processes, tmp_path
):
    """There are two groups of two ranks, and each group reads different rows."""
    kinds = {"llama": {}, "qwen3": {"kind": "qwen3"}, "gpt2": {"kind": "gpt2"}, "lora": {"adapter": True}}
    kinds |= {
        "tiled": {"kind": "qwen3", "loss": "tiled"},
        "chunked": {"loss": "chunked", "checkpointing": "every_layer"},
        "uneven": {"changes": {"intermediate_size": 50}},  # groups have 13 and 12 of a rank's 25 rows
    }
    cases = {name: {"groups": 2, **FP32, **case} for name, case in kinds.items()}
    with closing(Figures(processes, tmp_path, 4, cases)) as figures:
        for name in cases:
            found = figures[name]
            assert found["gradients"] < SINGLE and found["weights"] < SINGLE and found["norm"] < 1e-6, name
            assert found["conversion"] == 0.0 and found["parts"], name
            assert 0.25 < found["share"] < 0.28, name  # norms, and A or B of adapters, are divided over groups only
