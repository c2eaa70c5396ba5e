"""Computes the mismatched rows of rated answers, before the window or the validation set whose loss depends on them.

The loss of each answer in KTO depends on one mean over the mismatched rows of all micro-batches and devices. So these
rows take a forward pass of their own, without gradients, before the first micro-batch is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lowmem.data.loader import Window
from lowmem.data.rated import RatedBatch


class MismatchedPass(Callback):
    """Sums numbers of a loss over the mismatched rows of a window, or of a validation set, on all devices.

    Args:
        read: returns the numbers of the batch that the loss has computed last.
        hand_over: gives the loss the sum, before the loss of the first micro-batch is computed.
    """

    def __init__(self, read: Callable[[], Tensor], hand_over: Callable[[Tensor], None]) -> None:
        self.read, self.hand_over = read, hand_over

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, window: Window, _: int) -> None:
        if window.weight:
            self.compute(module, [window.micro_batches])

    def on_validation_batch_start(
        self, trainer: Trainer, module: LightningModule, _: Sequence[RatedBatch], index: int, number: int = 0
    ) -> None:
        if index == 0:
            self.compute(module, _groups_of(trainer, module, number))

    def compute(self, module: LightningModule, groups: Iterable[Sequence[RatedBatch]]) -> None:
        """Hands over the sum of all groups. Args: groups: of micro-batches that are in memory at once."""
        sums = [numbers for group in groups for numbers in self._numbers(module, group)]
        self.hand_over(module.ranks.all_sum(torch.stack(sums).sum(0)))

    def _numbers(self, module: LightningModule, micro_batches: Sequence[RatedBatch]) -> list[Tensor]:
        found: list[Tensor | None] = [None] * len(micro_batches)

        def compute(number: int) -> None:
            with module.trainer.precision_plugin.forward_context():
                module(micro_batches[number].mismatched)
            found[number] = self.read()

        training = module.model.training
        module.model.eval()
        with torch.no_grad():
            module.run_at_once([partial(compute, number) for number in range(len(micro_batches))])
        module.model.train(training)
        return found


def _groups_of(trainer: Trainer, module: LightningModule, number: int) -> Iterator[Sequence[RatedBatch]]:
    """Yields the groups that this evaluation reads of a validation set. Args: number: of the set."""
    count = (trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)[number]
    for group in islice(trainer.val_dataloaders[number], count):
        yield [micro_batch.to(module.device) for micro_batch in group]
