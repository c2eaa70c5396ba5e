"""The stable embedding: the paper's forward pass, a tied head, and an export that any program loads."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lowmem.model.stable_embedding import StableEmbedding, folded, stabilise
from lowmem.saving.export import ModelFolder, export
from lowmem.system.errors import Refused
from networks import network
from same import last


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_a_norm_behind_the_embedding_and_the_head_stays_tied(tied):
    model = network("llama", tie_word_embeddings=tied)
    stabilise(model)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, StableEmbedding)
    assert (model.get_output_embeddings().weight is embedding.weight) == tied
    ids = torch.randint(0, 500, (2, 8))
    rows = nn.functional.embedding(ids, embedding.weight)
    torch.testing.assert_close(embedding(ids), nn.functional.layer_norm(rows, (32,)))
    assert embedding(ids).std().item() == pytest.approx(1, abs=0.05)
    bound = (6 / (500 + 32)) ** 0.5  # Xavier
    assert bound * 0.95 < embedding.weight.abs().max().item() <= bound


def test_it_is_bitsandbytes_forward_pass():
    from bitsandbytes.nn import StableEmbedding as Theirs

    theirs = Theirs(50, 16)
    ours = StableEmbedding(nn.Embedding(50, 16))
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(0, 50, (3, 4))
    assert torch.equal(ours(ids), theirs(ids))


@pytest.mark.parametrize("masters", [False, True])
def test_an_export_computes_the_same_without_the_norm(fit, masters):
    """Masters: in all of the bits that the host has, where the device has 16."""
    held = ("precision=bf16-master",) if masters else ("optim=adam8bit", "optim.embedding_bits=32")
    summary, run = fit("model.stable_embedding=true", *held, "lr=1e-2")
    assert summary["steps"] == 4
    state = last(run)["state_dict"]
    loaded = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    norm = nn.LayerNorm(32)
    weights = {name: state[f"model.transformer.wte.norm.{name}"] for name in ("weight", "bias")}
    norm.load_state_dict(weights)
    torch.testing.assert_close(loaded.transformer.wte.weight, norm(state["model.transformer.wte.weight"]))
    torch.testing.assert_close(loaded.lm_head.weight, state["model.transformer.wte.weight"])
    assert "model.transformer.wte.norm.weight" in state and not isinstance(loaded.transformer.wte, StableEmbedding)


def test_folding_leaves_the_model_as_it_was(tmp_path):
    model = network()
    stabilise(model)
    before = model(input_ids=torch.arange(8)[None]).logits
    with folded(model):
        assert torch.allclose(model(input_ids=torch.arange(8)[None]).logits, before, atol=1e-6)
    assert isinstance(model.get_input_embeddings(), StableEmbedding) and model.config.tie_word_embeddings
    assert torch.equal(model(input_ids=torch.arange(8)[None]).logits, before)
    tokenizer = type("None", (), {"save_pretrained": lambda self, folder: None})()
    export(model, ModelFolder(tmp_path / "model", tokenizer))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(input_ids=torch.arange(8)[None]).logits, before)


def test_an_embedding_of_another_kind_is_refused():
    with pytest.raises(Refused, match="stable_embedding=false"):
        stabilise(network("gemma"))
