"""Trains a small model with resident or streamed weights. The results must be equal for both placements."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from lightning.pytorch import Callback
from transformers import AutoConfig

import parity
from lowmem.config.instantiate import instantiate
from lowmem.model.loading import Described
from lowmem.training.build import callbacks, causal_lm
from lowmem.training.module import CausalLM
from same import same
from two_models import configured, linked_by, windows

SMALL = {"vocab_size": parity.VOCABULARY, "tie_word_embeddings": True}
GPT2 = {"n_positions": 32, "n_embd": 64, "n_layer": 4, "n_head": 2}  # dropout has its default of 0.1
OTHER = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
OTHER |= {"intermediate_size": 128, "head_dim": 32, "attention_dropout": 0.1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}
# model type -> config. In qwen3_moe, the auxiliary loss adds a second gradient in each block, besides the gradient of
# the block's output.
MODELS = {
    "gpt2": GPT2 | SMALL,
    "llama": OTHER | SMALL | {"tie_word_embeddings": False},
    "qwen3": OTHER | SMALL,
    "qwen3_moe": OTHER | SMALL | EXPERTS,
}
POLICIES = {name: [] for name in ("every_layer", "sqrt", "selective", "offload", "offload_attention")}
POLICIES |= {"every_k": ["gradient_checkpointing.k=2"]}
SCALE = {"16-master": ["precision.init_scale=3e5"]}  # so high that the first steps overflow and are skipped


class Trained(NamedTuple):
    losses: list[float]
    masters: list[torch.Tensor]
    weights: list[torch.Tensor]  # in 16 bits
    state: list[dict]  # the optimizer's
    skipped: int
    module: CausalLM

    def same(self, other):
        return same(self[:5], other[:5])


class Sees(Callback):
    """Records the loss of each window, and the masters and weights at the end of training, before `stop` may replace
    the weights."""

    def __init__(self):
        self.losses = parity.Losses()

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.seen.append(float(outputs["loss"]))

    def on_train_end(self, trainer, module):
        module.arrived()
        network = list(module.model.parameters())
        self.masters = [module.full_precision(p).clone() for p in network]
        self.weights = [module.stored(p).clone() for p in network]


def lines(model, *more, precision="bf16-master", policy="every_layer", optim="adamw8bit", clip="norm"):
    """Returns a value for the argument `arguments` of `trained`."""
    chosen = (f"gradient_checkpointing={policy}", *POLICIES.get(policy, []), *SCALE.get(precision, []), *more)
    return (precision, optim, clip, "fixed", "linear", *chosen)


def built(cfg, model, **changed):
    torch.manual_seed(0)
    return causal_lm(cfg, Described(cfg.model, AutoConfig.for_model(model, **(MODELS[model] | changed))))


def trained(config, weights, model, arguments, lane=None, changed=(), prepare=lambda module: None) -> Trained:
    """Trains a model, and returns the results.

    Args:
        weights: overrides that place the weights.
        arguments: see `lines`.
        lane: lane for copies of gradients and weights; None: the lane of the device.
        changed: changed keys of the model's config.
        prepare: called with the module before training.
    """
    precision, optim, clip, accumulation, scheduler, *more = arguments
    cfg = configured(config, precision, optim, clip, accumulation, scheduler, *more, *weights)
    module = built(cfg, model, **dict(changed))
    plugins = list(map(instantiate, cfg.plugins))
    if lane is not None:
        module.weights.lane = lane
    prepare(module)
    seen = Sees()
    trainer = parity.trainer(cfg, plugins, [*callbacks(cfg), seen])
    torch.manual_seed(1)  # dropout
    with nullcontext() if lane is None else linked_by(lane):
        trainer.fit(module, windows(cfg))
    assert trainer.global_step == cfg.max_steps
    return Trained(
        seen.losses.seen,
        seen.masters,
        seen.weights,
        list(trainer.optimizers[0].state.values()),
        module.skipped_steps,
        module,
    )
