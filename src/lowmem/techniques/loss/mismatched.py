"""Computes the log-ratios of mismatched prompt-answer pairs for KTO, before each window or validation set.

KTO's loss of an answer depends on the mean log-ratio over all mismatched pairs, in all micro-batches and on all
devices. So the model computes all mismatched pairs before the first micro-batch, in separate forward passes without
gradients.
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
    """A callback that runs the model on the mismatched rows of each window and of each validation set. It adds up their
    log-ratios and their number over all devices, and passes both sums to the loss.

    Args:
        read: returns a tensor (2,): the sum of log-ratios and the number of answers of the micro-batch that was
            computed last.
        hand_over: takes the sum (2,) of the results of `read` over all micro-batches and devices, and passes it to the
            loss.
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
        """Runs the model on the mismatched rows of all groups, and passes the sums over all devices to the loss. All
        ranks must call this method.
        Args:
            module: the `CausalLM`.
            groups: lists of micro-batches; all micro-batches of a list are on the device at the same time.
        """
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
    """Yields the groups of micro-batches that the current evaluation reads, copied to the device. Args: number: index
    of the validation set."""
    count = (trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)[number]
    for group in islice(trainer.val_dataloaders[number], count):
        yield [micro_batch.to(module.device) for micro_batch in group]
