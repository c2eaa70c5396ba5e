"""Tests loading and exporting the folders of models with several weight files, of models with tied heads, and of chat
models, which must end their turn."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lowmem.config.schema import Model
from lowmem.model import loading
from lowmem.model.generation import end_of_turn, end_tokens
from lowmem.saving.export import ModelFolder, export
from lowmem.system.errors import Refused
from lowmem.techniques.strategy.contract import ONE_DEVICE
from lowmem.training import model_folder
from networks import Nothing


def llama(**keys):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **keys
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def built(folder):
    how = {"name": str(folder), "pretrained": True, "trust_remote_code": False, "architecture": None}
    spec = Model.model_construct(**how, attention="sdpa")
    return loading.load(loading.Described(spec, loading.architecture(spec)), torch.float32)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sharded_model_folder_is_loaded_and_exported_with_equal_logits(tmp_path, tied):
    whole, ids = llama(tie_word_embeddings=tied), torch.arange(12)[None]
    whole.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    loaded = built(tmp_path / "shards")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded.eval()(ids).logits, whole(ids).logits)
    with torch.no_grad():
        loaded.model.embed_tokens.weight.add_(0.1)  # changes weights, as training does; also changes a tied head
    export(loaded, ModelFolder(tmp_path / "out", Nothing()))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(opened(ids).logits, loaded(ids).logits)
    assert torch.equal(opened.lm_head.weight, opened.model.embed_tokens.weight) == tied


def test_model_folder_with_a_missing_shard_is_refused(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="4KB")
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(Refused, match=r"weights cannot be loaded"):
        built(tmp_path)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "deliberately wrong"])
def test_exported_chat_model_stops_at_its_end_of_turn_token_only_if_the_generation_config_names_it(tmp_path, ends):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ids = {token: i for i, token in enumerate(["<unk>", "<end>", "<|im_start|>", "<|im_end|>", "a", "b"])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>", **special)
    tokenizer.chat_template = template
    assert end_of_turn(tokenizer) == ids["<|im_end|>"]
    network = llama(tie_word_embeddings=False, eos_token_id=ids["<end>"])
    with torch.no_grad():  # after every token, <|im_end|> gets the largest logit
        network.model.embed_tokens.weight.fill_(1.0)
        network.lm_head.weight.fill_(0.0)
        hidden = network.model(torch.tensor([[4]])).last_hidden_state[0, 0]
        network.lm_head.weight[ids["<|im_end|>"]] = hidden
    if ends:
        network.generation_config.eos_token_id = end_tokens(tokenizer, network)
    export(network, ModelFolder(tmp_path / "out", tokenizer))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template
    written = opened.generate(torch.tensor([[4, 5]]), do_sample=False, max_new_tokens=6)[0, 2:].tolist()
    assert written == [ids["<|im_end|>"]] * (1 if ends else 6)


def test_export_dtype_that_cannot_hold_the_weights_is_refused_with_advice(tmp_path, monkeypatch):
    def overflows(*_):
        raise OverflowError("model.norm.weight holds 100000, more than the largest float16 number, 65504.")

    monkeypatch.setattr(model_folder, "_write", overflows)
    command = SimpleNamespace(run=SimpleNamespace(export=None, export_dtype="float16"), folder=tmp_path)
    training = SimpleNamespace(resumed_from=None, module=SimpleNamespace(ranks=ONE_DEVICE))
    again = rf"export_dtype=float16: model\.norm.*All other files.*export={tmp_path} export_dtype=bfloat16\.$"
    with pytest.raises(Refused, match=again):
        model_folder.leave(training, command, {})
