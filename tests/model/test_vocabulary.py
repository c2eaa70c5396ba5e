"""Tests added tokens: new embedding rows are the mean of the old rows, old rows are unchanged, and tied heads stay
tied."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, PreTrainedModel

from lowmem.config.instantiate import instantiate
from lowmem.data.token_store import tokenize
from lowmem.model import loading, vocabulary
from lowmem.plan.tracing.trace import trace
from lowmem.system.errors import Refused
from lowmem.training import build

pytestmark = pytest.mark.kernels
NEW = ["<|im_start|>", "<|im_end|>"]
TYPED = f"model.added_tokens=['{NEW[0]}','{NEW[1]}']"
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
GPT2 = partial(GPT2Config, n_embd=32, n_layer=2, n_head=2, n_positions=64, **ENDS)
LLAMA = partial(LlamaConfig, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **ENDS)
KINDS = {
    "tied": (GPT2, 0),
    "untied": (LLAMA, 0),
    "with rows to spare": (GPT2, 20),
}  # (config class, embedding rows beyond the tokenizer's tokens)


@pytest.fixture
def published(config, tmp_path):
    """Returns a function that takes a kind, and returns a folder with a model of this kind and its tokenizer."""

    def make(kind):
        cfg = config()
        tokens = tokenize(instantiate(cfg.data), tmp_path / "cache", 300)
        folder = tmp_path / kind.replace(" ", "_")
        tokens.tokenizer.save_pretrained(folder)
        torch.manual_seed(1)
        architecture, spare = KINDS[kind]
        AutoModelForCausalLM.from_config(architecture(vocab_size=len(tokens.tokenizer) + spare)).save_pretrained(folder)
        return folder

    return make


def on(folder, *more):
    return ("model=hf", f"model.name={folder}", TYPED, "seq_len=16", "lr=1e-3", *more)


def ends(network):
    return network.get_input_embeddings().weight, network.get_output_embeddings().weight


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_of_added_tokens_are_the_mean_of_old_rows_which_stay_unchanged(
    config, published, kind, monkeypatch
):
    folder = published(kind)
    covariance = "_init_added_embeddings_weights_with_mean"
    assert hasattr(PreTrainedModel, covariance)
    monkeypatch.setattr(PreTrainedModel, covariance, None)  # transformers would call this with mean_resizing=True
    data = build.data(config(*on(folder)))
    module = build.module(config(*on(folder)), data)
    old, new = AutoModelForCausalLM.from_pretrained(folder), module.model
    fresh = data.tokens.tokenizer.convert_tokens_to_ids(NEW)
    there = len(data.tokens.tokenizer) - 2
    assert fresh == [there, there + 1]
    assert new.config.vocab_size == max(old.config.vocab_size, there + 2)
    for before, after in zip(ends(old), ends(new), strict=True):
        others = [i for i in range(len(before)) if i not in fresh]
        assert len(after) == new.config.vocab_size
        assert torch.equal(after[others], before[others])
        for row in after[fresh]:
            torch.testing.assert_close(row, before[others].mean(0))
    tied = kind != "untied"
    assert (ends(new)[0] is ends(new)[1]) == tied
    ids = torch.arange(40)[None]
    logits = new.eval()(ids).logits.index_select(-1, torch.arange(there))
    torch.testing.assert_close(logits, old.eval()(ids).logits[..., :there])


def test_added_tokens_are_encoded_as_single_tokens(config, published):
    tokenizer = build.data(config(*on(published("tied")))).tokens.tokenizer
    ids = tokenizer("for<|im_start|>x").input_ids
    assert tokenizer.convert_tokens_to_ids(NEW[0]) in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "forx"


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_run_with_added_tokens_exports_them_and_resumes_bit_exactly(fit, published, kind):
    folder = published(kind)
    whole, unbroken = fit(*on(folder), "save_every=2", folder="whole")
    resumed, again = fit(*on(folder), f"resume={unbroken / 'checkpoints' / 'step-00000002.ckpt'}", folder="resumed")
    assert resumed["val_loss"] == whole["val_loss"]
    exported = AutoModelForCausalLM.from_pretrained(unbroken / "model")
    tokenizer = AutoTokenizer.from_pretrained(unbroken / "model")
    assert exported.config.vocab_size == len(ends(exported)[0]) >= len(tokenizer)
    assert len(tokenizer("<|im_end|>").input_ids) == 1
    assert (ends(exported)[0] is ends(exported)[1]) == (kind == "tied")
    evaluated, _ = fit(f"evaluate={unbroken / 'model'}", TYPED, folder="evaluated")
    assert evaluated["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-6)
    assert torch.equal(ends(AutoModelForCausalLM.from_pretrained(again / "model"))[0], ends(exported)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_planner_counts_the_embedding_rows_of_added_tokens(config, published, kind):
    folder = published(kind)
    cfg = config(*on(folder))
    network = build.module(cfg, build.data(cfg)).model
    assert trace(cfg, on_card=False).parameters == sum(p.numel() for p in network.parameters())
    without = cfg.knowing(model={"added_tokens": []})
    assert (trace(without, on_card=False).parameters == trace(cfg, on_card=False).parameters) == ("spare" in kind)


def test_tokenizer_trained_for_300_tokens_has_added_tokens_within_the_300(config, fit):
    tokenizer = build.data(config(TYPED)).tokens.tokenizer
    assert len(tokenizer) <= 300 and len(tokenizer("<|im_start|>").input_ids) == 1
    assert loading.describe(config(TYPED), plans=True).grown.vocab_size == 300
    assert fit(TYPED)[0]["val_loss"] > 0


def test_tokens_already_in_the_vocabulary_are_not_added_again(published):
    tokenizer = AutoTokenizer.from_pretrained(published("tied"))
    first = vocabulary.add(tokenizer, NEW, 300)
    assert len(first.fresh) == 2
    assert vocabulary.add(tokenizer, NEW, 300) == vocabulary.Added(first.rows, [])


@pytest.mark.parametrize("typed", ["freeze=['*wte*']", "adapter=lora"])
def test_added_tokens_with_frozen_embeddings_are_refused(fit, published, typed):
    with pytest.raises(Refused, match=r"model.added_tokens: .* Type adapter=none"):
        fit(*on(published("tied")), typed)
