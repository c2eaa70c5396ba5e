"""The end of an evaluation, where a callback computes with the model so that training does not notice it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import PreTrainedTokenizerBase

from lowmem.memory.meter import MemoryMeter
from lowmem.stop import Stop


class EndOfEvaluation:
    """Args: seed: of what is drawn there, the same at every evaluation and on every rank."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, stop: Stop, meter: MemoryMeter) -> None:
        self.tokenizer, self.seed, self.stop, self.meter = tokenizer, seed, stop, meter

    def stopped(self) -> bool:
        """Tells that the run is to end, so that nothing more is computed."""
        return self.stop.interrupted

    @contextmanager
    def computing(self, trainer: Trainer, module: LightningModule) -> Iterator[None]:
        """Meters the forward passes within it, and puts random states back behind them."""
        cards = [module.device] if module.device.type == "cuda" else []
        metered = nullcontext() if trainer.sanity_checking else self.meter.evaluating()
        with metered, torch.random.fork_rng(cards), trainer.precision_plugin.forward_context():
            yield
