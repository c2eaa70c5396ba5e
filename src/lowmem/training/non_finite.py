"""Reports a loss or gradient that is not finite, and ends a run that has skipped too many such steps.

One number per window shows it: the sum of the loss and the gradients' norm, read from the device before the step. The
norm is the one that clipping needs; with clip=null the gradients are read once more for it. A card waits for this read
once per window, as with any loss scaler. The parameter and the sequences at fault are searched for only then.
"""

import logging

from lightning.pytorch import LightningModule
from torch import Tensor

from lowmem.data.loader import Window
from lowmem.system.errors import NotFinite

log = logging.getLogger(__name__)

IN_A_ROW = 20  # faults after which a run that skips them ends: it no longer learns
NAMED = 8  # sequences of a window, at most


class NonFiniteSteps:
    """Counts steps that are not finite. Args: skips: leave such a step out and go on."""

    def __init__(self, skips: bool = False) -> None:
        self.skips, self.in_a_row = skips, 0

    def meet(self, module: LightningModule, loss: Tensor, window: Window) -> None:
        """Raises: NotFinite: steps are not skipped, or too many were."""
        self.in_a_row += 1
        message = describe(module, loss, window)
        if not self.skips:
            raise NotFinite(f"{message} This step was not saved.")
        if self.in_a_row > IN_A_ROW:
            raise NotFinite(f"{message} The {IN_A_ROW} steps before it were not finite either.")
        log.warning(f"{message} Skipping this step.")


def describe(module: LightningModule, loss: Tensor, window: Window) -> str:
    """Returns a sentence: which step, which numbers are not finite, on which sequences."""
    trainer = module.trainer
    names = module.ranks.all_gather(module.optimizer.first_not_finite())  # each rank knows its own shard
    name = next(filter(None, names), None)
    faults = [] if bool(loss.isfinite()) else [f"the loss is {loss.item():g}"]
    faults += [f"the gradient of {name} (the first such parameter) is not finite"] if name else []
    sequences = trainer.train_dataloader.between(module.position, window.end)
    listed = ", ".join(map(str, sequences[:NAMED])) + (" ..." if len(sequences) > NAMED else "")
    return (
        f"In step {trainer.global_step + 1} {' and '.join(faults) or 'the gradient norm is not finite'}. The step "
        f"read sequences {listed} of the training split ({len(sequences)} in all, epoch {module.position.epoch})."
    )
