"""Defines small models that several tests train, a loss in fp64, and a stand-in for a tokenizer."""

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

VOCABULARY, WIDTH = 500, 32


def network(model_type="gpt2", **changes):
    torch.manual_seed(0)
    if model_type == "gpt2":
        shape = {
            "n_positions": 32,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 2,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        }
    else:
        shape = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        known = CONFIG_MAPPING[model_type]()
        shape |= {
            key: value for key, value in {"num_key_value_heads": 1, "head_dim": 16}.items() if hasattr(known, key)
        }
    config = AutoConfig.for_model(model_type, **({"vocab_size": VOCABULARY} | shape | changes))
    return AutoModelForCausalLM.from_config(config).train()


def shaped(model_type, layers=5, dropout=0.0):
    """Returns a small model of an architecture. Args: layers: number of blocks; dropout: probability of each kind of
    dropout that the architecture has."""
    changes = {"opt": {"ffn_dim": 64, "word_embed_proj_dim": WIDTH}, "gpt2": {"n_layer": layers}}.get(model_type, {})
    if model_type != "gpt2":
        changes["num_hidden_layers"] = layers
    drops = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout", "attention_dropout")
    known = CONFIG_MAPPING[model_type]()
    return network(model_type, **changes, **{name: dropout for name in drops if hasattr(known, name)})


def fp64_loss(model: nn.Module, batch):
    """Returns the summed cross entropy in the dtype of the logits, whereas `full` computes the cross entropy in
    fp32."""
    logits = model(**batch.inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")


class Nothing:
    """Stands in for a tokenizer. Its `save_pretrained` writes nothing."""

    is_fast = False

    def save_pretrained(self, folder):
        pass
