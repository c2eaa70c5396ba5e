"""The optimizer's step inside backward: each gradient steps its parameter as soon as it exists, and is freed.

Gradients never stand in memory together: what remains of 4 bytes per parameter (2 with 16-bit weights) is the largest
single gradient. It costs whatever needs all gradients at once: clipping by the global norm, loss scaling (whether a
step is skipped is known only at the end), and accumulation over micro-batches. Source: Lv et al.
2023, arXiv 2306.09782.
"""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn


class StepInBackward(Callback):
    """Args: enabled: else nothing is done; clip_value: largest absolute gradient element, or None."""

    def __init__(self, enabled: bool, clip_value: float | None) -> None:
        self.enabled, self.clip_value = enabled, clip_value
        self._hooks: list = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.enabled:
            return
        optimizer, plugin = trainer.optimizers[0], trainer.precision_plugin
        names = {p: name for name, p in module.named_parameters()}

        def consume(group_index: int, p: nn.Parameter) -> None:
            plugin.use_up(names[p], p.grad)
            if self.clip_value is not None:
                nn.utils.clip_grad_value_([p], self.clip_value)
            # asked for here: the schedule changes the group, and a resume replaces it
            plugin.update(optimizer, optimizer.param_groups[group_index], p)

        for index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                hook = p.register_post_accumulate_grad_hook(lambda p, index=index: consume(index, p))
                self._hooks.append(hook)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
