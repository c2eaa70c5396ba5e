"""A window's update is that of one big batch, also in a short window; and the order of the data never changes."""

import pytest
import torch
from torch import nn

from lowmem import loss as losses
from lowmem.accumulation import fixed
from lowmem.data.loader import MicroBatch, Position, Window
from lowmem.errors import Refused
from tolerances import FP64


def weights_after(config, tokens, batch_size, batches, steps, monkeypatch=None, optim="adamw"):
    """fp64 weights of a small model after `steps` windows of the real module under the real trainer."""
    from lightning.pytorch import Trainer

    from lowmem import fit, model
    from lowmem.data.loader import Sequences, WindowLoader
    from lowmem.module import CausalLM
    from lowmem.precision.plugin import FullPrecision

    cfg = config(f"optim={optim}", "lr=1e-3")
    torch.manual_seed(0)
    network = model.build(model.architecture(**cfg.model), torch.float64, **cfg.model)
    module = CausalLM(
        network, losses.full, fit.optimizer(cfg), fit.instantiate(cfg.scheduler), clip=1.0, clip_value=None
    )
    train = WindowLoader(Sequences(tokens, 16, "train"), batch_size, fixed(batches), seed=0)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        plugins=[FullPrecision()],
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(module, train)
    assert trainer.global_step == steps
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.fixture
def tokens():
    # 13 sequences of 16: windows of 4 x 2 leave a window of 5, whose last micro-batch has one sequence
    import numpy as np

    return np.random.default_rng(0).integers(0, 300, 13 * 16 + 1)


def test_accumulation_is_one_big_batch(config, tokens, monkeypatch):
    """Six windows: three epochs, each with a short last window."""
    # the reference computes the loss in fp32 in `full`; in fp64 here, or rounding would hide an error
    monkeypatch.setattr(losses, "full", fp64_loss)
    big = weights_after(config, tokens, batch_size=8, batches=1, steps=6)
    small = weights_after(config, tokens, batch_size=2, batches=4, steps=6)
    assert (big - small).abs().max() < FP64


def test_a_short_window_divided_by_the_full_size_is_caught(config, tokens, monkeypatch):
    """The deliberately wrong variant: what Lightning does."""
    from lowmem.module import CausalLM

    monkeypatch.setattr(losses, "full", fp64_loss)
    big = weights_after(config, tokens, batch_size=8, batches=1, steps=6)
    right = CausalLM.training_step

    def wrong(self, window: Window, index: int):
        return right(self, window._replace(tokens=8 * 16), index)

    monkeypatch.setattr(CausalLM, "training_step", wrong)
    assert (weights_after(config, tokens, 2, 4, 6, optim="adamw") - big).abs().max() > 1e3 * FP64


def test_a_dropped_micro_batch_is_caught(config, tokens, monkeypatch):
    from lowmem.module import CausalLM

    monkeypatch.setattr(losses, "full", fp64_loss)
    big = weights_after(config, tokens, batch_size=8, batches=1, steps=6)
    right = CausalLM.training_step

    def wrong(self, window: Window, index: int):
        return right(self, window._replace(micro_batches=window.micro_batches[:-1] or window.micro_batches), index)

    monkeypatch.setattr(CausalLM, "training_step", wrong)
    assert (weights_after(config, tokens, 2, 4, 6) - big).abs().max() > 1e3 * FP64


def fp64_loss(model: nn.Module, input_ids, labels):
    logits = model(input_ids=input_ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_the_logged_loss_is_the_mean_over_tokens(config, fit):
    whole, _ = fit("batch_size=8", "max_steps=1", "lr=1e-9")
    parts, _ = fit("batch_size=2", "accumulation=fixed", "accumulation.batches=4", "max_steps=1", "lr=1e-9", folder="b")
    assert whole["tokens"] == parts["tokens"]
    assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)


def test_a_window_without_micro_batches_is_refused():
    with pytest.raises(Refused, match="at least one"):
        fixed(0)


def test_micro_batches_count_their_tokens():
    rows = torch.zeros(3, 5, dtype=torch.long)
    assert MicroBatch(rows, rows).tokens == 15
    assert Position().epoch == 0
