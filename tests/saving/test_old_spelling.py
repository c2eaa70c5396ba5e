"""Tests that exported configurations and tokenizers mean the same in transformers 4 and in transformers 5. These tests
check the written files; test_transformers_4.py opens them with transformers 4."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from lowmem.saving.export import ModelFolder, export
from lowmem.saving.export_adapter import export as export_adapter
from lowmem.saving.old_spelling import old_config, rewrite_config
from networks import Nothing, network

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
GEMMA = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}}
GEMMA |= {"sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}
OLD = {  # model type -> (keys of transformers 5, keys that transformers 4 reads)
    "llama": ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "qwen2": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
    "qwen3": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
    "gemma3_text": (
        {"rope_parameters": GEMMA, "layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
        {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "mistral": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 1e6}),
    "phi3": (
        {
            "rope_parameters": LONG | {"rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 0.5},
            "hidden_size": 16,
            "num_attention_heads": 2,
            "original_max_position_embeddings": 16,
        },
        {"rope_theta": 2e4, "partial_rotary_factor": 0.5, "rope_scaling": LONG},
    ),
    "gpt2": ({"n_positions": 99}, {"n_ctx": 99}),
    "gpt_neox": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}},
        {"rotary_emb_base": 5e3, "rotary_pct": 0.5},
    ),
    "qwen3_moe": ({"num_experts": 4}, {"num_experts": 4, "rope_theta": 1e4}),
}


def written(config):
    """Returns the content of config.json for a configuration."""
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("model_type", OLD)
def test_exported_config_has_the_keys_of_transformers_4(model_type):
    keys, older = OLD[model_type]
    said = old_config(written(AutoConfig.for_model(model_type, dtype="bfloat16", **keys)))
    assert said["torch_dtype"] == said["dtype"] == "bfloat16"
    scaling = older.get("rope_scaling")
    assert {key: said[key] for key in older} | {"rope_scaling": scaling} == older | {"rope_scaling": scaling}
    if scaling is None:
        assert said.get("rope_scaling") is None
    else:
        assert said["rope_scaling"] | scaling == said["rope_scaling"] and "rope_theta" not in said["rope_scaling"]
    if model_type == "phi3":
        assert said["rope_scaling"] == LONG | {"type": "longrope"}  # transformers 4 accepts exactly three keys


def test_exported_nested_text_config_has_the_keys_of_transformers_4():
    said = old_config(written(AutoConfig.for_model("gemma3")))
    assert said["text_config"]["rope_local_base_freq"] == 10_000.0 and "rope_theta" not in said


def without_old_names(value):
    """Returns the value of a configuration key after removing `type`, the earlier name of `rope_type`, from the value's
    dicts at every level of nesting."""
    if not isinstance(value, dict):
        return value
    return {key: without_old_names(inner) for key, inner in value.items() if key != "type"}


def same_in_5(config, folder):
    """Asserts that transformers 5 reads the same configuration before and after config.json is rewritten for
    transformers 4, except for the number of multi-token prediction layers."""
    config.save_pretrained(folder)
    its_own = written(type(config).from_pretrained(folder))
    rewrite_config(folder, None)
    again = written(type(config).from_pretrained(folder))
    changed = {key for key in its_own if without_old_names(again.get(key)) != without_old_names(its_own[key])}
    assert changed <= {"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"}, config.model_type


@pytest.mark.parametrize("model_type", OLD)
def test_transformers_5_reads_exported_configs_unchanged(tmp_path, model_type):
    same_in_5(AutoConfig.for_model(model_type, **OLD[model_type][0]), tmp_path)


@pytest.mark.matrix
def test_transformers_5_reads_exported_configs_of_every_causal_model_unchanged(tmp_path):
    found = 0
    for model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # the configuration has no default values, or needs another package
            continue
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            same_in_5(config, tmp_path)
            found += 1
    assert found > 100


def test_exported_config_keeps_infinity_as_a_number(tmp_path):
    AutoConfig.for_model("mamba2", time_step_limit=(0.0, float("inf"))).save_pretrained(tmp_path)
    rewrite_config(tmp_path, None)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"] == [0.0, float("inf")]


def test_exported_config_sets_multi_token_prediction_layers_to_0():
    said = old_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "text_config": {"model_type": "x"}})
    assert said["num_nextn_predict_layers"] == 0


# --- tied embeddings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_exported_config_has_tied_embeddings_only_if_the_weights_are_tied(tmp_path, says, shares):
    model = network("llama", tie_word_embeddings=says)
    embedding = model.get_input_embeddings().weight
    model.lm_head.weight = embedding if shares else nn.Parameter(2 * embedding.detach())
    export(model, ModelFolder(tmp_path / "out", Nothing()))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is shares
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    assert (opened.lm_head.weight is opened.get_input_embeddings().weight) == shares


# --- tokenizers -----------------------------------------------------------------------------------------------------

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def words(bos=False, **more):
    ids = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "<turn>", "a", "b", "Ġ"])}
    made = Tokenizer(models.BPE(ids, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=["<turn>"], **NAMES, **more)


def came_as(folder, name, **how):
    """Saves a tokenizer with the class name `name`, and returns the tokenizer that AutoTokenizer loads from this
    folder."""
    words(**how).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
    return AutoTokenizer.from_pretrained(folder)


def exported(tokenizer, folder):
    export(network("llama"), ModelFolder(folder, tokenizer))
    return json.loads((folder / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("came", "goes"),
    [
        (None, "PreTrainedTokenizerFast"),  # not loaded from a folder
        ("TokenizersBackend", "PreTrainedTokenizerFast"),
        ("PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("Qwen2TokenizerFast", "Qwen2TokenizerFast"),
        ("Qwen2Tokenizer", "Qwen2Tokenizer"),
    ],
)
def test_exported_tokenizer_names_a_class_that_transformers_4_has(tmp_path, came, goes):
    tokenizer = words() if came is None else came_as(tmp_path / "in", came)
    said = exported(tokenizer, tmp_path / "out")
    assert said["tokenizer_class"] == goes
    # transformers 4 raises an AttributeError for a list in extra_special_tokens
    assert said["additional_special_tokens"] == ["<turn>"] and "extra_special_tokens" not in said
    assert not {"is_local", "local_files_only"} & said.keys()
    opened = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert opened.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert opened.all_special_tokens == tokenizer.all_special_tokens


@pytest.mark.parametrize("bos", [True, False])
def test_exported_tokenizer_config_states_whether_texts_begin_with_bos(tmp_path, bos):
    """In transformers 4, the classes of Llama and Gemma add a BOS token unless the configuration forbids it."""
    said = exported(came_as(tmp_path / "in", "GemmaTokenizerFast", bos=bos), tmp_path / "out")
    assert (said["add_bos_token"], said["add_eos_token"]) == (bos, False)


def test_tokenizer_class_that_would_encode_differently_is_replaced_in_the_export(tmp_path):
    """In transformers 5, the class of GPT-NeoX ignores the BOS token that tokenizer.json adds."""
    tokenizer = came_as(tmp_path / "in", "GPTNeoXTokenizerFast")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    said = exported(tokenizer, tmp_path / "out")
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids == tokenizer("a").input_ids == [1, 4]


def test_tokenizer_whose_source_folder_is_gone_is_exported_with_the_generic_class(tmp_path):
    tokenizer = came_as(tmp_path / "in", "Qwen2Tokenizer")
    shutil.rmtree(tmp_path / "in")
    assert exported(tokenizer, tmp_path / "out")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_exported_adapter_folder_has_a_tokenizer_config_for_transformers_4(tmp_path):
    model = network("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model)
    export_adapter(model, ModelFolder(tmp_path / "out", words()), False, "somebody/base")
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast" and said["additional_special_tokens"] == ["<turn>"]
