"""Updates weights inside backward: each weight is updated as soon as its gradient exists, and then the gradient is
freed.

This saves the memory of the gradients, 4 bytes per parameter (2 with 16-bit weights), because few gradients exist at
the same time. Techniques that need the final gradients of all weights before the first update are refused: clipping by
the global norm, loss scaling (an overflow would be known only at the end of backward), gradient accumulation, several
devices, and skipping a step whose loss or gradient is not finite. Precisions that run the optimizer on the host are
refused, too. Source: Lv et al. 2023, arXiv 2306.09782.
"""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn


class StepInBackward(Callback):
    """Updates each parameter on the device, in a hook that the thread of the backward pass calls when the gradient is
    complete.

    Args:
        enabled: False: do nothing.
        clip_value: clamps each element of a gradient to +-clip_value; None: off.
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
