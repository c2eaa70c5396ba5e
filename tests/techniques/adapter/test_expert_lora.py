"""Compares LoRA of fused experts with PEFT, which adapts the same stacks."""

import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from lowmem.model.trainable import trainable
from lowmem.saving.export import Weights
from lowmem.saving.export_adapter import merge, write_adapter
from lowmem.system.errors import Refused
from lowmem.techniques.adapter import stacks
from lowmem.techniques.adapter.lora import PREFIX, DoRA, LoRA, _names_in_folder, load
from lowmem.techniques.adapter.qlora import QLoRA
from networks import network
from tolerances import FP32_REORDERED

FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # (experts, in, out), with biases
}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.arange(2 * 16).view(2, 16)


def made(family):
    return network(family, **FAMILIES[family])


def moved(model):
    torch.manual_seed(3)
    for _, p in trainable(model):
        torch.nn.init.normal_(p, std=0.1)
    return model


def logits(model):
    return model(input_ids=IDS).logits


def gradients(model):
    logits(model).square().mean().backward()
    return {name: p.grad for name, p in trainable(model)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", [LoRA, QLoRA])
def test_lora_of_experts_adds_matrices_and_leaves_the_initial_logits_unchanged(family, adapter):
    plain, model = made(family), made(family)
    adapter(r=4)(plain)
    adapter(r=4, experts="lora")(model)
    assert torch.equal(logits(model), logits(plain))
    added = {name for name, _ in trainable(model)} - {name for name, _ in trainable(plain)}
    assert len(added) == 2 * 2 * 2 and all(".experts." in name for name in added)
    found = gradients(moved(model))
    assert all(found[name].abs().max() > 0 for name in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_lora_of_experts_opened_by_peft_has_the_logits_and_gradients_of_the_exporting_model(tmp_path, family):
    model = made(family)
    LoRA(r=4, alpha=6, experts="lora")(model)
    made(family).save_pretrained(tmp_path / "base")
    write_adapter(moved(model), tmp_path, None, str(tmp_path / "base"), Weights(model))
    theirs = PeftModel.from_pretrained(made(family), tmp_path, is_trainable=True).train()
    assert (logits(theirs) - logits(model)).abs().max() < FP32_REORDERED * logits(model).abs().max()
    ours, names = gradients(model), _names_in_folder(model)
    expected = {name.replace(".default", ""): gradient for name, gradient in gradients(theirs).items()}
    assert {*expected} == {PREFIX + name for name in names.values()}
    for name, gradient in ours.items():
        right = expected[PREFIX + names[name]]
        assert (gradient - right).abs().max() < 4 * FP32_REORDERED * right.abs().max()
    again = made(family)
    LoRA(path=str(tmp_path))(again)
    load(again, str(tmp_path))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("modules", [["q_proj"], []])
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_of_experts_written_by_peft_has_the_logits_of_peft_when_loaded_and_when_exported_again(
    tmp_path, family, modules
):
    config = LoraConfig(r=4, lora_alpha=6, target_modules=modules, target_parameters=STACKS)
    theirs = moved(get_peft_model(made(family), config))
    theirs.save_pretrained(tmp_path)
    ours = made(family)
    LoRA(path=str(tmp_path))(ours)
    load(ours, str(tmp_path))
    assert (logits(ours) - logits(theirs)).abs().max() < FP32_REORDERED * logits(theirs).abs().max()
    expected, found = gradients(theirs), gradients(ours)
    assert len(found) == len(expected) == 2 * (2 * len(modules) + 4)
    (tmp_path / "again").mkdir()
    write_adapter(ours, tmp_path / "again", None, "base", Weights(ours))
    again = PeftModel.from_pretrained(made(family), tmp_path / "again")
    assert (logits(again) - logits(ours)).abs().max() < FP32_REORDERED * logits(ours).abs().max()


def test_adapter_folder_with_experts_of_some_blocks_exports_the_same_experts_again(tmp_path, caplog):
    one = ["model.layers.1.mlp.experts.down_proj"]
    theirs = moved(get_peft_model(made("qwen3_moe"), LoraConfig(r=4, target_modules=["q_proj"], target_parameters=one)))
    theirs.save_pretrained(tmp_path / "first")
    ours = made("qwen3_moe")
    with caplog.at_level("INFO"):
        LoRA(path=str(tmp_path / "first"))(ours)
    assert "2 of 8 linear layers and 1 stack of experts" in caplog.text and "3 fused expert tensors" in caplog.text
    load(ours, str(tmp_path / "first"))
    (tmp_path / "again").mkdir()
    write_adapter(ours, tmp_path / "again", None, "base", Weights(ours))
    again = made("qwen3_moe")
    LoRA(path=str(tmp_path / "again"))(again)
    load(again, str(tmp_path / "again"))
    assert torch.equal(logits(again), logits(ours))
    opened = PeftModel.from_pretrained(made("qwen3_moe"), tmp_path / "again", is_trainable=True)
    assert len(trainable(opened)) == len(trainable(ours)) == 2 * 2 + 2


@pytest.mark.wrong
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_matrices_exchanged_between_experts_change_the_logits(family):
    model = made(family)
    LoRA(r=4, experts="lora")(model)
    right = logits(moved(model)).detach()
    for part in model.modules():
        if isinstance(part, stacks.StackLoRA):
            part.lora_A.data = part.lora_A.data.flip(0)
    assert (logits(model) - right).abs().max() > 100 * FP32_REORDERED * right.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", [LoRA, QLoRA])
def test_merged_lora_of_experts_has_the_logits_of_the_adapted_model(family, adapter):
    model = made(family).eval()
    adapter(r=4, experts="lora")(model)
    expected = logits(moved(model)).detach()
    merge(model, torch.float32)
    assert not any(isinstance(part, stacks.ComputedExperts | stacks.StackLoRA) for part in model.modules())
    assert {*model.state_dict()} == {*made(family).state_dict()}
    assert (logits(model) - expected).abs().max() < FP32_REORDERED * expected.abs().max()


def test_pickled_model_with_lora_of_experts_has_the_logits_of_the_original_model():
    model = made("qwen3_moe")
    QLoRA(r=4, experts="lora")(model)
    assert torch.equal(logits(pickle.loads(pickle.dumps(moved(model)))), logits(model))


def test_expert_weights_with_lora_are_not_saved_for_backward(monkeypatch):
    """The deliberately wrong variant has no checkpoint around the experts, so autograd saves their weights."""

    def saved(model):
        shapes = set()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.add(t.shape) or t, lambda t: t):
            logits(model)
        return shapes

    model = made("qwen3_moe")
    LoRA(r=4, experts="lora")(model)
    stack = model.model.layers[0].mlp.experts._parameters["gate_up_proj"]
    slices = {stack.shape, stack.mT.shape, stack[0].shape, stack[0].mT.shape}
    assert not saved(model) & slices
    monkeypatch.setattr(stacks, "checkpoint", lambda f, *a, use_reentrant, preserve_rng_state, **k: f(*a, **k))
    assert saved(model) & slices


@pytest.mark.parametrize(
    ("family", "typed", "says"),
    [
        ("llama", {"experts": "lora"}, "LlamaForCausalLM has no fused experts"),
        ("qwen3_moe", {"experts": "lora", "dropout": 0.1}, "Type adapter.dropout=0, or adapter.experts=none"),
    ],
)
def test_lora_of_experts_without_fused_experts_or_with_dropout_is_refused(family, typed, says):
    with pytest.raises(Refused, match=says):
        LoRA(**typed)(network(family, **FAMILIES.get(family, {})))


def test_dora_of_experts_is_refused():
    with pytest.raises(Refused, match="Type adapter=lora"):
        DoRA(experts="lora")


def test_experts_setting_that_contradicts_an_adapter_folder_is_refused(tmp_path):
    model = made("qwen3_moe")
    LoRA(r=4)(model)
    write_adapter(model, tmp_path, None, "base", Weights(model))
    with pytest.raises(Refused, match=r"adapter.experts=lora: .*another value"):
        LoRA(path=str(tmp_path), experts="lora")
