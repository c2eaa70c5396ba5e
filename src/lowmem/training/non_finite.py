"""Reports a step whose loss or gradient is not finite, and ends a run that skipped too many such steps in a row.

`CausalLM.training_step` calls this module only after the check in `WindowOptimizer.finish` has failed. If the optimizer
runs on the device, this check reads a single number per window: the sum of the loss and the gradient norm. So the host
waits for the device once per window, as with any loss scaler. The norm is also used for clipping; with clip=null it is
computed only for this check and for the metric gradient_norm. This module then looks up the first parameter whose
gradient is not finite, and the sequences that the step read.
"""

import logging

from lightning.pytorch import LightningModule
from torch import Tensor

from lowmem.data.loader import Window
from lowmem.system.errors import NotFinite

log = logging.getLogger(__name__)

IN_A_ROW = 20  # maximum number of consecutive skipped steps; another such step ends the run, which no longer learns


class NonFiniteSteps:
    """Counts consecutive steps whose loss or gradients are not finite. With `skips`, such a step is skipped and the run
    continues; otherwise, the first such step ends the run."""

    def __init__(self, skips: bool = False) -> None:
        self.skips, self.in_a_row = skips, 0

    def meet(self, module: LightningModule, loss: Tensor, window: Window) -> None:
        """Counts and logs a step whose loss or gradients are not finite. All ranks must call this method. Raises
        NotFinite if such steps are not skipped, or if too many were skipped in a row."""
        self.in_a_row += 1
        message = describe(module, loss, window)
        if not self.skips:
            raise NotFinite(f"{message} This step was not saved.")
        if self.in_a_row > IN_A_ROW:
            raise NotFinite(f"{message} The {IN_A_ROW} steps before it were not finite either.")
        log.warning(f"{message} Skipping this step.")


def describe(module: LightningModule, loss: Tensor, window: Window) -> str:
    """Returns a message with the step, the values that are not finite, and the sequences that the step read."""
    trainer = module.trainer
    names = module.ranks.all_gather(module.optimizer.first_not_finite())  # each rank checks its own shard
    name = next(filter(None, names), None)
    faults = [] if bool(loss.isfinite()) else [f"the loss is {loss.item():g}"]
    faults += [f"the gradient of {name} (the first such parameter) is not finite"] if name else []
    read = trainer.train_dataloader.described(module.position, window.end)
    return (
        f"In step {trainer.global_step + 1} {' and '.join(faults) or 'the gradient norm is not finite'}. The step "
        f"read {read}."
    )
