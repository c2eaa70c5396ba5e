"""Tests GGUF files: transformers reads the exported weights from them, and llama.cpp computes the logits of
transformers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, PreTrainedTokenizerFast

from lowmem.saving import gguf, llama_cpp
from lowmem.saving.export import ModelFolder, export
from lowmem.system.errors import Refused
from real_model import folder_or_skip

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": {"model_type": "llama", **LLAMA, "tie_word_embeddings": True},
    "llama, own head": {"model_type": "llama", **LLAMA, "tie_word_embeddings": False},
    "llama3's rope": {
        "model_type": "llama",
        **LLAMA,
        "max_position_embeddings": 512,
        "rope_parameters": ROPE | {"original_max_position_embeddings": 32},
    },
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 32},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


SPLITS = {
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "llama-bpe": split(gguf._WORDS % r"\p{N}{1,3}"),
    "qwen2": split(gguf._WORDS % r"\p{N}"),
}


def tokenizer(kind="gpt-2"):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = SPLITS[kind], decoders.ByteLevel()
    names = ["<s>", "</s>", "<turn>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([llama_cpp.TEXT, "the cat sat on the mat in 1984 for 12345 days"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def written(folder, changes, kind="gpt-2", dtype=torch.float32):
    """Exports a random network whose embedding has more rows than the tokenizer has tokens. Returns the network."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"vocab_size": 480} | changes)).eval()
    with torch.no_grad():
        for p in network.parameters():  # large weights, so that positions and heads change the logits
            p.copy_(4 * p if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    export(network.to(dtype), ModelFolder(folder, tokenizer(kind)))
    return network


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in MODELS if name != "llama3's rope"]
)  # transformers ignores this rope in a GGUF file
def test_transformers_reads_the_exported_weights_from_the_gguf_file(tmp_path, alone, name, dtype):
    heads = (
        {"head_dim": 128} if name == "qwen3" else {}
    )  # transformers does not read the head size of a qwen3 GGUF file
    network = written(tmp_path / "model", MODELS[name] | heads, dtype=dtype)
    file = gguf.write(tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    theirs = dict(read.named_parameters())
    for key, weight in network.named_parameters():
        assert torch.equal(theirs[key], weight.float()), key


def test_unpermuted_attention_rows_in_a_gguf_file_give_different_weights_in_transformers(tmp_path, alone, monkeypatch):
    """Wrong on purpose: query and key rows of the GGUF file keep the order of transformers."""
    monkeypatch.setattr(gguf, "_in_pairs", lambda tensor, heads: tensor)
    network = written(tmp_path / "model", MODELS["llama"])
    file = gguf.write(tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(read.get_parameter(name), network.get_parameter(name))


def test_gguf_file_without_llama_cpp_is_named_unverified_and_an_older_model_gguf_is_removed(tmp_path, alone, caplog):
    written(tmp_path / "model", MODELS["llama"])
    (tmp_path / "model" / gguf.NAME).touch()
    with caplog.at_level("INFO"):
        file = gguf.write(tmp_path / "model")
    assert file.name == "model.unverified.gguf" and "pip install xllamacpp" in caplog.text
    assert [one.name for one in file.parent.glob("*gguf*")] == [file.name]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "opt"}, "no GGUF of opt models; llama, qwen2, qwen3, gpt2 are supported"),
        (MODELS["llama"] | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "=yarn"),
        (MODELS["qwen2"] | {"rope_parameters": ROPE | {"original_max_position_embeddings": 32}}, "rope_type=llama3"),
        (MODELS["qwen3"] | {"attention_bias": True}, "attention_bias=True"),
        (MODELS["llama"] | {"hidden_act": "gelu"}, "with hidden_act=gelu"),
        (MODELS["gpt2"] | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (MODELS["qwen2"] | {"use_sliding_window": True, "max_window_layers": 1}, "sliding windows"),
    ],
)
def test_model_without_gguf_support_is_refused_and_convert_hf_to_gguf_is_named(changes, says):
    with pytest.raises(Refused, match=says) as refusal:
        gguf.check(AutoConfig.for_model(**changes), tokenizer())
    assert "convert_hf_to_gguf.py" in str(refusal.value)


def test_tokenizer_without_gguf_support_is_refused_and_supported_ones_are_recognized():
    made, none = tokenizer(), tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    none.backend_tokenizer.pre_tokenizer = None
    for wrong in (made, none, ByT5Tokenizer()):
        with pytest.raises(Refused, match="no GGUF with this tokenizer"):
            gguf.check(AutoConfig.for_model(**MODELS["llama"]), wrong)
    for kind in SPLITS:
        assert gguf._pre(json.loads(tokenizer(kind).backend_tokenizer.to_str())) == kind


def test_gguf_export_of_an_adapter_without_merge_is_refused(command):
    code, said = command("adapter=lora", "export_format=gguf", "model.pretrained=true", "model.name=x")
    assert (
        code == 1 and "export_format=gguf: an adapter alone is not a model for llama.cpp. Also type merge=true" in said
    )


