"""Opens exported folders with transformers 4.57: the same logits and the same tokens as here.

It runs in an environment of its own, with the torch of this one: OLD_TRANSFORMERS=<its python>, or else one is made
here, which takes a network.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import opened_by_transformers_4
from lowmem.saving.export import ModelFolder, export
from lowmem.system.quiet_libraries import quiet
from opened_by_transformers_4 import TEXT

PACKAGES = ("transformers==4.57.6", "tokenizers>=0.22,<=0.23.0", "huggingface_hub>=0.34,<1")
# of the largest logit, in fp32: another order of some sums in two blocks; a lost key of the configuration gives 0.01
ROUNDINGS = 64 * torch.finfo(torch.float32).eps
WIDTHS = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WIDTHS |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
LONG = {"rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 0.5}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
BY_KIND = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}}
BY_KIND |= {"sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}
DEFAULT = {"rope_type": "default", "rope_theta": 5e3}
MODELS = {  # with numbers that are no architecture's default, so that a key that is not read shows
    "llama": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
    "qwen2": {"rope_parameters": DEFAULT, "tie_word_embeddings": True},
    "qwen3": {"rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 4.0}, "head_dim": 32},
    "gemma3_text": {
        "rope_parameters": BY_KIND,
        "head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {"rope_parameters": DEFAULT, "sliding_window": 8},
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 16, "pad_token_id": 0},
    "gpt2": {},
    "gpt_neox": {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
    "olmo3": {
        "rope_parameters": {
            "full_attention": DEFAULT | {"rope_type": "linear", "factor": 4.0},
            "sliding_attention": DEFAULT,
        },
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
}
CLASSES = [None, "PreTrainedTokenizerFast", "Qwen2TokenizerFast", "GPT2Tokenizer", "GPTNeoXTokenizerFast"]

pytestmark = [pytest.mark.process, pytest.mark.matrix]


@pytest.fixture(scope="module")
def old_python(tmp_path_factory):
    """The Python of an environment with transformers 4, and with torch from here."""
    if given := os.environ.get("OLD_TRANSFORMERS"):
        return given
    place = tmp_path_factory.mktemp("transformers-4")
    venv.create(place, with_pip=True)
    python = next(place.glob("*/python"))
    how = ["-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0", "--timeout", "15"]
    made = subprocess.run([python, *how, *PACKAGES], capture_output=True, text=True, timeout=900)
    if made.returncode:
        pytest.skip(f"there is no network, or no {PACKAGES[0]}: set OLD_TRANSFORMERS=<a python that has it>")
    packages = next(place.glob("lib/*/site-packages"))
    others = (path for path in sys.path if path.endswith("site-packages"))
    (packages / "of_this_one.pth").write_text("\n".join(others))  # behind its own
    return str(python)


def tokenizer(bos):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    names = ["<s>", "</s>", "<pad>", "<turn>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": ["<turn>"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def came_as(folder, name, bos):
    made = tokenizer(bos)
    if name is None:
        return made
    made.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("TokenizersBackend", name))
    return AutoTokenizer.from_pretrained(folder)


def network(model_type):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **WIDTHS | MODELS[model_type])).eval()
    with torch.no_grad():
        for p in made.parameters():  # wide enough that positions matter
            p.copy_(4 * p if p.ndim > 1 else p + 0.1)
    return made


def test_transformers_4_computes_equal_logits_and_tokens_from_exported_folders(tmp_path, old_python):
    quiet()
    ids, ours = torch.arange(24)[None] * 7 % 300, {}  # (1, T)
    for number, model_type in enumerate(MODELS):
        made, folder = network(model_type), tmp_path / model_type
        tokens = came_as(tmp_path / f"{model_type}-came", CLASSES[number % len(CLASSES)], bos=number % 2 == 0)
        export(made, ModelFolder(folder, tokens))
        torch.save(ids, folder / "ids.pt")
        with torch.no_grad():
            ours[folder] = (made(ids).logits, tokens(TEXT).input_ids)
    script = Path(opened_by_transformers_4.__file__)
    done = subprocess.run(
        [old_python, script, *ours],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ""},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for folder, (logits, tokens) in ours.items():
        theirs = torch.load(folder / "theirs.pt")
        assert theirs["tokens"] == tokens, folder.name
        off = (theirs["logits"] - logits).abs().max() / logits.abs().max()
        assert off < ROUNDINGS, (folder.name, off)
