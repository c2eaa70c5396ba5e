"""Tests that an exported folder has the files that transformers would write, and that an export needs memory for only
one shard at a time."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from host_memory import Highest, linux
from lowmem.model.loading import _of_type
from lowmem.saving import export as exporting
from lowmem.saving.export import ModelFolder, Weights, export
from lowmem.saving.old_spelling import old_config
from networks import Nothing
from new_process import in_a_new_process

WIDTHS = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODELS = {
    "gpt2 tied": ("gpt2", {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama untied": ("llama", WIDTHS),
    "qwen3 tied": ("qwen3", WIDTHS | {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2, softcapped": ("gemma2", WIDTHS | {"head_dim": 8}),
    "mixtral, whose experts files hold apart": ("mixtral", WIDTHS | {"num_local_experts": 4}),
}


def made(name, dtype=torch.float32):
    model_type, keys = MODELS[name]
    return AutoModelForCausalLM.from_config(_of_type(model_type, **keys), dtype=dtype)


def contents(folder):
    """Returns a dict that maps the name of each file except README.md to its bytes, and config.json to the dict that
    `old_config` makes of it."""
    found = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}
    return found | {"config.json": old_config(json.loads(found["config.json"]))}


@pytest.mark.parametrize("shard", ["2GB", "4KB"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_exported_files_except_config_json_equal_save_pretrained_byte_for_byte(
    tmp_path, monkeypatch, name, dtype, shard
):
    """The parameters of the exported model are bf16. The exported values come from separate fp32 masters."""
    monkeypatch.setattr(exporting, "FILE_BYTES", shard)
    wide = made(name)
    held = made(name, torch.bfloat16)
    masters = dict(zip(held.parameters(), wide.parameters(), strict=True))
    weights = Weights(held, lambda p: masters[p].data)
    export(held, ModelFolder(tmp_path / "ours", Nothing(), dtype), weights)
    wide.to(getattr(torch, dtype or "float32")).save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert ours == theirs and (len(ours) > 4) == (shard == "4KB")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (name, one), other in zip(opened.named_parameters(), wide.parameters(), strict=True):
        assert torch.equal(one, other.to(opened.dtype)), name


def test_exported_files_of_a_loaded_model_equal_the_files_that_it_was_loaded_from(tmp_path):
    """While loading, transformers records in the model how it renamed and joined tensors. This record must not change
    the exported files."""
    made("llama untied").save_pretrained(tmp_path / "in")
    export(AutoModelForCausalLM.from_pretrained(tmp_path / "in"), ModelFolder(tmp_path / "out", Nothing()))
    assert contents(tmp_path / "out") == contents(tmp_path / "in")


@pytest.mark.matrix
@linux
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@in_a_new_process
def test_export_raises_memory_by_one_shard_unless_all_weights_are_one_shard(tmp_path, monkeypatch, wrong):
    """Wrong variant: all weights are written as one shard, so memory must rise above the limit."""
    keys = WIDTHS | {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(_of_type("llama", **keys), dtype=torch.bfloat16)
    network.to_empty(device="cpu")
    weights = 4 * sum(p.numel() for p in network.parameters())
    monkeypatch.setattr(exporting, "FILE_BYTES", "50GB" if wrong else "17MB")  # the largest weight has 16.4 MB in fp32
    with Highest() as highest:
        export(network, ModelFolder(tmp_path / "model", Nothing(), "float32"))
    assert (highest.rise < 17e6 + 0.1 * weights) != wrong
    assert (tmp_path / "model" / "model.safetensors").exists() == wrong
