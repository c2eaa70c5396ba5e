"""Wraps the private parts of Lightning that this package uses. Only this file and `torch_private.py` use private parts
of other packages. A comment with "Instead" says what could replace a private part, and `test_torch_private.py` fails if
a new version of Lightning has changed that part."""

from lightning.pytorch import Trainer

# Instead: a loop over trainer.callbacks, without Lightning's profiler and logging context.
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch.optim import Optimizer


def call_before_optimizer_step(trainer: Trainer, optimizer: Optimizer) -> None:
    """Calls the hook `on_before_optimizer_step` of all callbacks and of the module. With Lightning's own loop, the hook
    would run inside the closure that Lightning passes to the optimizer, five stack frames below `step`."""
    _call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
    _call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
