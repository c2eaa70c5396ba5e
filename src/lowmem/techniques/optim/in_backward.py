"""Updates weights inside backward: each weight is updated as soon as its gradient is complete, and then the gradient is
freed.

This saves the memory of most gradients, 4 bytes per parameter (2 with 16-bit weights), because only a few gradients
exist at the same time. The config refuses the combination with techniques that need all final gradients before the
first update: clipping by the global norm, loss scaling (an overflow would be known only at the end of backward),
gradient accumulation, several devices, and on_nonfinite=skip. It also refuses precisions that run the optimizer on the
host. Source: Lv et al. 2023, arXiv 2306.09782.
"""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn


class StepInBackward(Callback):
    """Updates each parameter on the device, in a hook that the thread of the backward pass calls when the gradient is
    complete.

    Args:
        enabled: False: the callback does nothing.
        clip_value: clamps each element of a gradient to +-clip_value; None: elements are not clamped.
    """

    def __init__(self, enabled: bool, clip_value: float | None) -> None:
        self.enabled, self.clip_value = enabled, clip_value
        self._hooks: list = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.enabled:
            return
        optimizer = module.optimizer
        names = {p: name for name, p in module.named_parameters()}

        def consume(group_index: int, p: nn.Parameter) -> None:
            optimizer.use_up(names[p], p.grad)
            if self.clip_value is not None:
                nn.utils.clip_grad_value_([p], self.clip_value)
            # look up the group at each step: the schedule changes the group, and a resume replaces it
            optimizer.step_one(optimizer.param_groups[group_index], p)
            p.grad = None

        for index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                hook = p.register_post_accumulate_grad_hook(lambda p, index=index: consume(index, p))
                self._hooks.append(hook)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
