"""Models from files: the weights that were saved, in the dtype that was asked for, once in memory."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lowmem import model
from lowmem.errors import Refused
from test_loss import network


@pytest.fixture(params=["gpt2", "llama"])
def folder(request, tmp_path, small, config):
    """A published model: weights in 16 bits, configuration and a tokenizer."""
    from lowmem.data import corpus, tokens

    data = config().data
    texts = corpus.text(data.path, data.pattern, data.val_fraction)
    tokenizer = tokens.tokenize(texts, tmp_path / "cache", 400).tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    network(request.param).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def spec(folder, **changes):
    return {
        "name": str(folder),
        "pretrained": True,
        "trust_remote_code": False,
        "attention": "sdpa",
        "architecture": None,
    } | changes


def built(how, dtype=torch.float32):
    return model.build(model.architecture(**how), dtype, **how)


def test_weights_come_in_the_dtype_that_was_asked_for_and_in_training_mode(folder):
    saved = AutoModelForCausalLM.from_pretrained(folder)
    for dtype in (torch.float32, torch.float16):
        network = built(spec(folder), dtype)
        assert network.training and {p.dtype for p in network.parameters()} == {dtype}
        for (name, ours), theirs in zip(network.named_parameters(), saved.parameters(), strict=True):
            assert torch.equal(ours, theirs.to(dtype)), name


def test_a_pretrained_model_is_fine_tuned_with_its_own_tokenizer(command, folder, tmp_path):
    code, said = command("model=hf", f"model.name={folder}", "seq_len=16", "lr=1e-3", "max_steps=4")
    assert code == 0, said
    exported = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / "model")
    assert exported.get_vocab() == PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    before, after = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, tmp_path / "run" / "model"))
    moved = (before.get_input_embeddings().weight.float() - after.get_input_embeddings().weight).abs().max()
    assert 0 < moved < 0.1  # fine-tuned, not started over


def test_without_weights_it_starts_at_random(folder):
    assert not torch.equal(
        built(spec(folder, pretrained=False)).get_input_embeddings().weight,
        built(spec(folder)).get_input_embeddings().weight,
    )


def test_the_yaml_changes_what_it_names(folder):
    key = "resid_pdrop" if model.architecture(**spec(folder)).model_type == "gpt2" else "attention_dropout"
    changed = model.architecture(**spec(folder, architecture={"model_type": "any", key: 0.25}))
    assert getattr(changed, key) == 0.25


def test_weights_that_are_missing_are_refused_not_drawn(folder):
    more = model.architecture(**spec(folder))
    layers = "n_layer" if more.model_type == "gpt2" else "num_hidden_layers"
    with pytest.raises(Refused, match="lack the weights"):
        built(spec(folder, architecture={"model_type": "any", layers: 3}))


def test_loading_never_holds_two_copies(tmp_path):
    """A process of its own: what it holds in anonymous memory at most, over the weights' bytes."""
    shape = {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 50_000, "n_positions": 64}
    code = """
import sys, torch, threading, time
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
from lowmem import model
how = dict(name=sys.argv[1], pretrained=True, trust_remote_code=False, attention="sdpa", architecture=None)
def anonymous():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in l) * 1024
config = model.architecture(**how)
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous()); time.sleep(0.0005)
thread = threading.Thread(target=watch); thread.start()
network = model.build(config, torch.float32, **how)
done = True; thread.join()
weights = sum(p.nbytes for p in network.parameters())
print((max(peak, anonymous()) - before) / weights)
"""
    big = AutoModelForCausalLM.from_config(model._of_type("gpt2", **shape))
    big.to(torch.bfloat16).save_pretrained(tmp_path)  # another dtype than asked for: every tensor is converted
    ratio = float(
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    )
    # once, and the allocations around it: importing the model's class, buffers, one tensor in flight
    assert 0.9 < ratio < 1.5


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ({"n_embd": 32}, "model_type"),
        ({"model_type": "gpt2", "n_positions": "abc"}, "cannot be made of these values"),
        ({"model_type": "gpt2", "n_embd": 32.5}, "cannot be made of these values"),
    ],
)
def test_an_architecture_that_is_none_is_a_sentence(architecture, said):
    with pytest.raises(Refused, match=said):
        model.architecture("x", False, False, architecture)


@pytest.mark.parametrize(
    ("model_type", "longest"), [("xlnet", None), ("gpt2", 1024), ("musicgen", 2048), ("gemma3", 131072)]
)
def test_positions_are_those_of_the_text(model_type, longest):
    try:
        config = model._of_type(model_type)
    except Refused:
        pytest.skip(f"this transformers makes no {model_type} of default values")  # musicgen, until 5.18 or later
    assert model.positions(config) == longest
