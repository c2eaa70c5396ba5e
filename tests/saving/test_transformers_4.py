"""Tests that transformers 4.57 and peft 0.19 open exported folders, and that they compute the same logits
and tokens as the versions in this environment.

Both packages run with the Python that OLD_TRANSFORMERS names, or in an environment that the test creates, which uses
the torch of this environment. Creating it needs a network.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import opened_by_transformers_4
from conftest import ROOT
from environments import python_with
from lowmem.saving.export import ModelFolder, export
from lowmem.system.quiet_libraries import quiet
from opened_by_transformers_4 import TEXT
from real_model import fitted, folder_or_skip

PACKAGES = ("transformers==4.57.6", "tokenizers>=0.22,<=0.23.0", "huggingface_hub>=0.34,<1", "peft==0.19.0")
# Bound of `distance` if two blocks compute their fp32 sums in another order. A missing key of the configuration causes
# a distance of 0.01.
ROUNDINGS = 64 * torch.finfo(torch.float32).eps
WIDTHS = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WIDTHS |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
LONG = {"rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 0.5}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
BY_KIND = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}}
BY_KIND |= {"sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}
DEFAULT = {"rope_type": "default", "rope_theta": 5e3}
MODELS = {  # values that differ from the defaults, so that an ignored key changes the logits
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
    """Returns a Python that can import transformers 4 and peft 0.19."""
    return python_with(tmp_path_factory.mktemp("transformers-4"), *PACKAGES, variable="OLD_TRANSFORMERS")


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
        for p in made.parameters():  # large weights, so that positions change the logits
            p.copy_(4 * p if p.ndim > 1 else p + 0.1)
    return made


def test_transformers_4_computes_the_logits_and_tokens_of_transformers_5_from_exported_folders(tmp_path, old_python):
    quiet()
    ids, ours = torch.arange(24)[None] * 7 % 300, {}  # (1, T)
    for number, model_type in enumerate(MODELS):
        made, folder = network(model_type), tmp_path / model_type
        tokens = came_as(tmp_path / f"{model_type}-came", CLASSES[number % len(CLASSES)], bos=number % 2 == 0)
        export(made, ModelFolder(folder, tokens))
        torch.save(ids, folder / "ids.pt")
        with torch.no_grad():
            ours[folder] = (made(ids).logits, tokens(TEXT).input_ids)
    theirs = opened(old_python, *ours)
    for folder, (logits, tokens) in ours.items():
        assert theirs[folder]["tokens"] == tokens, folder.name
        off = distance(theirs[folder]["logits"], logits)
        assert off < ROUNDINGS, (folder.name, off)


def opened(python, *folders):
    """Returns the logits of each folder's `ids.pt` and the tokens of TEXT, as transformers 4 computes them."""
    script, threads = Path(opened_by_transformers_4.__file__), str(torch.get_num_threads())
    environment = os.environ | {
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": threads,
    }  # the same number of threads gives the same order of sums
    done = subprocess.run([python, script, *folders], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return {folder: torch.load(folder / "theirs.pt") for folder in folders}


def distance(theirs, ours):
    """Returns the largest difference of two logits, divided by the largest logit."""
    return ((theirs - ours).abs().max() / ours.abs().max()).item()


# --- a real model ----------------------------------------------------------------------------------------------------

CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
CHATS = ("data=chat", f"data.path={ROOT}/examples/chat.jsonl", "seq_len=64", "val_sequences=2", "lr=1e-4")
kept = {}


def keeps_logits(model, tokenizer):
    """A metric function that stores the logits and tokens of the run's model in `kept`, and measures nothing."""
    ids = tokenizer(CHAT, return_tensors="pt")["input_ids"]
    kept.update(ids=ids, logits=model(input_ids=ids).logits.clone(), tokens=tokenizer(TEXT).input_ids)
    return {}


def test_transformers_4_computes_the_logits_of_the_run_from_its_exported_model_and_adapter(tmp_path, old_python):
    def trained(name, model, *lines):
        """Returns (exported folder, logits of the model in the run)."""
        fitted(model, tmp_path / name, *CHATS, *lines, f"metric={__name__}.keeps_logits")
        return tmp_path / name / "model", kept["logits"]

    full, logits = trained("full", folder_or_skip(), "max_steps=1")
    bf16, logits_in_bf16 = trained("bf16", full, "max_steps=1", "precision=bf16-true")
    adapter, with_adapter = trained("adapter", full, "max_steps=2", "adapter=lora", "lr=1e-3")
    fitted(full, tmp_path / "merged", *CHATS, "adapter=lora", f"export={tmp_path}/adapter", "merge=true")
    merged, wrong = tmp_path / "merged" / "model", without_older_keys(full, tmp_path / "wrong")
    folders = full, bf16, adapter, merged, wrong
    for folder in folders:
        torch.save(kept["ids"], folder / "ids.pt")
    theirs = opened(old_python, *folders)
    assert all(one["tokens"] == kept["tokens"] for one in theirs.values())
    assert torch.equal(theirs[full]["logits"], logits)
    assert torch.equal(theirs[adapter]["logits"], with_adapter)  # the adapter on its base, which is `full`
    assert torch.equal(theirs[bf16]["logits"], logits_in_bf16) and logits_in_bf16.dtype == torch.bfloat16
    assert distance(theirs[merged]["logits"], with_adapter) < ROUNDINGS
    # wrong on purpose: the base without its adapter, and a configuration without a key that transformers 4 reads
    for folder, ours in ((full, with_adapter), (wrong, logits)):
        assert distance(theirs[folder]["logits"], ours) > 1000 * ROUNDINGS


def without_older_keys(folder, place):
    """Makes a folder in the spelling of transformers 5, in which transformers 4 does not find rope_theta."""
    place.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (place / file.name).symlink_to(file)
    keys = json.loads((folder / "config.json").read_text())
    del keys["rope_theta"]
    (place / "config.json").write_text(json.dumps(keys))
    return place
