"""Tests mixtures of experts: the training loss includes the auxiliary loss that the config requests. The auxiliary loss
of a micro-batch is weighted by the number of its tokens."""

import csv
import json
from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

import parity
from lowmem.config.instantiate import instantiate
from lowmem.data.loader import START, MicroBatch, Window
from lowmem.model.auxiliary_loss import AuxiliaryLoss
from lowmem.system.errors import Refused
from lowmem.techniques.gradient_checkpointing import policies
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.training.build import optimizer
from lowmem.training.module import CausalLM, Update
from networks import VOCABULARY, network

pytestmark = pytest.mark.kernels
FACTOR = 0.25  # coefficient of the auxiliary loss
NEWER = Version("5.23")  # of transformers: older versions ignore the mask or output_router_logits in some families
MIXTRAL = {"router_aux_loss_coef": FACTOR, "num_local_experts": 4, "num_experts_per_tok": 2}


def mixture(asked=True, **changes):
    return network("mixtral", output_router_logits=asked, **MIXTRAL, **changes)


def window(*ignored):
    """Returns a window of micro-batches of 2 x 12 tokens. Args: ignored: number of ignored labels per micro-batch."""
    torch.manual_seed(3)
    batches = []
    for count in ignored:
        ids = torch.randint(0, VOCABULARY, (2, 13))
        labels = ids[:, 1:].clone()
        labels[0, :count] = losses.IGNORED
        batches.append(MicroBatch(ids[:, :-1], labels))
    return Window(batches, tokens := sum(batch.learned_tokens for batch in batches), tokens, tokens, START)


def gradients(config, model, loss, window):
    """Returns the gradients of one window, computed by the training module."""
    kept = {}

    class Looks(CausalLM):
        def on_before_optimizer_step(self, optimizer):
            kept.update({name: p.grad.clone() for name, p in self.model.named_parameters()})

    cfg = config("optim=sgd", "clip=null", "max_steps=1")
    module = Looks(model, loss, Update(optimizer(cfg), instantiate(cfg.scheduler)))
    parity.trainer(cfg, list(map(instantiate, cfg.plugins)), []).fit(module, Once(window))
    return kept


class Once:
    def __init__(self, window):
        self.window = window

    def __iter__(self):
        yield self.window