@pytest.mark.matrix
def test_run_and_its_export_write_gguf_files_whose_last_1000_bytes_are_equal(fit, alone):
    _, run = fit("max_steps=1", "export_format=gguf")
    file = run / "model" / gguf.UNVERIFIED
    before = file.read_bytes()
    file.unlink()
    fit(f"export={run}", "export_format=gguf", folder="other")
    assert (run.parent / "other" / "model" / gguf.UNVERIFIED).read_bytes()[-1000:] == before[-1000:]


def test_gguf_file_names_the_end_of_turn_token_and_the_end_of_text_token(tmp_path, alone):
    """Generation also ends at token 0, which does not end a turn of the chat template."""
    network = written(tmp_path / "model", MODELS["llama"])
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}<turn>{% endfor %}"
    )
    network.generation_config.eos_token_id = [0, 1, 2]
    network.generation_config.save_pretrained(tmp_path / "model")
    fields = GGUFReader(gguf.write(tmp_path / "model")).fields
    assert [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot")] == [1, 2]


@pytest.mark.matrix
def test_run_whose_gguf_file_is_wrong_is_complete_and_suggests_a_huggingface_export(command, tmp_path, monkeypatch):
    def write(folder):
        raise Refused("llama.cpp cannot compute with the file (x).")

    monkeypatch.setattr(gguf, "write", write)
    code, said = command("max_steps=1", "export_format=gguf")
    assert code == 1 and "The run is complete, and model/ has everything but a GGUF file" in said
    assert f"type export={tmp_path}/run export_format=huggingface." in said
    assert (tmp_path / "run" / "summary.json").exists() and not (tmp_path / "run" / "failed.txt").exists()


# --- llama.cpp -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Installs llama.cpp, which is not a dependency, or skips the test."""
    if llama_cpp.is_installed():
        yield
        return
    place = tmp_path_factory.mktemp("llama")
    how = ["-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0", "--timeout", "15", "--target", place]
    done = subprocess.run(
        [sys.executable, *how, "xllamacpp==2026.10.11549"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip("there is no network, or no xllamacpp for this machine: pip install xllamacpp")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        patch.setenv("PYTHONPATH", str(place))
        yield


@pytest.mark.process
@pytest.mark.matrix
@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_logits_of_transformers_from_the_gguf_file(tmp_path, llama, name, kind):
    written(tmp_path / "model", MODELS[name], kind)
    assert gguf.write(tmp_path / "model").name == gguf.NAME


@pytest.mark.process
@pytest.mark.matrix
@pytest.mark.wrong
@pytest.mark.parametrize("wrong", ["rows", "rope", "tokens", "letters"])
def test_llama_cpp_check_finds_a_wrong_gguf_file(tmp_path, llama, monkeypatch, wrong):
    if wrong == "rows":
        monkeypatch.setattr(gguf, "_in_pairs", lambda tensor, heads: tensor)
    if wrong == "rope":
        monkeypatch.setattr(gguf, "_rope", lambda config: "default")
    if wrong == "tokens":
        monkeypatch.setattr(gguf, "_pre", lambda _: "gpt-2")
    if wrong == "letters":
        add = GGUFWriter.add_token_list
        monkeypatch.setattr(
            GGUFWriter, "add_token_list", lambda self, all: add(self, [*all[:3], *reversed(all[3:400]), *all[400:]])
        )
    written(tmp_path / "model", MODELS["llama3's rope"], "qwen2")
    with pytest.raises(Refused, match="tokens" if wrong in ("tokens", "letters") else "log-probabilities"):
        gguf.write(tmp_path / "model")
    assert not [*(tmp_path / "model").glob("*gguf*")]


def test_16_bit_log_probabilities_of_a_model_with_a_weight_above_the_range_of_fp16_are_finite(tmp_path):
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["gpt2"]))
    network.transformer.ln_f.weight.data[0] = 70_000.0
    network.save_pretrained(tmp_path)
    exact, rounded = llama_cpp._log_probabilities(tmp_path, [1, 2, 3])
    assert rounded.isfinite().all() and (rounded - exact).abs().mean() > 0


@pytest.mark.process
@pytest.mark.matrix
def test_llama_cpp_check_accepts_a_model_with_only_16_positions(tmp_path, llama):
    written(tmp_path / "model", MODELS["gpt2"] | {"n_positions": 16})
    assert gguf.write(tmp_path / "model").name == gguf.NAME


@pytest.mark.process
@pytest.mark.matrix
def test_llama_cpp_computes_the_logits_of_a_pretrained_model_from_its_gguf_file(tmp_path, llama):
    shutil.copytree(folder_or_skip(), tmp_path / "model")
    assert gguf.write(tmp_path / "model") == Path(tmp_path / "model" / gguf.NAME)
