"""Tests that compiled blocks compute what eager blocks compute, with one graph for all blocks, with and without
checkpointing and streamed weights."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lowmem.data.loader import MicroBatch
from lowmem.system.errors import Refused
from lowmem.techniques.compile.blocks import compile_blocks
from lowmem.techniques.gradient_checkpointing import policies
from lowmem.techniques.loss import cross_entropy as losses
from made_up import SlowLane
from networks import VOCABULARY, network, shaped
from parity import BUDGET
from streams import lines, trained
from tolerances import GENERATED, PARTITIONED

SHAPES = ("gpt2", "llama", "qwen3", "opt", "gpt_neox", "gemma", "gemma2", "gemma3_text", "mistral", "olmo2")
POLICIES = {
    "none": policies.none,
    "every_layer": policies.every_layer,
    "every_k": partial(policies.segments, k=2),
    "sqrt": policies.segments,
    "offload": policies.offload,
}
GRAPHS_ALONE = ("compile=blocks", "compile.backend=aot_eager")


@pytest.fixture(autouse=True)
def from_nothing():
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def batch(rows=2, tokens=32):
    drawn = torch.randint(0, VOCABULARY, (2, rows, tokens), generator=torch.Generator().manual_seed(7))
    return MicroBatch(*drawn)


def gradients(model, read=None):
    model.zero_grad()
    torch.manual_seed(1)
    losses.full(model, read or batch()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compiled(model, policy=policies.none, backend="aot_eager"):
    compile_blocks(model, backend)
    policy(model)
    return model


def apart(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.rows("gpt2", "llama", "gemma3_text")
@pytest.mark.kernels
@pytest.mark.parametrize("model_type", SHAPES)
def test_compiled_blocks_have_one_graph_and_the_gradients_of_eager_blocks(model_type):
    model = compiled(shaped(model_type))
    found = [gradients(model) for _ in range(3)]
    assert graphs() == 1
    assert all(torch.equal(later, found[0]) for later in found)
    assert apart(found[0], gradients(shaped(model_type))) < PARTITIONED


@pytest.mark.rows("0.3-every_k", "0.3-offload")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_blocks_have_equal_gradient_bits_with_and_without_checkpointing(policy, dropout):
    kept = gradients(compiled(shaped("gpt2", dropout=dropout)))
    again = compiled(shaped("gpt2", dropout=dropout), POLICIES[policy])
    assert torch.equal(gradients(again), kept)
    assert graphs() == 2  # one per model


@pytest.mark.wrong
def test_compiled_recomputation_without_the_random_state_changes_the_gradients(monkeypatch):
    """In the deliberately wrong variant, recomputation draws new dropout masks."""
    kept = gradients(compiled(shaped("gpt2", dropout=0.3)))
    monkeypatch.setattr(policies, "restored", lambda *_: None)
    assert not torch.equal(gradients(compiled(shaped("gpt2", dropout=0.3), policies.every_layer)), kept)


def test_compiled_blocks_are_not_recompiled_after_the_second_shape():
    model = compiled(shaped("llama"), policies.every_layer)
    for tokens in (32, 31, 24, 17, 32):
        gradients(model, batch(tokens=tokens))
    assert graphs() == 2


def test_compiled_blocks_are_not_used_in_evaluation_and_generation():
    model = compiled(shaped("llama")).eval()
    with torch.no_grad():
        model.generate(batch().input_ids, max_new_tokens=4, do_sample=False)
    losses.full(model, batch())
    assert graphs() == 0


def test_compiling_a_block_with_data_dependent_control_flow_is_refused():
    class Branches(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    model = nn.Sequential(Branches()).train()
    compile_blocks(model, "aot_eager")
    with pytest.raises(Refused, match=r"compile=blocks: torch.compile failed on Branches .*Type compile=none"):
        model(torch.ones(3, requires_grad=True))


@pytest.mark.rows("offload-by_layer")
@pytest.mark.parametrize("order", ["by_micro_batch", "by_layer"])
@pytest.mark.parametrize("policy", ["every_layer", "offload", "sqrt"])
def test_compiled_blocks_with_streamed_weights_give_the_bits_of_resident_weights(config, policy, order):
    if (policy, order) == ("sqrt", "by_layer"):
        pytest.skip("refused")
    arguments = lines("llama", *GRAPHS_ALONE, "max_steps=3", precision="bf16-master", policy=policy)
    resident = trained(config, ["weights=resident"], "llama", arguments)
    streamed = trained(config, ["weights=streamed", f"weights.order={order}"], "llama", arguments)
    assert streamed.module.weights.fetched > 0 and streamed.same(resident)
    assert graphs() <= 2 * 3  # in each of two runs, for full windows and for the short window


@pytest.mark.matrix
@pytest.mark.parametrize("compiles", [GRAPHS_ALONE, BUDGET], ids=["compile", "budget"])
def test_compiled_blocks_with_slow_copies_of_updated_weights_give_the_bits_of_fast_copies(config, compiles):
    arguments = lines("llama", *compiles, "max_steps=3", precision="16-master", policy="none")
    right = trained(config, ["weights=resident"], "llama", arguments)
    assert trained(config, ["weights=resident"], "llama", arguments, lane=SlowLane()).same(right)
    assert graphs() > 0


@pytest.mark.matrix
@pytest.mark.parametrize("adapter", [pytest.param("lora", marks=pytest.mark.matrix), "qlora"])
def test_compiled_blocks_with_an_adapter_have_the_losses_of_eager_blocks(config, adapter):
    arguments = lines("llama", f"adapter={adapter}", "max_steps=2", precision="bf16-master", policy="every_layer")
    eager = trained(config, ["weights=resident"], "llama", arguments)
    quick = trained(config, ["weights=resident"], "llama", (*arguments, *GRAPHS_ALONE))
    assert graphs() > 0
    assert quick.losses == pytest.approx(eager.losses, rel=GENERATED)


@pytest.mark.matrix
@pytest.mark.parametrize("policy", POLICIES)
def test_inductor_gradients_equal_eager_gradients_within_rounding(policy):
    model = compiled(network("llama", num_hidden_layers=4), POLICIES[policy], "inductor")
    found = [gradients(model) for _ in range(3)]
    assert graphs() == 1 and all(torch.equal(later, found[0]) for later in found)
    assert apart(found[0], gradients(network("llama", num_hidden_layers=4))) < PARTITIONED


def peak_bytes(model, folder) -> int:
    """Returns the bytes that forward and backward allocate at their peak, including the allocations of compiled
    code."""
    gradients(model, batch(4, 128))
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        gradients(model, batch(4, 128))
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    first, *others = sorted((e for e in events if e["name"] == "[memory]"), key=lambda event: event["ts"])
    before = first["args"]["Total Allocated"] - first["args"]["Bytes"]
    return max(event["args"]["Total Allocated"] for event in others) - before


def deep():
    return network("llama", num_hidden_layers=6, hidden_size=128, intermediate_size=384, num_attention_heads=4)


@pytest.mark.rows("aot_eager-every_layer")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_need_no_more_memory_than_eager_blocks(policy, backend, tmp_path):
    """The planner relies on this. In a measurement, compiled blocks needed 11 to 21 % less memory than eager blocks."""
    eager = deep()
    POLICIES[policy](eager)
    limit = 1.02 * peak_bytes(eager, tmp_path)
    assert peak_bytes(compiled(deep(), POLICIES[policy], backend), tmp_path) <= limit
    if policy != "none":  # wrong: without checkpointing
        assert peak_bytes(compiled(deep()), tmp_path) > limit


@pytest.mark.kernels
@pytest.mark.parametrize(
    "model_type", [pytest.param(s, marks=[] if s == "gpt2" else pytest.mark.matrix) for s in SHAPES[:-1]]
)
def test_gradients_with_an_activation_memory_budget_equal_eager_gradients_within_rounding(model_type):
    model = shaped(model_type)
    compile_blocks(model, "aot_eager_decomp_partition", 0.2)
    assert apart(gradients(model), gradients(shaped(model_type))) < PARTITIONED


@pytest.mark.matrix
def test_activation_memory_budget_with_inductor_has_the_loss_of_eager_blocks(fit):
    plain, _ = fit("seq_len=32")
    budget, _ = fit("seq_len=32", "compile=blocks", "compile.activation_memory_budget=0.1", folder="b")
    assert budget["val_loss"] == pytest.approx(plain["val_loss"], rel=GENERATED)


def test_smaller_activation_memory_budget_saves_fewer_bytes_for_backward():
    """The bytes are those that autograd's saved-tensor hooks receive, without the parameters."""
    saved = []
    for share in (1.0, 0.5, 0.0):
        model = network(n_layer=2, n_embd=64, n_positions=64)
        compile_blocks(model, "aot_eager_decomp_partition", share)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        sizes = {}

        def pack(tensor, sizes=sizes, parameters=parameters):
            if tensor.untyped_storage()._cdata not in parameters:
                sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.randint(0, VOCABULARY, (2, 64))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.transformer(input_ids=ids, use_cache=False).last_hidden_state.sum()
        saved.append(sum(sizes.values()))
        loss.backward()
    assert saved[0] > 1.3 * saved[1] and saved[1] > 1.3 * saved[2]


@pytest.mark.parametrize("order", ["by_micro_batch", pytest.param("by_layer", marks=pytest.mark.matrix)])
def test_streamed_weights_with_an_activation_memory_budget_give_the_bits_of_resident_weights(config, order):
    arguments = lines("llama", *BUDGET, "max_steps=3", precision="bf16-master", policy="every_layer")
    resident = trained(config, ["weights=resident"], "llama", arguments)
    streamed = trained(config, ["weights=streamed", f"weights.order={order}"], "llama", arguments)
    assert graphs() and streamed.same(resident)


@pytest.mark.parametrize("share", [-0.1, 2])
def test_activation_memory_budget_outside_0_to_1_is_refused(share):
    with pytest.raises(Refused, match=rf"compile\.activation_memory_budget={share}: give a number between 0 and 1"):
        compile_blocks(nn.Sequential(nn.Linear(2, 2)), "aot_eager", share)


def test_activation_memory_budget_without_support_in_torch_is_refused(monkeypatch):
    monkeypatch.setattr("lowmem.techniques.compile.blocks.has_memory_budget", lambda: False)
    with pytest.raises(Refused, match="does not have this setting"):
        compile_blocks(nn.Sequential(nn.Linear(2, 2)), "aot_eager", 0.5)
