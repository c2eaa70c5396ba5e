"""A loss or gradient that is not finite: what is told of it, and when a run that skips such steps ends all the same.

Whether there is one is known from a single number per window, the sum of its loss and its gradients' norm, which is
read from the device before the step. The norm is the one that clipping takes; with clip=null it is one more reading of
the gradients. A card waits for that read once per window, as with any loss scaler. Who is to blame is looked for only
when there is a fault.
"""

import logging

from lightning.pytorch import LightningModule
from torch import Tensor

from lowmem.data.loader import Window
from lowmem.errors import NotFinite

log = logging.getLogger(__name__)

IN_A_ROW = 20  # faults after which a run that skips them ends: it no longer learns
NAMED = 8  # sequences of a window, at most


class NonFiniteSteps:
    """Args: skips: whether the step is left out and the run goes on."""

    def __init__(self, skips: bool = False) -> None:
        self.skips, self.in_a_row = skips, 0

    def none(self) -> None:
        self.in_a_row = 0

    def meet(self, module: LightningModule, loss: Tensor, window: Window) -> None:
        """Raises: NotFinite: unless the step is to be skipped; and when too many were."""
        self.in_a_row += 1
        said = describe(module, loss, window)
        if not self.skips:
            raise NotFinite(f"{said} Nothing of it was saved.")
        if self.in_a_row > IN_A_ROW:
            raise NotFinite(f"{said} So were the {IN_A_ROW} steps before.")
        log.warning(f"{said} The step is skipped.")


def describe(module: LightningModule, loss: Tensor, window: Window) -> str:
    """Which step, what is not finite, and on which sequences."""
    trainer = module.trainer
    names = module.ranks.all_gather(
        trainer.precision_plugin.first_not_finite(module.ranks.parts(module))
    )  # of its part each knows
    name = next(filter(None, names), None)
    what = [] if bool(loss.isfinite()) else [f"the loss is {loss.item():g}"]
    what += [f"the gradient of {name}, the model's first of which that is so, is not finite"] if name else []
    sequences = trainer.train_dataloader.between(module.position, window.end)
    listed = ", ".join(map(str, sequences[:NAMED])) + (" ..." if len(sequences) > NAMED else "")
    return (
        f"In step {trainer.global_step + 1} {' and '.join(what) or 'the norm of the gradients is not finite'}. Its "
        f"window is sequences {listed} of the training split ({len(sequences)}, in epoch {module.position.epoch})."
    )
