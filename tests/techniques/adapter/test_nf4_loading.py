"""Compares models whose weights are quantized during loading with models quantized after loading."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from host_memory import linux
from lowmem.config.schema import Model
from lowmem.model import loading
from lowmem.model.trainable import packed
from lowmem.system.errors import Refused
from lowmem.techniques.adapter import nf4
from lowmem.techniques.adapter.nf4_loading import NF4Quantizer, NF4WhileLoading

SIZES = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, "n_positions": 64},
    "qwen2": {},  # layers with a bias
    "phi3": {"pad_token_id": 0},  # fused matrices
    "qwen3_moe": EXPERTS | {"num_experts": 4},  # loading fuses the separate experts of the files
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # experts have biases
    "mixtral": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, **EXPERTS},  # routers stay in fp32
}


def saved(family, folder, dtype=torch.bfloat16):
    torch.manual_seed(0)
    known = AutoConfig.for_model(family)
    own = FAMILIES[family] if family == "gpt2" else SIZES | HEADS | FAMILIES[family]
    config = AutoConfig.for_model(family, **{key: value for key, value in own.items() if hasattr(known, key)})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    model.save_pretrained(folder)
    return folder


def described(folder):
    how = {"name": str(folder), "pretrained": True, "trust_remote_code": False, "attention": "sdpa"}
    spec = Model.model_construct(**how, architecture=None)
    return loading.Described(spec, loading.architecture(spec))


def loaded(folder, dtype, while_loading, with_experts=True):
    torch.manual_seed(5)
    network = loading.load(described(folder), dtype, NF4WhileLoading(with_experts) if while_loading else None)
    in_time = len(packed(network))
    nf4.quantize(network, with_experts)
    return network, in_time, torch.get_rng_state()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.matrix)])
def test_model_quantized_during_loading_equals_a_model_quantized_after_loading(tmp_path, family, dtype):
    folder = saved(family, tmp_path)
    (one, in_time, drawn), (other, none, as_before) = (loaded(folder, dtype, way) for way in (True, False))
    assert in_time == len(packed(one)) == len(packed(other)) > 0 == none and torch.equal(drawn, as_before)
    state, expected = one.state_dict(), other.state_dict()
    assert [*state] == [*expected]  # a checkpoint's digest of the base reads tensors in this order
    assert all(torch.equal(state[name], expected[name]) and state[name].dtype == expected[name].dtype for name in state)
    frozen = [(name, p.requires_grad) for name, p in one.named_parameters()]
    assert frozen == [(name, p.requires_grad) for name, p in other.named_parameters()]
    assert one.config.to_dict() == other.config.to_dict()
    for part, expected in zip(one.modules(), other.modules(), strict=True):
        assert vars(part).keys() == vars(expected).keys()
    ids = torch.arange(12)[None]
    assert torch.equal(one.eval()(input_ids=ids).logits, other.eval()(input_ids=ids).logits)


def test_experts_stay_in_16_bits_if_quantizing_during_loading_excludes_experts(tmp_path):
    network, _, _ = loaded(saved("qwen3_moe", tmp_path), torch.bfloat16, while_loading=True, with_experts=False)
    assert packed(network) and network.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16


@pytest.mark.wrong
def test_expert_tensors_left_in_the_order_of_the_files_change_the_state_dict_order(tmp_path, monkeypatch):
    folder = saved("qwen3_moe", tmp_path)
    monkeypatch.setattr(NF4Quantizer, "_process_model_after_weight_loading", lambda *_, **__: None)
    one, other = (loaded(folder, torch.bfloat16, way)[0].state_dict() for way in (True, False))
    assert [*one] != [*other] and {*one} == {*other}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_model_files_without_a_matrix_are_refused_when_quantizing_during_loading(tmp_path, family):
    folder = saved(family, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if name.endswith(("o_proj.weight", "c_proj.weight")))
    save_file({name: t for name, t in tensors.items() if name != lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused, match="lack the weights"):
        loading.load(described(folder), torch.bfloat16, NF4WhileLoading())


def test_matrix_of_a_wrong_shape_is_refused_when_quantizing_during_loading(tmp_path):
    folder = saved("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 32, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused, match=r"up_proj.weight has shape \(96, 32\)"):
        loading.load(described(folder), torch.bfloat16, NF4WhileLoading())


# --- host memory ------------------------------------------------------------------------------------------------------

PEAK = """
import sys, torch
from pathlib import Path
from torch import nn
from host_memory import Highest
from lowmem.techniques.adapter import nf4
from test_nf4_loading import described, loaded
folder, dtype = sys.argv[1], getattr(torch, sys.argv[2])
loaded(Path(folder) / "small", dtype, True)  # imports what it needs
loaded(Path(folder) / "small", dtype, False)
nf4.NF4Linear(nn.Linear(512, 2048))
for while_loading in (True, False):
    with Highest() as highest:
        network, _, _ = loaded(Path(folder) / "large", dtype, while_loading)
    print(highest.rise, sum(buffer.nbytes for buffer in network.buffers()))
    del network
"""
LLAMA = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
MIXTURE = LLAMA | {"num_experts": 16, "moe_intermediate_size": 256, "num_experts_per_tok": 2, "head_dim": 64}


@pytest.mark.process
@linux
@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("llama", "float32"), ("qwen3_moe", "bfloat16")])
def test_host_memory_peak_of_quantizing_during_loading_is_at_most_4_bit_weights_plus_scratch(tmp_path, family, dtype):
    """Quantizing after loading stays below the limit only if the files have the run's dtype and no separate experts."""
    config = AutoConfig.for_model(family, **(MIXTURE if family == "qwen3_moe" else LLAMA), num_attention_heads=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "large")
    saved(family, tmp_path / "small")
    here = Path(__file__)
    support = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here.parents[2] / "support", here.parent)))}
    command = [sys.executable, "-c", PEAK, str(tmp_path), dtype]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=support, timeout=240).stdout
    largest = 16 * 512 * 512 if family == "qwen3_moe" else 512 * 2048  # elements
    at_once = 512 * 512 if family == "qwen3_moe" else 512 * 2048  # elements quantized at once: a matrix or one expert
    # bytes: temporary (see nf4.PIECE), and the largest bf16 tensor with its separate experts
    scratch = 20 * at_once + 4 * largest
    outside = 2 * 1000 * 512 * (4 if dtype == "float32" else 0)  # fp32 embedding and head are copies, not mapped files
    (rise, packed_bytes), (after, _) = (map(int, line.split()) for line in said.splitlines())
    most = packed_bytes + scratch + outside + 4e6
    assert rise < most and (after < most) == (family == "llama" and dtype == "bfloat16")