def expected(model, window, factor=FACTOR):
    """Returns the gradients of the reference loss. This loss is a mean over the window's tokens: each token contributes
    its own loss plus `factor` times the auxiliary loss of its micro-batch."""
    total = 0.0
    for batch in window.micro_batches:
        output = model(input_ids=batch.input_ids, use_cache=False)
        total += losses.full(model, batch) + factor * output.aux_loss * batch.learned_tokens
    model.zero_grad()
    (total / window.learned_tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def worst(ours, theirs):
    return max(((ours[name] - g).abs().max() / g.abs().max()).item() for name, g in theirs.items())


@pytest.mark.parametrize("loss", [losses.full, losses.Chunked(7)], ids=["full", "chunked"])
@pytest.mark.parametrize("ignored", [(0,), (0, 9, 3)], ids=["one micro-batch", "three of unequal tokens"])
def test_auxiliary_loss_gradients_equal_the_token_weighted_reference(config, loss, ignored):
    ours, theirs = gradients(config, mixture(), loss, window(*ignored)), expected(mixture(), window(*ignored))
    assert worst(ours, theirs) < 1e-5
    # wrong variants: auxiliary loss left out, or doubled
    assert worst(ours, expected(mixture(), window(*ignored), 0.0)) > 1e-2
    assert worst(ours, expected(mixture(), window(*ignored), 2 * FACTOR)) > 1e-2


def test_transformers_loss_of_one_micro_batch_is_cross_entropy_plus_the_weighted_auxiliary_loss(config):
    """The model's own loss shifts labels. In a row of equal ids, each id is also its next token, so a shift has no
    effect."""
    row = torch.full((2, 13), 7)
    batch = MicroBatch(row[:, :-1], row[:, 1:])
    model = mixture()
    output = model(input_ids=batch.input_ids, labels=torch.full_like(batch.input_ids, 7), use_cache=False)
    plain = losses.full(model, batch) / batch.learned_tokens
    assert (output.loss - plain).item() == pytest.approx(FACTOR * output.aux_loss.item(), rel=1e-4)


def test_auxiliary_loss_gradients_with_activation_checkpointing_equal_those_without_bit_for_bit(config):
    kept = gradients(config, mixture(), losses.full, window(0, 4))
    model = mixture()
    policies.every_layer(model)
    again = gradients(config, model, losses.full, window(0, 4))
    assert all(torch.equal(again[name], g) for name, g in kept.items())


# Sizes, under the names that different models use in their configs.
SMALL = {
    **dict.fromkeys(("num_local_experts", "num_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": FACTOR,
    "aux_loss_coef": FACTOR,  # of JetMoe
}
FAMILIES = [
    "ernie4_5_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "jamba",
    "jetmoe",
    "laguna",
    "mellum",
    "minimax",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
]


@pytest.mark.filterwarnings("ignore")  # warnings about kernels that are not installed
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in CONFIG_MAPPING])
def test_filler_is_excluded_from_the_auxiliary_loss_without_an_attention_mask(family):
    """The reference is the auxiliary loss of transformers for the same rows with an attention mask."""
    known = CONFIG_MAPPING[family]()
    shape = {name: size for name, size in SMALL.items() if hasattr(known, name)}
    model, bodies = network(family, output_router_logits=True, **shape).eval(), []
    ids, real = torch.randint(2, VOCABULARY, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    real[0, 4:] = False
    ids[~real] = 0
    other = ids.where(real, 7)
    with torch.no_grad():
        right = model(input_ids=ids, attention_mask=real.long(), use_cache=False).aux_loss
        auxiliary = AuxiliaryLoss(model)
        if not isinstance(right, torch.Tensor):
            assert Version(transformers.__version__) < NEWER
            with pytest.raises((Refused, AttributeError)):  # AttributeError: the model fails in its own code
                model(input_ids=ids, use_cache=False)
            return
        right = right.item()
        model.base_model.register_forward_pre_hook(lambda *called: bodies.append(called[2]), with_kwargs=True)
        found = []
        for rows in (ids, other):
            auxiliary.count(real)
            model(input_ids=rows, use_cache=False)
            found.append(auxiliary.take().item() / FACTOR)
        model(input_ids=ids, use_cache=False)  # wrong variant: all tokens count
        found.append(auxiliary.take().item() / FACTOR)
    if family == "ernie4_5_moe" and Version(transformers.__version__) < NEWER:
        return  # its auxiliary loss does not use the mask
    roundings = 1e-6  # relative errors of a loss near 2 in fp32
    assert found[:2] == pytest.approx([right, right], rel=roundings) and abs(found[2] - right) > 100 * roundings
    assert all(body.get("attention_mask") is None for body in bodies)


@pytest.mark.parametrize("loss", [losses.full, losses.Chunked(7)], ids=["full", "chunked"])
def test_filler_behind_a_row_changes_no_gradient_of_a_mixture_of_experts(config, loss):
    """Compares a row with and without filler behind it. In the wrong variant, the row with filler has no `real` mask,
    and the gradients must change."""
    short = window(0).micro_batches[0].each(lambda tensor: tensor[:1, :5])
    filled = torch.nn.functional.pad(short.input_ids, (0, 7))
    labels = torch.nn.functional.pad(short.labels, (0, 7), value=losses.IGNORED)
    padded = MicroBatch(filled, labels, real=torch.arange(12)[None] < 5)
    alone, right = (gradients(config, mixture(), loss, Window([b], 5, 5, 5, START)) for b in (short, padded))
    assert worst(right, alone) < 1e-5
    wrong = gradients(config, mixture(), loss, Window([replace(padded, real=None)], 5, 5, 5, START))
    assert worst(wrong, alone) > 1e-3


def test_model_without_output_router_logits_adds_no_auxiliary_loss(config):
    ours = gradients(config, mixture(asked=False), losses.full, window(0))
    assert worst(ours, expected(mixture(), window(0), 0.0)) < 1e-5


def test_training_with_an_auxiliary_loss_leaves_the_loss_function_of_the_model_unchanged(config):
    model = mixture()
    before = model.loss_function
    gradients(config, model, losses.full, window(0))
    assert model.loss_function is before


def test_run_reports_the_auxiliary_loss_in_its_output_summary_and_metrics(command, tmp_path, small):
    shape = "{model_type: mixtral, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    shape += "num_attention_heads: 2, num_key_value_heads: 1, num_local_experts: 4, output_router_logits: true}"
    lines = ["model=hf", "model.name=mixture", "model.pretrained=false", f"model.architecture={shape}", "lr=1e-3"]
    code, said = command(*lines)
    assert code == 0 and "auxiliary loss" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["auxiliary_loss"] > 0
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert float(rows[0]["auxiliary_loss"]) > 0


def test_output_router_logits_of_a_model_without_experts_is_refused():
    model = network("llama")
    model.config.output_router_logits = True
    AuxiliaryLoss(model)
    with pytest.raises(Refused, match=r"Type \+model.architecture.output_router_logits=false"):
        model(input_ids=torch.randint(0, VOCABULARY, (1, 4)), use_cache=False)
