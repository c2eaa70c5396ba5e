"""Tests models divided into pipeline stages: the weights of each stage, and the results of all stages in sequence."""

import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from benchmarks.architectures import build_module, configured, shrunk

from lowmem.data.loader import MicroBatch
from lowmem.system.errors import Refused
from lowmem.techniques.gradient_checkpointing import policies
from lowmem.techniques.strategy.stages import Stage, balanced, divided, same

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gptj", "opt")
POPULAR = (
    *("gpt_neox", "bloom", "falcon", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere", "granite"),
    *("starcoder2", "qwen3_moe", "gpt_oss", "mixtral", "modernbert-decoder", "rembert", "recurrent_gemma", "mamba2"),
)
pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("as_for_families")]


def a_model(name, **changes):
    module, ids = build_module(configured(shrunk(name) | changes))
    return module.model.eval(), MicroBatch(ids[:, :-1], ids[:, 1:], torch.arange(ids.shape[1] - 1).expand(2, -1) % 7)


def stages_of(model, count):
    """Returns the stages, each in a separate model that has no memory for the weights of other stages."""
    copies = [copy.deepcopy(model) for _ in range(count)]
    stages = [Stage(one, divided(one, count), number) for number, one in enumerate(copies)]
    for stage in stages:
        stage.empty()
    return stages


def in_a_row(stages, micro_batch):
    """Returns the logits (B, T, V) that the stages compute one after another."""
    hidden = None
    for stage in stages[:-1]:
        with stage.entered(hidden, micro_batch.input_ids):
            hidden = stage.hidden(**micro_batch.inputs, use_cache=False)
    with stages[-1].entered(hidden, micro_batch.input_ids):
        return stages[-1].model(**micro_batch.inputs, use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in POPULAR)])
def test_pipeline_stages_in_sequence_have_the_logits_of_the_model_bit_exactly(name):
    model, micro_batch = a_model(name)
    whole = model(**micro_batch.inputs, use_cache=False).logits
    for count in (2, 3) if name in FAMILIES else (2,):
        assert same(model, divided(model, count), micro_batch)
        assert torch.equal(in_a_row(stages_of(model, count), micro_batch), whole)


@pytest.mark.wrong
@torch.no_grad()
def test_last_pipeline_stage_with_zeros_as_input_gives_other_logits():
    model, micro_batch = a_model("llama")
    first, last = stages_of(model, 2)
    with last.entered(torch.zeros(micro_batch.input_ids.numel(), last.width), micro_batch.input_ids):
        lost = last.model(**micro_batch.inputs, use_cache=False).logits
    assert not torch.allclose(lost, in_a_row([first, last], micro_batch))


@torch.no_grad()
def test_model_whose_blocks_have_additional_inputs_has_other_logits_when_divided_into_pipeline_stages():
    model, micro_batch = a_model("gemma4")  # its blocks read separate embeddings, so `Pipeline.shard` refuses it
    whole = model(**micro_batch.inputs, use_cache=False).logits
    assert not same(model, divided(model, 2), micro_batch)
    assert torch.equal(model(**micro_batch.inputs, use_cache=False).logits, whole)  # `same` restores the model
    assert not torch.allclose(in_a_row(stages_of(model, 2), micro_batch), whole)


def test_each_weight_is_on_one_pipeline_stage_and_a_tied_weight_on_two():
    model, _ = a_model("gpt2")
    division = divided(model, 2)
    names = {p: name for name, p in model.named_parameters()}
    shared = [names[p] for p, stages in division.holders.items() if len(stages) != 1]
    assert shared == ["transformer.wte.weight"] and model.lm_head.weight is model.transformer.wte.weight
    bytes_of = sum(p.nbytes for p in model.parameters()) + model.lm_head.weight.nbytes
    assert sum(map(division.bytes, range(2))) == bytes_of


def test_pipeline_stage_has_memory_for_its_own_weights_only_and_the_names_of_all_weights():
    model, _ = a_model("gpt2")
    names = [name for name, _ in model.named_parameters()]
    for number, stage in enumerate(stages_of(model, 2)):
        named = dict(stage.model.named_parameters())
        assert list(named) == names
        held = sum(p.nbytes for p in named.values() if not p.is_meta)
        assert held == divided(model, 2).bytes(number) < sum(p.nbytes for p in model.parameters())
        assert {name for name, p in named.items() if p.is_meta} == {
            name for name, p in named.items() if number not in stage.holders[p]
        }


@pytest.mark.parametrize(
    ("sizes", "before", "after", "stages", "cuts"),
    [
        ([1, 1, 1, 1], 0, 0, 2, [0, 2, 4]),
        ([1, 1, 1, 1], 2, 0, 2, [0, 1, 4]),
        ([1, 1, 1, 1, 1, 1, 1], 1, 1, 3, [0, 2, 5, 7]),
        ([5, 1, 1, 1], 0, 3, 2, [0, 1, 4]),
        ([1, 1], 100, 0, 2, [0, 1, 2]),
    ],
)
def test_balanced_cuts_make_the_largest_pipeline_stage_as_small_as_possible(sizes, before, after, stages, cuts):
    assert balanced(sizes, before, after, stages) == cuts


def test_pipeline_with_more_stages_than_blocks_is_refused():
    with pytest.raises(Refused, match="devices=4 or fewer"):
        divided(a_model("llama")[0], 5)


def test_pipeline_of_a_model_whose_blocks_are_not_a_plain_sequence_is_refused():
    with pytest.raises(Refused, match="has no base model separate from its head"):
        divided(a_model("llama4_text")[0], 2)

    model, _ = a_model("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(Refused, match="one after another"):
        divided(model, 2)


SEGMENTS = {
    "every_layer": policies.every_layer,
    "every_k": partial(policies.segments, k=3),
    "sqrt": policies.segments,
    "selective": policies.selective,
    "offload": policies.offload,
}


def checkpointed(technique):
    model, micro_batch = a_model("llama")
    SEGMENTS[technique](model.train())
    return stages_of(model, 2)[1], micro_batch


def gradients(last, micro_batch):
    """Runs forward of two micro-batches, and then backward of both, through the last stage. Returns the gradients of
    the stage's two inputs and of its weights."""
    generator = torch.Generator().manual_seed(0)
    shape = micro_batch.input_ids.numel(), last.width
    arrived = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(2)]
    losses = []
    for one in arrived:
        with last.entered(one, micro_batch.input_ids):
            losses.append(last.model(**micro_batch.inputs, use_cache=False).logits.square().sum())
    for loss in losses:
        loss.backward()
    return [one.grad for one in arrived] + [p.grad for p in last.model.parameters() if not p.is_meta]


@pytest.mark.parametrize("technique", SEGMENTS)
def test_checkpointing_across_pipeline_stages_gives_the_gradient_bits_of_no_checkpointing(technique):
    """Segments of several blocks reach across the cut. The second micro-batch runs forward before the first runs
    backward."""
    model, micro_batch = a_model("llama")
    kept = gradients(stages_of(model.train(), 2)[1], micro_batch)
    assert all(map(torch.equal, gradients(*checkpointed(technique)), kept))


def test_stage_that_recomputes_from_the_input_of_another_micro_batch_has_other_gradients(monkeypatch):
    model, micro_batch = a_model("llama")
    kept = gradients(stages_of(model.train(), 2)[1], micro_batch)

    @contextmanager
    def entered(self, arrived, ids):
        self._entering = arrived.view(*ids.shape, -1)
        yield

    monkeypatch.setattr(Stage, "entered", entered)
    assert not all(map(torch.equal, gradients(*checkpointed("every_k")), kept))
