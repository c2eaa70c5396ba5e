"""Tests the parts of the RoundPipe and TrainStream loops that run without CUDA and without these packages."""

from pathlib import Path

import pytest
import torch
from benchmarks.card.case import Here
from benchmarks.card.peer_loops import Block, End, Start, Step, WithLoss, layers_of
from benchmarks.card.peers import built

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def network_and_step(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Step]:
    network, (step,) = built(Here("cpu", Path(tmp_path_factory.mktemp("here"))), 1)
    return network, step


def test_roundpipe_and_trainstream_benchmarks_get_a_bf16_network_and_all_rows_with_shifted_labels(network_and_step):
    network, step = network_and_step
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert step.ids.shape == step.labels.shape == (8, 16)
    assert torch.equal(step.ids[:, 1:], step.labels[:, :-1])


def test_roundpipe_layers_compute_the_hidden_states_of_the_network(network_and_step):
    network, step = network_and_step
    start, *blocks, end = layers_of(network)
    assert isinstance(start, Start) and isinstance(end, End) and all(isinstance(block, Block) for block in blocks)
    state = start(*step)
    for block in blocks:
        state = block(state)
    hidden, *_, labels = state
    torch.testing.assert_close(end.norm(hidden), network.model(step.ids).last_hidden_state)
    assert labels is step.labels


def test_trainstream_loss_receives_hidden_states_head_and_tokens(network_and_step):
    network, step = network_and_step
    seen = {}
    WithLoss(network, lambda *of, **words: seen.update(words, of=of))(*step)
    hidden, weight, labels = seen["of"]
    assert hidden.shape == (*step.ids.shape, network.config.hidden_size)
    assert weight is network.lm_head.weight and labels is step.labels and seen["num_items"] == step.ids.numel()
