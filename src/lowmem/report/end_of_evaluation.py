"""Lets callbacks (samples, a user's metric) compute with the model at the end of an evaluation, without any effect on
training."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import PreTrainedTokenizerBase

from lowmem.memory.meter import MemoryMeter
from lowmem.system.stop import Stop


class EndOfEvaluation:
    """The context in which callbacks compute with the model at the end of an evaluation.

    Args:
        tokenizer: the run's tokenizer, for the computations.
        seed: the seed for random numbers of the computations, equal for all evaluations and ranks.
        stop: the callback that knows whether a signal is ending the run.
        meter: measures the memory of the computations.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, stop: Stop, meter: MemoryMeter) -> None:
        self.tokenizer, self.seed, self.stop, self.meter = tokenizer, seed, stop, meter

    def stopped(self) -> bool:
        """Returns True if a signal is ending the run. Callers then skip further computations."""
        return self.stop.interrupted

    @contextmanager
    def computing(self, trainer: Trainer, module: LightningModule) -> Iterator[None]:
        """Context manager for computations with the model: measures their memory (except in Lightning's sanity check),
        applies the precision's context for forward passes, and restores the random states at the end of the `with`
        block."""
        cards = [module.device] if module.device.type == "cuda" else []
        metered = nullcontext() if trainer.sanity_checking else self.meter.evaluating()
        with metered, torch.random.fork_rng(cards), trainer.precision_plugin.forward_context():
            yield
