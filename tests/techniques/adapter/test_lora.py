"""Tests LoRA and DoRA: adapted layers, refusals, adapters loaded from a folder, and checkpoints."""

import json
import logging

import pytest
import torch
from benchmarks.architectures import shrunk
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem.config.check import check, check_places, settled
from lowmem.config.typed_lines import composed
from lowmem.model.experts import routers
from lowmem.model.trainable import Packed, trainable
from lowmem.saving.export import Weights
from lowmem.saving.export_adapter import merge, write_adapter
from lowmem.system.errors import Refused
from lowmem.techniques.adapter.freeze import freeze
from lowmem.techniques.adapter.lora import CONFIG, PREFIX, WEIGHTS, DoRA, LoRA, base_dtype, load
from lowmem.techniques.adapter.qlora import QLoRA
from same import last, same
from tolerances import FP32_REORDERED

pytestmark = pytest.mark.kernels
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 97, "n_positions": 32}
KINDS = (LoRA, DoRA)


def network(kind="llama", dtype=torch.float32, **keys):
    torch.manual_seed(0)
    sizes = GPT2 | {"bos_token_id": 0, "eos_token_id": 0} if kind == "gpt2" else SIZES
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | keys), dtype=dtype).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(8)[None]).logits


def folder(at, model, **changes):
    """Writes the model's adapter to a folder as PEFT does, with `changes` to its config, and returns the path."""
    from peft import get_peft_model_state_dict

    at.mkdir()
    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({PREFIX + name: one.contiguous() for name, one in held.items()}, at / WEIGHTS)
    config = model.peft_config["default"].to_dict() | changes
    (at / CONFIG).write_text(json.dumps(config, default=lambda one: sorted(one) if isinstance(one, set) else str(one)))
    return str(at)


def moved(model):
    with torch.no_grad():
        for _, p in trainable(model):
            p.add_(torch.randn_like(p) * 0.1)
    return model


# --- what is adapted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_new_adapter_is_in_fp32_and_leaves_the_logits_unchanged(kind, dtype, adapter):
    model = network(kind, dtype)
    before = logits(model)
    adapter()(model)
    assert torch.equal(logits(model), before)
    assert {p.dtype for _, p in trainable(model)} == {torch.float32}
    assert all("lora_" in name for name, _ in trainable(model))
    assert not any("lm_head" in name or "embed" in name or "wte" in name for name, _ in trainable(model))


def test_dora_magnitudes_measured_in_16_bits_change_the_logits(monkeypatch):
    """The deliberately wrong variant keeps the magnitudes that PEFT measures, in the dtype of the weights."""
    monkeypatch.setattr("lowmem.techniques.adapter.lora._measure", lambda part: None)
    model = network("llama", torch.bfloat16)
    before = logits(model)
    DoRA()(model)
    assert not torch.equal(logits(model), before)


def test_log_says_that_freeze_has_no_effect_on_weights_frozen_by_an_adapter(caplog):
    model = network("gpt2")
    freeze(model, ["transformer.wte.*", "*.wte.weight"])
    assert "has no effect" not in caplog.text
    LoRA()(model)
    freeze(model, ["*.wpe.*", "*.h.0.*"])
    assert "freeze: *.wpe.* has no effect" in caplog.text and "h.0.* has" not in caplog.text


def test_log_counts_adapted_linear_layers_and_names_tensors_without_an_adapter(caplog):
    with caplog.at_level(logging.INFO):
        LoRA(r=4)(network("mixtral"))
        LoRA(target=["c_attn"])(network("gpt2"))
    mixtral, gpt2 = (record.message for record in caplog.records)
    assert "8 of 8 linear layers" in mixtral and "4 fused expert tensors such as" in mixtral
    assert "2 of 8 linear layers have an adapter: " in gpt2 and "the head (tied to them)" in gpt2


@pytest.mark.parametrize("target", ["*.q_proj", "q_proj", "model.layers.0.*", "*.layers.0.self_attn.[qv]_proj"])
def test_adapter_target_pattern_adapts_as_many_layers_as_match_the_pattern(target):
    model = network()
    LoRA(target=[target])(model)
    names = {name.split(".lora_")[0] for name, _ in trainable(model)}
    expected = {"*.q_proj": 2, "q_proj": 2, "model.layers.0.*": 7}.get(target, 2)
    assert len(names) == expected


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (["lm_head"], "lm_head cannot be adapted"),
        (["embed_tokens"], "model.embed_tokens cannot be adapted"),
        (["q_porj"], r"LlamaForCausalLM has no layer of this name. Type some of \[down_proj,gate_proj"),
    ],
)
def test_adapter_target_that_cannot_be_adapted_or_does_not_exist_is_refused(target, says):
    with pytest.raises(Refused, match=says):
        LoRA(target=target)(network())


