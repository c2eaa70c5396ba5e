"""Tests that peft and transformers open exported adapters and compute the logits of the trained model."""

import json
import logging

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from lowmem.saving import export_adapter
from lowmem.saving.export import ModelFolder, Weights
from lowmem.techniques.adapter import nf4
from lowmem.techniques.adapter.freeze import freeze
from lowmem.techniques.adapter.lora import load, parameters_of
from lowmem.techniques.adapter.nf4 import NF4Linear
from lowmem.techniques.strategy.contract import OneDevice

IDS = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
SAME = 1e-5  # relative error of fp32 logits whose sums have another order
ROUNDED = 0.01  # relative error with merged matrices rounded to bf16; measured: 0.004 to 0.007
OTHER = 0.05  # a different model has a larger relative error (the base without its adapter: 0.1)
FAMILIES = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32},
}


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")))


def drawn(family):
    torch.manual_seed(0)
    keys = FAMILIES[family] | {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **keys)).eval()


def adapted(family="llama", quantized=False, target="all-linear", dora=False):
    """Returns a model with an adapter whose update is not zero, as after training."""
    made = drawn(family)
    if quantized:
        nf4.quantize(made)
    conv = family == "gpt2" and not quantized
    how = LoraConfig(r=4, lora_alpha=8, target_modules=target, use_dora=dora, fan_in_fan_out=conv)
    inject_adapter_in_model(how, made)
    torch.manual_seed(3)
    for name, p in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    return made.eval()


@torch.no_grad()
def logits(network, dtype=torch.float32):
    return network.to(dtype)(input_ids=IDS, use_cache=False).logits.float()


def off(network, wanted, dtype=torch.float32):
    """Returns the relative error of the network's logits, compared with `wanted`."""
    return ((logits(network, dtype) - wanted).norm() / wanted.norm()).item()


def exported(network, tokenizer, folder, dtype=None, merged=False, base="somebody/base"):
    export_adapter.export(network, ModelFolder(folder, tokenizer, dtype), merged, base)
    return folder


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_adapter_opened_by_peft_computes_the_logits_of_the_trained_model(tokenizer, tmp_path, family, dora):
    trained = adapted(family, dora=dora)
    wanted = logits(trained)
    folder = exported(trained, tokenizer, tmp_path / "model")
    assert off(drawn(family), wanted) > OTHER  # the base alone differs, so the test would notice a missing adapter
    assert off(PeftModel.from_pretrained(drawn(family), folder), wanted) < SAME
    said = json.loads((folder / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "somebody/base" and said["task_type"] == "CAUSAL_LM"
    assert (folder / "tokenizer.json").is_file() and not (folder / "config.json").exists()


@pytest.mark.parametrize("dora", [False, True])
def test_adapter_with_frozen_matrices_is_exported_and_loaded_completely(tokenizer, tmp_path, dora):
    trained, other = adapted(dora=dora), adapted(dora=dora)
    freeze(trained, ["*.lora_A.*"])
    wanted = logits(trained)
    folder = exported(trained, tokenizer, tmp_path / "model")
    assert off(PeftModel.from_pretrained(drawn("llama"), folder), wanted) < SAME
    freeze(other, ["*.lora_A.*"])
    for _, p in parameters_of(other):
        p.data.zero_()
    load(other, folder)
    assert off(other, wanted) == 0


def test_two_exports_of_equal_adapters_are_byte_identical(tokenizer, tmp_path):
    names = {"q_proj", "v_proj", "k_proj", "o_proj", "up_proj", "down_proj", "gate_proj"}
    one, other = (exported(adapted(target=names), tokenizer, tmp_path / name) for name in "ab")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes()
    assert json.loads((one / "adapter_config.json").read_text())["target_modules"] == sorted(names)


def test_model_with_contradictory_generation_settings_is_exported_with_them(tokenizer, tmp_path):
    """Some published models have a temperature, but do_sample=false."""
    model = drawn("llama")
    model.generation_config.temperature = 0.6
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path)
    export_adapter.export(model, ModelFolder(tmp_path / "model", tokenizer), True, None)
    assert GenerationConfig.from_pretrained(tmp_path / "model").temperature == 0.6


def test_exported_adapter_folder_names_the_tokens_that_end_an_answer(tokenizer, tmp_path):
    network = adapted()
    network.generation_config.eos_token_id = [1, 3]
    network.generation_config.temperature = 0.6  # contradicts do_sample=false, as in some published models
    folder = exported(network, tokenizer, tmp_path / "model")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 3]


