"""Tests that weight files that do not match the configuration are reported or refused before a weight is loaded."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3NextForCausalLM

from lowmem.model import loading, published_files
from lowmem.saving.export import ModelFolder, export
from lowmem.system.errors import Refused
from networks import Nothing, network


def folder(path, **changes):
    """Saves a model with a tokenizer, like a published model, and returns `path`. Args: changes: keys of the config."""
    network("llama", **changes).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), eos_token="a").save_pretrained(path)
    return path


def add(path, **tensors):
    file = path / "model.safetensors"
    save_file(load_file(file) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)


def say(path, **keys):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.fixture
def run(config):
    def made(path, *lines):
        return config("model=hf", f"model.name={path}", "seq_len=16", "lr=1e-3", *lines)

    return made


def loaded(run):
    return loading.load(loading.describe(run), torch.float32)


def told(caplog, run):
    caplog.clear()
    with caplog.at_level(logging.INFO, "lowmem"):
        loading.check_architecture(run)
    return caplog.text


# --- heads that config.json wrongly calls tied or untied --------------------------------------------------------------


@pytest.fixture
def own_head(tmp_path):
    path = folder(tmp_path / "own head", tie_word_embeddings=True)
    add(path, lm_head__weight=torch.randn(500, 32))
    return path


def test_separate_head_in_files_of_a_tied_config_is_trained_and_exported_untied(run, own_head, tmp_path):
    model = loaded(run(own_head))
    stored = load_file(own_head / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    export(model, ModelFolder(tmp_path / "out", Nothing()))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], stored["lm_head.weight"])


def test_separate_head_in_files_of_a_tied_config_is_reported_once_and_counted_by_the_plan(run, own_head, caplog):
    line = "config.json ties the output layer to the embedding, but the files hold two different matrices"
    assert told(caplog, run(own_head)).count(line) == 1
    config = loading.describe(run(own_head), plans=True).config
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(config)
    assert planned.num_parameters() == loaded(run(own_head)).num_parameters()


def test_stored_head_that_equals_the_embedding_stays_tied(run, tmp_path, caplog):
    path = folder(tmp_path / "tied", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    add(path, lm_head__weight=embedding.clone())
    assert "ties the output layer" not in told(caplog, run(path))
    model = loaded(run(path))
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings


def test_untied_config_without_a_stored_head_is_refused_with_advice_to_tie(run, tmp_path):
    path = folder(tmp_path / "shared", tie_word_embeddings=True)
    say(path, tie_word_embeddings=False)
    with pytest.raises(Refused, match=r"lack the weights lm_head\.weight.*\{tie_word_embeddings:true\}\."):
        loaded(run(path))
    model = loaded(run(path, "model.architecture={tie_word_embeddings:true}"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_stored_head_that_differs_from_the_tied_embedding_in_one_element_is_reported(
    run, own_head, monkeypatch, caplog
):
    monkeypatch.setattr(published_files, "ROWS", 64)
    head = load_file(own_head / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    add(own_head, lm_head__weight=head)
    assert "ties the output layer" in told(caplog, run(own_head))


# --- unused weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mtp__fc__weight", "model__vision_tower__layers__7__proj__weight"])
def test_unused_tensors_in_weight_files_are_reported_before_loading(run, tmp_path, caplog, monkeypatch, name):
    path = folder(tmp_path / "more")
    assert not told(caplog, run(path))
    add(path, **{name: torch.zeros(3)})
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("loaded"))
    said = told(caplog, run(path))
    assert (
        f"a tensor in its files is not used ({name.replace('__', '.')}): the model class" in said
        and "model/ will not contain it" in said
    )


def test_weight_tensors_that_the_model_class_silently_ignores_are_reported(run, tmp_path, caplog):
    path = tmp_path / "qwen"
    folder(path)
    assert any("mtp" in pattern for pattern in Qwen3NextForCausalLM._keys_to_ignore_on_load_unexpected)
    keys = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    keys |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1}
    keys |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    keys |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "linear_value_head_dim": 8}
    Qwen3NextForCausalLM(AutoConfig.for_model("qwen3_next", **keys)).save_pretrained(path)
    add(path, mtp__fc__weight=torch.zeros(3), mtp__norm__weight=torch.zeros(3))
    assert "2 tensors in its files are not used (for example mtp.fc.weight)" in told(caplog, run(path))


def test_stored_attention_buffers_of_earlier_gpt2_versions_are_not_reported_as_unused(run, tmp_path, caplog):
    path = folder(tmp_path / "old")
    network("gpt2").save_pretrained(path)
    add(path, transformer__h__0__attn__bias=torch.ones(1, 1, 32, 32))
    assert not told(caplog, run(path))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weight_files_with_more_layers_than_the_config_are_refused(run, tmp_path, kind):
    path = folder(tmp_path / "deeper")
    network(kind).save_pretrained(path)
    name = "transformer__h__4__ln_1__weight" if kind == "gpt2" else "model__layers__4__self_attn__q_proj__weight"
    add(path, **{name: torch.zeros(32, 32)})
    with pytest.raises(Refused, match=r"says 2 layers.*type model\.architecture=\{num_hidden_layers:5\}"):
        loading.describe(run(path))
    with pytest.raises(Refused, match="its files hold"):
        loading.describe(run(path), plans=True)


def test_multi_token_prediction_layers_are_reported_as_unused_and_not_exported(run, tmp_path, caplog):
    path = folder(tmp_path / "predicts")
    say(path, num_nextn_predict_layers=1)
    add(path, model__layers__2__self_attn__q_proj__weight=torch.zeros(32, 32))
    assert "not used (model.layers.2.self_attn.q_proj.weight):" in told(caplog, run(path))
    export(loaded(run(path)), ModelFolder(tmp_path / "out", Nothing()))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    add(path, model__layers__3__self_attn__q_proj__weight=torch.zeros(32, 32))
    with pytest.raises(Refused, match="num_hidden_layers:4"):
        loading.describe(run(path))


@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "gemma2"])
def test_stored_tensors_that_loading_joins_or_renames_are_not_reported_as_unused(run, tmp_path, caplog, kind):
    path = folder(tmp_path / "joined")
    network(kind, **({"num_local_experts": 4} if kind == "mixtral" else {})).save_pretrained(
        path, max_shard_size="20KB"
    )
    (path / "model.safetensors").unlink()
    assert len(published_files.headers(path)) > 10 and not told(caplog, run(path))


def test_comparison_of_weight_files_with_the_config_is_cached_until_the_files_change(run, tmp_path, monkeypatch):
    path = folder(tmp_path / "once")
    loading.describe(run(path))
    with monkeypatch.context() as patch:
        patch.setattr(published_files, "_compare", lambda *_: pytest.fail("again"))
        loading.describe(run(path), plans=True)
    add(path, mtp__fc__weight=torch.zeros(3))
    assert published_files.compare(path, loading.describe(run(path)).config).unused == ["mtp.fc.weight"]


def test_comparison_of_weight_files_is_skipped_if_the_model_class_cannot_be_built(run, tmp_path):
    path = folder(tmp_path / "published")
    say(
        path, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": None}
    )  # the class raises a TypeError
    assert published_files.compare(path, AutoConfig.from_pretrained(path)) is None


def test_comparison_of_weight_files_with_the_config_draws_no_random_numbers(run, tmp_path):
    path = folder(tmp_path / "x")
    before = torch.get_rng_state()
    loading.describe(run(path))
    assert torch.equal(torch.get_rng_state(), before)


# --- quantized files --------------------------------------------------------------------------------------------------

QUANTIZED = {
    "bitsandbytes, 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "gptq, 3 bits": {"quant_method": "gptq", "bits": 3},
    "awq, 4 bits": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("how", QUANTIZED)
@pytest.mark.parametrize("lines", [(), ("precision=32",), ("adapter=qlora",)])
def test_quantized_model_is_refused_from_its_config(run, tmp_path, monkeypatch, how, lines):
    path = folder(tmp_path / "quantized")
    say(path, quantization_config=QUANTIZED[how])
    monkeypatch.setattr(loading, "_check_weights_files", lambda _: pytest.fail("opened a file"))
    said = rf"its weights are quantized \({how}\).*Use the original 16-bit model, with adapter=qlora to save memory\."
    with pytest.raises(Refused, match=said):
        loading.describe(run(path, *lines))
    with pytest.raises(Refused, match=said):
        loading.check_architecture(run(path, *lines))  # called by plan, show, training and evaluation


def test_quantized_files_without_a_quantization_config_are_refused(run, tmp_path):
    path = folder(tmp_path / "fp8")
    add(path, model__layers__0__mlp__up_proj__weight=torch.zeros(64, 32).to(torch.float8_e4m3fn))
    with pytest.raises(Refused, match=r"quantized \(F8_E4M3\)"):
        loading.describe(run(path))


def test_random_start_from_a_quantized_model_drops_its_quantization_config(run, tmp_path):
    path = folder(tmp_path / "quantized")
    say(path, quantization_config=QUANTIZED["fp8"])
    config = loading.describe(run(path, "model.pretrained=false")).config
    assert not hasattr(config, "quantization_config")