def test_adapter_target_whose_weight_a_mamba_kernel_reads_is_refused():
    mamba = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1))
    with pytest.raises(
        Refused, match=r"adapter.target=out_proj: .*out_proj cannot be adapted .*Type some of \[in_proj"
    ):
        LoRA(target=["out_proj"])(mamba)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("adapter.r=0", "whole number of at least 1, or null"),
        ("adapter.alpha=-1", "a positive number, or null"),
        ("adapter.dropout=1", "below 1"),
        ("adapter.target=q_proj", "all-linear, or a list of names"),
    ],
)
def test_invalid_adapter_setting_is_refused(config, line, says):
    with pytest.raises(Refused, match=says):
        settled(composed(["adapter=lora", line]))
    check(config("adapter=lora", "adapter.target=[q_proj]", "adapter.r=null"), {})


DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
JETMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16, "head_dim": 16}


def layers(model):
    return {name.split(".lora_")[0].removeprefix("base_model.model.") for name, _ in trainable(model)}


@pytest.mark.parametrize("target", [None, ["gate_proj"], ["*.mlp.*"]])
def test_dense_layers_beside_fused_experts_are_adapted_and_peft_opens_the_export_with_equal_logits(tmp_path, target):
    model = network("deepseek_v3", **DEEPSEEK)
    LoRA(r=4, target=target)(model)
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.gate_proj"} <= layers(model)
    assert not any(name.endswith((".experts", ".mlp.gate")) for name in layers(model))
    base_model = tmp_path / "base"
    network("deepseek_v3", **DEEPSEEK).save_pretrained(base_model)
    write_adapter(moved(model), tmp_path, None, str(base_model), Weights(model))
    opened = PeftModel.from_pretrained(network("deepseek_v3", **DEEPSEEK), tmp_path, is_trainable=True).eval()
    assert layers(opened) == layers(model)
    assert (logits(opened) - logits(model)).abs().max() < FP32_REORDERED * logits(model).abs().max()
    again = network("deepseek_v3", **DEEPSEEK)
    LoRA(path=str(tmp_path))(again)
    load(again, str(tmp_path))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.wrong
def test_peft_given_names_of_dense_layers_adapts_the_fused_experts_instead():
    """PEFT 0.21 mistakes the names of dense layers for old names of fused experts. If this test fails, PEFT has
    changed."""
    from peft import inject_adapter_in_model

    model = network("deepseek_v3", **DEEPSEEK)
    config = LoraConfig(r=4, target_modules=["q_a_proj", "gate_proj", "up_proj", "down_proj"])
    with pytest.warns(RuntimeWarning, match="gate_up_proj"):
        inject_adapter_in_model(config, model)
    assert "model.layers.0.mlp.gate_proj" not in layers(model) and "model.layers.1.mlp.experts" in layers(model)


def test_dora_of_layers_that_peft_renames_is_refused():
    with pytest.raises(Refused, match=r"PEFT cannot open DoRA adapters of model.layers.0.mlp.gate_proj .*q_a_proj"):
        DoRA(r=4)(network("deepseek_v3", **DEEPSEEK))
    DoRA(r=4, target=["o_proj"])(network("deepseek_v3", **DEEPSEEK))


@pytest.mark.parametrize(
    ("kind", "keys", "router"),
    [
        ("jetmoe", JETMOE, "mlp.router.layer"),
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 16}, "feed_forward.router"),
    ],
)
def test_qlora_neither_adapts_nor_quantizes_routers(kind, keys, router):
    model = network(kind, **keys)
    assert any(name.endswith(router) for name in routers(model))
    QLoRA(r=4)(model)
    assert layers(model) and not any("router" in name for name in layers(model))
    assert type(model.get_submodule(f"model.layers.0.{router}")).__mro__[-3:] == nn.Linear.__mro__[-3:]
    assert not any("router" in name for name, part in model.named_modules() if isinstance(part, Packed))


