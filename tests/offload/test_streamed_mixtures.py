"""Tests that mixtures of experts train bit-identical weights with resident weights and with streamed weights, in both
orders and with or without adapters."""

import pytest
from benchmarks.architectures import shrunk

import parity
import streams
from streams import lines, trained

# What distinguishes the blocks of each family, mostly how they store or compute experts.
FAMILIES = {
    "deepseek_v3": "a dense first block, shared experts",
    "gpt_oss": "stacks (experts, in, out) with biases",
    "jetmoe": "experts of attention too, one product after the other",
    "qwen3_next": "a gate of shared experts, linear attention",
    "llama4_text": "every expert computes all tokens",
    "mixtral": "fused stacks alone",
    "ernie4_5_moe": "a router that transformers keeps in fp32",
}


@pytest.fixture(autouse=True)
def families(monkeypatch):
    for name in FAMILIES:
        keys = {key: value for key, value in shrunk(name).items() if key != "model_type"}
        monkeypatch.setitem(streams.MODELS, name, keys | {"vocab_size": parity.VOCABULARY, "pad_token_id": None})


EXPERTS = "adapter.experts=lora"


@pytest.mark.rows(
    "gpt_oss-none-by_layer", "gpt_oss-qlora-by_micro_batch", "mixtral-qlora adapter.experts=lora-by_layer"
)
@pytest.mark.parametrize("order", ["by_layer", "by_micro_batch"])
@pytest.mark.parametrize("adapter", ["none", "qlora", f"lora {EXPERTS}", f"qlora {EXPERTS}"])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_mixture_of_experts_trains_with_the_bits_of_resident_weights(config, family, adapter, order):
    adapted = [] if adapter == "none" else [*f"adapter={adapter}".split(), "adapter.r=4"]
    asked = lines(family, "max_steps=2", *adapted, policy="every_layer")
    resident = trained(config, ["weights=resident"], family, asked)
    streamed = trained(config, ["weights=streamed", f"weights.order={order}"], family, asked)
    assert streamed.module.weights.fetched > 0
    assert streamed.same(resident)
