"""Tests that documents in one row have the logits and gradients of separate documents, or that the model is refused."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from documents import split
from lowmem.data.loader import MicroBatch
from lowmem.data.packing import rows
from lowmem.model import packed_attention
from lowmem.model.document_attention import BY_DOCUMENT, MASKED
from lowmem.offload import edges
from lowmem.system.errors import Refused
from lowmem.system.torch_private import attention_taken
from lowmem.techniques.loss import cross_entropy as losses
from networks import network

pytestmark = pytest.mark.kernels
WIDTH, SEQ_LEN, EXACT = 32, 40, 1e-6
FEW = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": WIDTH}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
EAGER = {"attn_implementation": "eager"}
# Sliding windows are shorter than most documents.
EXACTLY = {
    "gpt2": {"n_positions": SEQ_LEN},
    "llama": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 4, **EAGER},
    "gemma3_text": {"sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": MIXTURE,
}
LEAKS = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    "bloom": {"n_layer": 2, "n_head": 2, **EAGER},
    "gpt_oss": {**MIXTURE, "sliding_window": 4, **EAGER},
    "mamba": {"state_size": 4, **EAGER},
}


def texts():
    return [np.random.default_rng(i).integers(3, 500, n) for i, n in enumerate((7, 2, 12, 5, 33, 18, 9, 21))]


def batch():
    made = rows(split(*texts()), SEQ_LEN, "documents", "cut", "train")
    return made.micro_batch(np.arange(len(made)))


def alone(model):
    """Returns the sum of the losses of the separate documents."""
    ids = [torch.from_numpy(document)[None] for document in texts()]
    return sum(losses.full(model, MicroBatch(of[:, :-1], of[:, 1:])) for of in ids)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def off(model, packed, loss=losses.full):
    """Returns the relative errors of the loss and of the gradients of packed rows, compared with separate documents."""
    right, wrong = alone(model), loss(model, packed)
    one, other = gradients(model, right), gradients(model, wrong)
    return abs(wrong.item() / right.item() - 1), ((one - other).abs().max() / one.abs().max()).item()


def logits_off(model, packed, **more):
    """Returns the largest error of the logits of packed rows, relative to the largest logit. Args: more: further
    arguments of the model."""
    with torch.no_grad():
        together = model(**packed.inputs, **({"use_cache": False} | more)).logits
        apart = []
        for ids, places in zip(packed.input_ids, packed.position_ids, strict=True):
            starts = [*(places == 0).nonzero().flatten().tolist(), SEQ_LEN]
            parts = ids.split([stop - start for start, stop in pairwise(starts)])
            apart.append(torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts]))
    return ((together - torch.stack(apart)).abs().max() / torch.stack(apart).abs().max()).item()


@pytest.mark.parametrize("model_type", EXACTLY)
def test_packed_documents_have_logits_and_gradients_of_separate_documents(model_type):
    model, packed = network(model_type, **EXACTLY[model_type]), batch()
    for way in ("sdpa", MASKED, BY_DOCUMENT):  # the mask of transformers, lowmem's mask, and no mask
        if attention_taken(model) != "eager":
            model.set_attn_implementation(way)
        assert logits_off(model, packed) < EXACT
        assert max(off(model, packed)) < EXACT
    assert max(off(model, packed, losses.Chunked(7))) < EXACT
    assert packed_attention.keeps_apart(model.eval(), packed.input_ids[:, :16])


@pytest.mark.wrong
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2", "mistral"])
def test_wrong_document_boundaries_change_the_gradients_and_fail_the_separation_check(model_type):
    model, packed = network(model_type, **EXACTLY[model_type]), batch()
    packed_attention.separate(model)
    ones = torch.ones_like(packed.input_ids)
    assert logits_off(model, packed, attention_mask=ones) > 1e-3
    assert logits_off(model, packed, use_cache=True) > 1e-3
    one_document = replace(packed, position_ids=None)
    assert off(model, one_document)[1] > 1e-3
    swapped = replace(packed, position_ids=packed.position_ids.flip(0))  # the boundaries of another row
    assert off(model, swapped)[1] > 1e-3
    ids, forward = packed.input_ids[:1, :16], model.forward
    for more in ({"attention_mask": ones[:1, :16]}, {"use_cache": True}):
        model.forward = lambda more=more, **inputs: forward(
            **(inputs | (more if inputs["input_ids"].shape == ids.shape else {}))
        )
        assert not packed_attention.keeps_apart(model.eval(), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", LEAKS)
def test_model_that_attends_across_documents_is_refused_with_its_class_name(model_type, dtype):
    model = network(model_type, **LEAKS[model_type]).to(dtype).eval()
    packed_attention.separate(model)
    with pytest.raises(
        Refused, match=rf"in {type(model).__name__}, documents in one row attend to each other.*packing=padded"
    ):
        packed_attention.verify(model, batch().input_ids[:, :16])


def test_gpt2_with_positions_that_do_not_restart_fails_the_separation_check():
    """GPT-2's positions are absolute: with the correct mask but positions that continue across documents, the logits
    change."""
    model, ids = network("gpt2", **EXACTLY["gpt2"]).eval(), batch().input_ids[:, :16]
    forward, asked = model.forward, []

    def counting_on(**inputs):
        if "position_ids" in inputs:
            asked.append(inputs)
            same = inputs["position_ids"] == 0
            document = same.cumsum(1)[:, :, None] == same.cumsum(1)[:, None]
            inputs["attention_mask"] = (document & document.new_ones(16, 16).tril())[:, None]
            inputs["position_ids"] = torch.arange(16).expand_as(ids)
        return forward(**inputs)

    model.forward = counting_on
    assert not packed_attention.keeps_apart(model, ids) and len(asked) == 3  # the first two calls show no leak


@pytest.mark.parametrize("model_type", ["opt", "mamba", "llama"])
def test_padded_rows_without_an_attention_mask_have_the_loss_and_gradients_of_single_documents(model_type):
    model = network(model_type, **({**LEAKS, **EXACTLY})[model_type])
    made = rows(split(*texts()), SEQ_LEN, "padded", "cut", "train")
    assert max(off(model, made.micro_batch(np.arange(len(made))))) < EXACT


# --- one mask for all layers ---------------------------------------------------------------------------------------


def masks(model, packed, **autocast):
    """Returns the number of (T, T) storages that are saved for backward."""
    kept = {}

    def pack(tensor):
        if tensor.shape[-2:] == (SEQ_LEN, SEQ_LEN):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    enabled = {"dtype": torch.bfloat16, "cache_enabled": False} | autocast
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", **enabled):
        loss = losses.full(model, packed)
    assert loss.isfinite()
    return len(kept)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(("model_type", "different"), [("gpt2", 1), ("llama", 1), ("gemma3_text", 2)])
def test_all_layers_share_one_packed_attention_mask_per_window_size(model_type, different, enabled):
    layers = {"n_layer": 6} if model_type == "gpt2" else {"num_hidden_layers": 6}
    model = network(model_type, **EXACTLY[model_type], **layers)
    assert masks(model, batch(), enabled=enabled) == 6
    packed_attention.separate(model, compiled=True)
    assert masks(model, batch(), enabled=enabled) == different
    model.set_attn_implementation(BY_DOCUMENT)
    assert masks(model, batch(), enabled=enabled) == different - 1  # only a window shorter than the row needs a mask


def test_gpt_oss_with_eager_attention_keeps_eager_attention_when_documents_are_packed():
    """With attention by document, GPT-OSS would silently lose its attention sinks."""
    model, ids = network("gpt_oss", **LEAKS["gpt_oss"]).eval(), batch().input_ids
    for block in model.model.layers:
        torch.nn.init.normal_(block.self_attn.sinks)
    right = model(input_ids=ids, use_cache=False).logits
    packed_attention.separate(model)
    assert attention_taken(model) == "eager"
    model.set_attn_implementation(BY_DOCUMENT)  # wrong variant: no sinks
    assert (model(input_ids=ids, use_cache=False).logits - right).abs().max() > 0.01 * right.abs().max()


# --- a run ---------------------------------------------------------------------------------------------------------

PACKED = ("data.packing=documents", "seq_len=64", "batch_size=2", "plan=off")


def test_run_on_packed_documents_trains_and_is_refused_if_the_model_fails_the_separation_check(fit, monkeypatch):
    summary, folder = fit(*PACKED, "max_steps=2")
    assert summary["steps"] == 2
    again, _ = fit(*PACKED, f"evaluate={folder}/model", folder="again")
    assert again["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert BY_DOCUMENT not in (folder / "model" / "config.json").read_text()
    assert json.loads((folder / "model" / "config.json").read_text())["model_type"] == "gpt2"
    monkeypatch.setattr(packed_attention, "keeps_apart", lambda *_: False)
    fit("max_steps=1", "plan=off", folder="joined")
    with pytest.raises(Refused, match="GPT2LMHeadModel, documents in one row attend to each other"):
        fit(*PACKED, f"evaluate={folder}/model", folder="evaluated")
    with pytest.raises(Refused, match="GPT2LMHeadModel, documents in one row attend to each other"):
        fit(*PACKED, folder="refused")


def test_packed_run_with_streamed_weights_and_a_tiled_head_trains(fit, monkeypatch):
    """All tiles of the head share the memory of two tiles, so the separation check must not run backward through the
    head."""
    monkeypatch.setattr(edges, "COLUMNS", 32)
    streamed = ("weights=streamed", "precision=bf16-master", "gradient_checkpointing=every_layer")
    assert fit(*PACKED, *streamed, "loss=tiled", "loss.columns=32", "max_steps=1")[0]["steps"] == 1


@pytest.mark.parametrize("packing", ["documents", "padded"])
def test_run_on_packed_or_padded_documents_resumes_bit_exactly(fit, packing):
    typed = (*PACKED, f"data.packing={packing}", "save_every=1", "max_steps=4", "checkpoint.keep=10", "sample_tokens=0")
    _, unbroken = fit(*typed)
    whole = torch.load(unbroken / "checkpoints" / "step-00000004.ckpt", weights_only=True)
    for done in (1, 3):
        saved = unbroken / "checkpoints" / f"step-0000000{done}.ckpt"
        _, folder = fit(*typed, f"resume={saved}", folder=f"from{done}")
        again = torch.load(folder / "checkpoints" / "step-00000004.ckpt", weights_only=True)
        assert all(torch.equal(again["state_dict"][name], p) for name, p in whole["state_dict"].items())
        assert again["lowmem"]["position"] == whole["lowmem"]["position"]
    with pytest.raises(Refused, match="a different order"):
        fit(*typed, "data.packing=joined", f"resume={saved}", folder="joined")
