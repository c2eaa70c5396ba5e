"""Wraps the private parts of Lightning that this package uses; no other file uses private parts. As in
`torch_private.py`, each wrapper says what would replace it, and `test_torch_private.py` names the parts that a new
version of Lightning has changed."""

from lightning.pytorch import Trainer

# Instead: a loop over trainer.callbacks, without Lightning's profiler and logging context.
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch.optim import Optimizer


def call_before_optimizer_step(trainer: Trainer, optimizer: Optimizer) -> None:
    """Calls `on_before_optimizer_step` of callbacks and of the module. Lightning calls it from a closure that its
    optimizers run, five frames below `step`."""
    _call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
    _call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
