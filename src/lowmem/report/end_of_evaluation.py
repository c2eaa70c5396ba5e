"""Lets callbacks compute with the model at the end of an evaluation without affecting training."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import PreTrainedTokenizerBase

from lowmem.memory.meter import MemoryMeter
from lowmem.system.stop import Stop


class EndOfEvaluation:
    """Runs computations at the end of an evaluation. Args: seed: seed of their random numbers, equal for every
    evaluation and rank."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, stop: Stop, meter: MemoryMeter) -> None:
        self.tokenizer, self.seed, self.stop, self.meter = tokenizer, seed, stop, meter

    def stopped(self) -> bool:
        """Returns whether the run is ending, so that further computations are skipped."""
        return self.stop.interrupted

    @contextmanager
    def computing(self, trainer: Trainer, module: LightningModule) -> Iterator[None]:
        """Meters the memory of forward passes inside the `with`, and restores the random states when it ends."""
        cards = [module.device] if module.device.type == "cuda" else []
        metered = nullcontext() if trainer.sanity_checking else self.meter.evaluating()
        with metered, torch.random.fork_rng(cards), trainer.precision_plugin.forward_context():
            yield
