"""Tests that the benchmark loop of TRL's SFTTrainer has the losses and weights of a plain loop."""

from typing import NamedTuple

import pytest
import torch
from benchmarks.loops import Materials
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

# transformers 5.23 warns about an argument that transformers 5.17 needs
pytestmark = [pytest.mark.docs, pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")]
STEPS, PARTS, ROWS, T, VOCABULARY = 3, 2, 2, 8, 32


class Rows(NamedTuple):
    input_ids: Tensor
    labels: Tensor


class Losses:
    """Stands in for the watch of a benchmark. `of_steps` has the sum of the micro-batch losses of each step."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []
        self.ended = 0

    def begin(self) -> None:
        self.of_steps.append(0.0)

    def add(self, loss: Tensor) -> None:
        self.of_steps[-1] += float(loss)

    def end(self) -> None:
        self.ended += 1


def materials() -> Materials:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=T, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    network = GPT2LMHeadModel(config).train()
    tokens = torch.randint(VOCABULARY, (STEPS, PARTS, ROWS, T + 1))
    windows = [[Rows(part[:, :-1], part[:, 1:]) for part in step] for step in tokens]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Materials(network, windows, optimizer, schedule, False, False, PARTS, "cpu")


def plain(loop: Materials) -> list[float]:
    losses = []
    for window in loop.windows:
        losses.append(0.0)
        for rows in window:
            logits = loop.network(rows.input_ids).logits
            loss = cross_entropy(logits.flatten(0, 1), rows.labels.flatten()) / PARTS
            loss.backward()
            losses[-1] += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(loop.network.parameters(), 1.0)
        loop.optimizer.step()
        loop.schedule.step()
        loop.optimizer.zero_grad()
    return losses


def test_sft_trainer_of_trl_has_the_losses_and_weights_of_a_plain_loop():
    pytest.importorskip("trl")
    from benchmarks.card.sft import sft

    ours, theirs, watch = materials(), materials(), Losses()
    losses = plain(ours)
    sft(theirs, watch)
    assert watch.ended == STEPS
    assert not theirs.network.is_gradient_checkpointing  # the default of SFTConfig would enable it
    assert watch.of_steps == pytest.approx(losses, abs=1e-5)
    for one, other in zip(ours.network.parameters(), theirs.network.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)
