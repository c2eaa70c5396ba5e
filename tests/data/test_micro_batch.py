"""Tests that a micro-batch class defines its tensors and the weight of a micro-batch in the mean loss, so that a loss
over pairs needs no change of the training loop.

The data and the loss of these tests exist only in this file. A pair has two rows and a margin, and its loss is
softplus(cross-entropy of the better row - cross-entropy of the worse row + margin). The losses of all pairs have equal
weights, whatever the number of tokens of a pair.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import SMALL
from lowmem.data import random_tokens
from lowmem.data.loader import IGNORED, MicroBatch, Share
from lowmem.data.mix import Mix
from lowmem.data.opening import Opened, RowSettings
from lowmem.fit import fit
from lowmem.system.errors import Refused
from lowmem.techniques.loss.cross_entropy import Loss
from lowmem.training.build import causal_lm

HERE = __name__


@dataclass(frozen=True, eq=False)
class Pairs(MicroBatch):
    """Micro-batch in which row 2i is the better answer of pair i, and row 2i + 1 the worse answer."""

    UNIT: ClassVar[str] = "pairs"
    ROWS: ClassVar[int] = 2
    margin: Tensor | None = None  # (B,), equal for both rows of a pair

    @property
    def weight(self) -> int:
        return int((self.labels != IGNORED).any(1).sum()) // 2


class DrawnPairs(random_tokens.Drawn):
    def __len__(self) -> int:
        return self.count // 2

    def micro_batch(self, indices: np.ndarray) -> Pairs:
        rows = super().micro_batch(np.repeat(2 * indices, 2) + np.tile([0, 1], len(indices)))
        labels = rows.labels.clone()
        for row, index in enumerate(np.repeat(indices, 2)):
            labels[row, 5 + index % 7 :] = IGNORED  # pairs differ in their number of learned tokens
        return Pairs(rows.input_ids, labels, margin=torch.from_numpy(np.repeat(indices % 3 / 10, 2)).float())

    @classmethod
    def example(cls, batch_size: int, seq_len: int) -> Pairs:
        rows = super().example(2 * batch_size, seq_len)
        return Pairs(rows.input_ids, rows.labels, margin=torch.zeros(2 * batch_size))


class PairSource(random_tokens.Random):
    def opened(self, wanted: RowSettings) -> Opened:
        text = super().opened(wanted)
        pairs = [DrawnPairs(**vars(rows)) for rows in (text.train, text.val[""])]
        return Opened(text.tokens, pairs[0], {"": pairs[1]})

    @classmethod
    def rows_class(cls, data: Mapping) -> type[DrawnPairs]:
        return DrawnPairs


class PairLoss(Loss):
    needs = Pairs

    def __call__(self, model, batch):
        logits = model(**batch.inputs, use_cache=False).logits.float()
        each = F.cross_entropy(logits.transpose(1, 2), batch.labels, ignore_index=IGNORED, reduction="none").sum(1)
        better, worse = each.view(-1, 2).unbind(1)
        real = (batch.labels != IGNORED).any(1)[::2]
        return (F.softplus(better - worse + batch.margin[::2]) * real).sum()


PAIRS = f"data._target_={HERE}.PairSource", f"loss._target_={HERE}.PairLoss", "~loss._partial_"
RUN = ("data=random", "loss=full", "data.rows=48", "data.val_rows=8", "max_steps=3", "optim=sgd", "clip=null", *PAIRS)
SPLIT = "batch_size=1", "accumulation=fixed", "accumulation.batches=4"


def trained(config, folder: Path, *overrides: str) -> dict:
    return fit(config(*RUN, *overrides, base=SMALL), folder)


@pytest.mark.kernels
def test_pair_loss_with_4_accumulated_micro_batches_equals_the_mean_over_pairs_of_one_batch(
    config, tmp_path, monkeypatch
):
    """The two losses differ by a relative error of about 1e-7, because fp32 losses are summed in different orders.
    Wrong variant: weights that count tokens, as for plain text, change the loss by about 1 %."""
    whole = trained(config, tmp_path / "whole", "batch_size=4")
    parts = trained(config, tmp_path / "parts", *SPLIT)
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-5)
    monkeypatch.setattr(Pairs, "weight", MicroBatch.learned_tokens)
    assert trained(config, tmp_path / "wrong", *SPLIT)["val_loss"] != pytest.approx(whole["val_loss"], rel=1e-3)


def test_planner_predicts_the_memory_of_four_rows_for_two_pairs(config, tmp_path):
    """Two pairs are four rows, so both plans must reserve the same memory within 1 %."""
    pairs = trained(config, tmp_path / "pairs", "plan=check", "batch_size=2")
    rows = fit(config(*RUN[:-3], "plan=check", "batch_size=4", base=SMALL), tmp_path / "rows")
    assert pairs["predicted"]["reserved"] == pytest.approx(rows["predicted"]["reserved"], rel=0.01)


def test_rows_of_one_pair_stay_on_one_device():
    batch = DrawnPairs((0, 0), 12, 257, 16).micro_batch(np.arange(3))
    first, second, third = (Share(1, rank, 3).rows_of(batch) for rank in range(3))
    assert [len(one.input_ids) for one in (first, second, third)] == [2, 2, 2]
    assert torch.equal(torch.cat([one.margin for one in (first, second, third)]), batch.margin)
    empty = Share(1, 3, 4).rows_of(batch)
    assert empty.weight == empty.learned_tokens == 0 and len(empty.margin) == 2 and type(empty) is Pairs


def test_extra_tensor_of_a_micro_batch_subclass_is_concatenated_and_moved():
    batch = DrawnPairs((0, 0), 12, 257, 16).micro_batch(np.arange(2))
    assert list(batch.tensors) == ["input_ids", "labels", "margin"]
    both = Pairs.concatenated([batch, batch])
    assert len(both.margin) == len(both.labels) == 8 and both.position_ids is None
    assert batch.to(torch.device("meta")).margin.device.type == "meta"


def test_micro_batch_is_pinned_and_copied_without_blocking_to_cuda_but_not_to_the_cpu(monkeypatch):
    """The host would wait for a copy from pageable memory. No card is needed, because a tensor subclass records the
    calls of `to`."""
    asked = []

    class Recorded(torch.Tensor):
        pinned = False

        def pin_memory(self):
            copy = self.clone()
            copy.pinned = True
            return copy

        def to(self, device, **how):
            asked.append((str(device), self.pinned, how))
            return self

    batch = DrawnPairs((0, 0), 12, 257, 16).micro_batch(np.arange(2))
    stand_in = batch.counted().each(lambda tensor: tensor.as_subclass(Recorded))
    stand_in.to(torch.device("cuda", 0))
    stand_in.to("cpu")
    card, host = ("cuda:0", True, {"non_blocking": True}), ("cpu", False, {})
    assert asked == [card] * len(batch.tensors) + [host] * len(batch.tensors)


@pytest.mark.gpu
def test_moving_a_micro_batch_to_a_card_does_not_synchronize():
    batch = DrawnPairs((0, 0), 12, 257, 16).micro_batch(np.arange(2)).counted()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to(torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(moved.tensors[name].cpu(), tensor) for name, tensor in batch.tensors.items())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (PAIRS[1:], "averages over pairs and needs a Pairs"),
        (PAIRS[:1], "averages over tokens and needs a MicroBatch"),
    ],
)
def test_pair_loss_on_tokens_and_token_loss_on_pairs_are_refused(overrides, words, config):
    """The refusal comes before weights are loaded, so `causal_lm` needs no description of the model here."""
    run = config("data=random", "loss=full", *overrides, base=SMALL)
    with pytest.raises(Refused, match=words):
        causal_lm(run, None)


def test_mixture_of_pairs_is_refused():
    with pytest.raises(Refused, match="excludes sources such as data=preference"):
        Mix({"a": PairSource(8, 8), "b": random_tokens.Random(8, 8)})
