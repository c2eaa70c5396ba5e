"""Tests the figures in metrics.csv that tell how evenly a mixture of experts uses its experts."""

import csv
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem.report.expert_balance import ExpertBalance

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SIZES |= {"vocab_size": 300, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


def mixture(**keys):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SIZES | keys)).train()


def route(model, scores):
    """Makes each router use the same scores for every token.

    Args:
        scores: (4,), the score of each expert.
    """
    for block in model.model.layers:
        block.mlp.gate.forward = lambda x: (
            scores.expand(len(x), 4),
            torch.ones(len(x), 1),
            torch.stack([scores.topk(1).indices] * len(x)),
        )


def test_expert_entropy_is_0_if_one_expert_is_used_and_1_if_all_are_used_evenly():
    model = mixture()
    balance = ExpertBalance(model)
    route(model, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    model(input_ids=torch.arange(8)[None])
    assert balance.read() == {"expert_entropy": 0.0, "expert_largest_share": 1.0}
    assert balance.read() == {}
    for expert in range(4):
        route(model, torch.eye(4)[expert])
        model(input_ids=torch.arange(8)[None])
    assert balance.read() == {"expert_entropy": pytest.approx(1.0), "expert_largest_share": 0.25}


def test_expert_entropy_equals_the_entropy_of_counted_router_choices():
    model, chosen = mixture(num_experts_per_tok=2, num_hidden_layers=1), []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
    balance = ExpertBalance(model)
    model(input_ids=torch.arange(40)[None])
    counts = torch.cat(chosen).flatten().bincount(minlength=4) / 80
    entropy = -sum(share * math.log(share) for share in counts.tolist() if share) / math.log(4)
    assert balance.read()["expert_entropy"] == pytest.approx(entropy)


def test_expert_balance_is_counted_for_experts_that_receive_token_counts_instead_of_indices():
    torch.manual_seed(0)
    sizes = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    sizes |= {"kv_channels": 8, "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4}
    config = AutoConfig.for_model("jetmoe", **sizes, num_experts_per_tok=1)
    model = AutoModelForCausalLM.from_config(config).train()
    balance = ExpertBalance(model)
    model(input_ids=torch.arange(40)[None])
    read = balance.read()
    assert 0 < read["expert_entropy"] <= 1 and 0.25 <= read["expert_largest_share"] < 1


def test_expert_balance_does_not_count_forward_passes_in_eval_mode():
    model = mixture().eval()
    balance = ExpertBalance(model)
    model(input_ids=torch.arange(8)[None])
    assert balance.read() == {}


def test_run_of_a_mixture_of_experts_logs_expert_balance_in_metrics_csv(fit, tmp_path):
    shape = ", ".join(f"{key}: {value}" for key, value in SIZES.items())
    model = ["model=hf", "model.name=mixture", "model.pretrained=false", "lr=1e-3"]
    _, run = fit(*model, f"model.architecture={{model_type: qwen3_moe, {shape}}}", folder="run")
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert 0 < float(rows[0]["expert_entropy"]) <= 1 and 0.25 <= float(rows[0]["expert_largest_share"]) <= 1