def test_exported_adapter_has_the_requested_dtype(tokenizer, tmp_path):
    folder = exported(adapted(), tokenizer, tmp_path / "model", "bfloat16")
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantized", [False, True])
def test_merged_model_opened_by_transformers_computes_the_logits_of_the_trained_model(
    tokenizer, tmp_path, quantized, family, dora
):
    trained = adapted(family, quantized, dora=dora)
    wanted = logits(trained)
    folder = exported(trained, tokenizer, tmp_path / "model", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert merged.state_dict().keys() == drawn(family).state_dict().keys()
    assert off(merged, wanted) < SAME
    assert SAME < off(merged, wanted, torch.bfloat16) < ROUNDED


class Divided(OneDevice):
    """A sharded strategy of a single process, which has all shards."""

    divides = True


@pytest.mark.rows("True-*")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("quantized", "target"), [(False, "all-linear"), (True, "all-linear"), (True, r".*mlp\.(\w+_proj|c_fc)")]
)
def test_merged_export_of_a_sharded_model_equals_that_of_an_unsharded_model(
    tokenizer, tmp_path, quantized, target, family, dora
):
    """The sharded model is merged layer by layer. Its 4-bit layers without an adapter must be exported, too."""
    whole, divided = (adapted(family, quantized, target, dora) for _ in range(2))
    folder = exported(whole, tokenizer, tmp_path / "whole", merged=True)
    weights = Weights(divided, ranks=Divided())
    export_adapter.export(divided, ModelFolder(tmp_path / "divided", tokenizer), True, None, weights)
    one, other = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "divided"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_merged_export_has_the_requested_dtype_and_the_logits_of_the_trained_model_within_1_percent(
    tokenizer, tmp_path
):
    trained = adapted(quantized=True)
    wanted = logits(trained)
    folder = exported(trained, tokenizer, tmp_path / "model", "bfloat16", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert off(merged, wanted) < ROUNDED


def test_merged_export_includes_4_bit_layers_without_an_adapter(tokenizer, tmp_path):
    trained = adapted(quantized=True, target=["q_proj"])
    wanted = logits(trained)
    folder = exported(trained, tokenizer, tmp_path / "model", merged=True)
    assert off(AutoModelForCausalLM.from_pretrained(folder).eval(), wanted) < SAME


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", ["into the original base", "without its scaling"])
def test_wrongly_merged_adapter_computes_clearly_different_logits(tokenizer, tmp_path, monkeypatch, wrong):
    trained, original = adapted(quantized=True), drawn("llama")
    wanted = logits(trained)
    if wrong == "into the original base":
        base = {part: original.get_submodule(name.removesuffix(".base_layer")) for name, part in of_4_bits(trained)}
        monkeypatch.setattr(NF4Linear, "linear", lambda self, dtype: base[self])
    else:
        for part in trained.modules():
            if hasattr(part, "scaling") and isinstance(part.scaling, dict):
                monkeypatch.setitem(part.scaling, "default", 1.0)
    folder = exported(trained, tokenizer, tmp_path / "model", merged=True)
    assert off(AutoModelForCausalLM.from_pretrained(folder).eval(), wanted) > OTHER


def of_4_bits(network):
    return [(name, part) for name, part in network.named_modules() if isinstance(part, NF4Linear)]


def test_adapter_on_a_randomly_initialized_base_is_always_exported_merged(tokenizer, tmp_path, caplog):
    trained = adapted()
    wanted = logits(trained)
    with caplog.at_level(logging.INFO, logger="lowmem"):
        folder = exported(trained, tokenizer, tmp_path / "model", merged=False, base=None)
    assert "initialized at random" in caplog.text
    assert off(AutoModelForCausalLM.from_pretrained(folder).eval(), wanted) < SAME


@pytest.mark.parametrize("merged", [False, True])
def test_adapter_export_of_a_model_without_an_adapter_writes_the_model(tokenizer, tmp_path, caplog, merged):
    with caplog.at_level(logging.INFO, logger="lowmem"):
        folder = exported(drawn("llama"), tokenizer, tmp_path / "model", merged=merged)
    assert ("no adapter to merge" in caplog.text) == merged
    assert off(AutoModelForCausalLM.from_pretrained(folder).eval(), logits(drawn("llama"))) < SAME
