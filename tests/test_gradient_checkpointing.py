"""Computing a block again gives the same gradients from fewer bytes."""

import pytest
import torch

from lowmem import gradient_checkpointing as checkpointing
from lowmem import loss as losses
from lowmem.errors import Refused
from lowmem.memory.tracker import StorageTracker
from test_loss import network


@pytest.fixture
def batch():
    return torch.randint(0, 500, (2, 32)), torch.randint(0, 500, (2, 32))


def gradients_and_peak(apply, batch, layers=6):
    model = network(n_layer=layers)
    apply(model)
    with StorageTracker({}) as tracker:
        losses.full(model, *batch).backward()
    peak = max(point.total for point in tracker.timeline())
    return [p.grad for p in model.parameters()], peak


def test_every_layer_gives_the_same_bits_from_fewer_bytes(batch):
    kept, peak_kept = gradients_and_peak(checkpointing.none, batch)
    again, peak_again = gradients_and_peak(checkpointing.every_layer, batch)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert peak_again < 0.6 * peak_kept  # 6 blocks of ~25 boundaries each against 6 boundaries and one block


def test_with_dropout_the_second_forward_draws_the_same_numbers(batch):
    def gradients(apply):
        model = network(resid_pdrop=0.5)
        apply(model)
        torch.manual_seed(1)
        losses.full(model, *batch).backward()
        return [p.grad for p in model.parameters()]

    pairs = zip(gradients(checkpointing.none), gradients(checkpointing.every_layer), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_it_works_with_frozen_inputs_and_is_off_in_evaluation(batch):
    model = network()
    checkpointing.every_layer(model)
    model.get_input_embeddings().weight.requires_grad_(False)
    losses.full(model, *batch).backward()
    assert model.transformer.h[0].mlp.c_fc.weight.grad is not None
    model.eval()
    with StorageTracker({}) as tracker:
        loss = losses.full(model, *batch)
    kept = list(tracker.timeline())[-1].total
    plain = network().eval()
    with StorageTracker({}) as tracker:
        plain_loss = losses.full(plain, *batch)
    assert kept >= list(tracker.timeline())[-1].total - model.get_input_embeddings().weight.nbytes
    assert torch.equal(loss, plain_loss)


def test_a_model_without_a_list_of_blocks_is_refused():
    with pytest.raises(Refused, match="gradient_checkpointing=none"):
        checkpointing.every_layer(torch.nn.Linear(2, 2))