@pytest.mark.parametrize("kind", ["mamba2", "jamba"])
def test_layers_that_a_mamba_kernel_reads_get_no_adapter(kind):
    sizes = {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8} if kind == "mamba2" else {}
    model = network(kind, **sizes | ({"num_experts": 1} if kind == "jamba" else {}))
    LoRA()(model)
    ends = {name.rpartition(".")[2] for name in layers(model)}
    assert "in_proj" in ends and not ends & {"x_proj", "dt_proj", "out_proj"}


def test_merging_adapters_of_layers_that_share_a_weight_is_refused():
    keys = shrunk("zamba2")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
    LoRA(r=4)(model)
    with pytest.raises(Refused, match=r"shares its weight with another layer of Zamba2ForCausalLM.* merge=false"):
        merge(model, torch.float32)


# --- adapters from a folder -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", KINDS)
def test_adapter_loaded_from_a_peft_folder_has_the_logits_of_the_saved_adapter(tmp_path, adapter):
    theirs = network()
    adapter(r=4, alpha=2, target=["q_proj", "up_proj"])(theirs)
    path, ours = folder(tmp_path / "a", moved(theirs)), network()
    adapter(path=path)(ours)
    assert not torch.equal(logits(ours), logits(theirs))
    load(ours, path)
    assert torch.equal(logits(ours), logits(theirs))
    assert ours.peft_config["default"].r == 4


def test_adapter_folder_that_is_incomplete_or_contradicts_settings_or_model_is_refused(tmp_path, config):
    theirs = network()
    LoRA(r=4)(theirs)
    path = folder(tmp_path / "a", theirs)
    with pytest.raises(Refused, match=r"adapter.r=8: adapter_config.json in .* has another value. Remove adapter.r\."):
        LoRA(r=8, path=path)
    with pytest.raises(Refused, match=r"this is a LoRA adapter. Type adapter=lora"):
        DoRA(path=path)
    with pytest.raises(Refused, match=r"adapter.target=\['q_proj'\]: adapter_config.json in .* has another value"):
        LoRA(target=["q_proj"], path=path)(network())
    with pytest.raises(Refused, match=r"has modules_to_save, which is not supported"):
        LoRA(path=folder(tmp_path / "b", theirs, modules_to_save=["lm_head"]))
    with pytest.raises(Refused, match=r"must contain adapter_config.json and"):
        LoRA(path=str(tmp_path))
    with pytest.raises(Refused, match=r"must contain adapter_config.json and"):
        base_dtype(str(tmp_path))  # a run reads this dtype before it creates the adapter
    with pytest.raises(Refused, match=r"there is no such folder"):
        check_places(config("adapter=lora", f"adapter.path={tmp_path / 'none'}"))
    wider = network(hidden_size=64)
    LoRA(path=path)(wider)
    with pytest.raises(Refused, match=r"do not match the layers of this model"):
        load(wider, path)
    held = load_file(tmp_path / "a" / WEIGHTS)
    save_file(dict(list(held.items())[1:]), tmp_path / "a" / WEIGHTS)
    with pytest.raises(Refused, match=r"do not match the layers"):
        load(theirs, path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"init_lora_weights": "pissa"}, "has init_lora_weights=pissa, which is not supported"),
        ({"init_lora_weights": "olora"}, "has init_lora_weights=olora"),
        ({"alora_invocation_tokens": [5, 6]}, "has alora_invocation_tokens"),
        ({"lora_bias": True}, "has lora_bias"),
        ({"bias": "all"}, "has bias"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "is not a stack of experts of LlamaForCausalLM"),
        ({"target_modules": None}, "names no layer of LlamaForCausalLM"),
        ({"target_modules": ["zzz"]}, "names no layer of LlamaForCausalLM"),
    ],
)
def test_adapter_folder_with_unsupported_options_or_unknown_targets_is_refused(tmp_path, changes, says):
    theirs = network()
    LoRA(r=4)(theirs)
    path = folder(tmp_path / "a", theirs, **changes)
    with pytest.raises(Refused, match=says):
        LoRA(path=path)(network())


@pytest.mark.parametrize(
    "config", [IA3Config(feedforward_modules=[]), AdaLoraConfig(total_step=10)], ids=["ia3", "adalora"]
)
def test_peft_folder_of_an_adapter_other_than_lora_is_refused(tmp_path, config):
    theirs = network()
    LoRA(r=4)(theirs)
    path = folder(tmp_path / "a", theirs)
    config.target_modules = {"q_proj"}
    config.save_pretrained(path)
    with pytest.raises(Refused, match=f"is of type .*{config.peft_type.value}"):
        LoRA(path=path)(network())


@pytest.mark.parametrize("init", [False, "gaussian", "orthogonal"])
def test_adapter_folder_with_a_supported_init_lora_weights_loads_with_the_logits_of_the_saved_adapter(tmp_path, init):
    theirs = network()
    LoRA(r=4)(theirs)
    path, ours = folder(tmp_path / "a", moved(theirs), init_lora_weights=init), network()
    LoRA(path=path)(ours)
    load(ours, path)
    assert torch.equal(logits(ours), logits(theirs))


def test_empty_list_of_adapter_targets_is_refused():
    with pytest.raises(Refused, match=r"adapter.target=\[\]: this names no layer"):
        LoRA(target=[])(network())


def test_qlora_on_the_meta_device_adapts_the_layers_that_it_adapts_on_the_cpu():
    adapted = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = network("qwen3_moe", num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)
            QLoRA(r=4)(model)
        adapted.append(layers(model))
    assert adapted[0] == adapted[1] and len(adapted[0]) == 8


# --- runs -------------------------------------------------------------------------------------------------------------


def written_adapter(path):
    """Writes an adapter folder with nonzero updates for the small GPT-2, and returns its path."""
    theirs = network("gpt2", vocab_size=300, n_positions=256)
    LoRA(r=4)(theirs)
    return folder(path, moved(theirs))


def test_run_resumed_after_its_adapter_folder_has_changed_has_the_bits_of_an_unbroken_run(fit, tmp_path):
    """The base is in 16 bits, the adapter in fp32, and dropout is on."""
    path = written_adapter(tmp_path / "start")
    lines = ("adapter=lora", f"adapter.path={path}", "adapter.dropout=0.1", "precision=bf16-true", "max_steps=3")
    summary, whole = fit(*lines, folder="whole")
    fit(*lines, "max_steps=1", "scheduler.total_steps=3", folder="part")
    (tmp_path / "start" / WEIGHTS).write_bytes((tmp_path / "start" / WEIGHTS).read_bytes()[:-4] + b"\x00\x01\x02\x03")
    _, again = fit(*lines, f"resume={tmp_path / 'part'}", folder="again")
    one, other = last(whole), last(again)
    assert all(same(one[key], other[key]) for key in one)
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in one["state_dict"].items())
    assert summary["trained_parameters"] == sum(p.numel() for p in one["state_dict"].values())


@pytest.mark.parametrize(
    "precision",
    [("bf16-master",), ("bf16-true",), ("bf16-sr", "weights=streamed", "gradient_checkpointing=every_layer")],
    ids=lambda typed: typed[0],
)
def test_lora_with_frozen_matrices_trains_in_16_bits_and_its_export_is_merged(fit, precision):
    summary, run = fit(
        "adapter=lora", "freeze=['*lora_A*']", f"precision={precision[0]}", *precision[1:], "max_steps=1"
    )
    merged = load_file(run / "model" / "model.safetensors")
    assert summary["steps"] == 1 and not any("lora" in name for name in merged)


def test_resumed_run_with_frozen_matrices_of_an_adapter_folder_has_the_bits_of_an_unbroken_run(fit, tmp_path):
    path = written_adapter(tmp_path / "start")
    lines = ("adapter=lora", f"adapter.path={path}", "freeze=['*lora_A*']", "model.pretrained=false", "max_steps=2")
    _, whole = fit(*lines, folder="whole")
    fit(*lines, "max_steps=1", "scheduler.total_steps=2", folder="part")
    _, again = fit(*lines, f"resume={tmp_path / 'part'}", folder="again")
    one, other = last(whole), last(again)
    assert all(same(one[key], other[key]) for key in one)


@pytest.mark.parametrize("precision", ["precision=bf16-master", pytest.param("precision=32", marks=pytest.mark.matrix)])
def test_evaluated_dora_checkpoint_has_the_val_loss_of_its_run_and_is_refused_without_adapter_dora(fit, precision):
    summary, run = fit("adapter=dora", precision, "lr=1e-2", folder="run")
    found, _ = fit("adapter=dora", precision, f"evaluate={run}", folder="evaluated")
    assert found["val_loss"] == summary["val_loss"]
    with pytest.raises(Refused, match=r"adapter= and freeze="):
        fit(precision, f"evaluate={run}", folder="without")
