"""Dynamic loss scaling: the loss is multiplied by a scale before backward, so that small gradients do not underflow in
fp16.

If a gradient overflows, the step is skipped and the scale is halved, down to `SMALLEST`. After `growth_interval`
consecutive steps without overflow, the scale is doubled. torch's GradScaler is not used, because it raises an error for
fp16 gradients. Without this error it would unscale them in fp16, where small gradients underflow. Source: Micikevicius
et al. 2018, arXiv 1710.03740.
"""

from lightning.pytorch import LightningModule
from torch import Tensor

from lowmem.techniques.precision.contract import BasePrecision

# Only a scale above this value is halved. Starting at 2**16, the scale reaches this value after 26 overflows in a row.
# If gradients still overflow then, a smaller scale would not help.
SMALLEST = 2.0**-10


class LossScale:
    """The loss scale and its update rule. Args: value: initial scale; growth_interval: see `ScaledLoss`."""

    def __init__(self, value: float, growth_interval: int) -> None:
        self.value, self.growth_interval = float(value), growth_interval
        self.steps = 0  # number of steps since the last overflow, or since the scale was last doubled
        self.halved = False  # True: the last window overflowed, and the scale was halved

    def update(self, finite: bool) -> None:
        """Sets the scale of the next window. Args: finite: True if all gradients of this window are finite."""
        self.halved = not finite and self.value > SMALLEST
        self.steps = self.steps + 1 if finite else 0
        if self.halved:
            self.value /= 2
        elif self.steps == self.growth_interval:
            self.value, self.steps = self.value * 2, 0

    def state_dict(self) -> dict:
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state_dict: dict) -> None:
        self.value, self.steps = state_dict["value"], state_dict["steps"]


class ScaledLoss(BasePrecision):
    """A mixin for fp16 precisions that scales the loss. The `WindowOptimizer` unscales the gradients, in `finish` or
    when it updates a weight.

    Args:
        device: see `BasePrecision`.
        init_scale: loss scale at the start. If a gradient overflows, the scale is halved, unless it is at most 2**-10.
        growth_interval: number of consecutive steps without overflow after which the scale is doubled.
    """

    scales_loss = True

    def __init__(self, device: str = "cpu", init_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        super().__init__(device=device)
        self.loss_scale = LossScale(init_scale, growth_interval)

    @property
    def lowered_scale(self) -> bool:
        return self.loss_scale.halved

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        self.gradient_scale = self.loss_scale.value  # a copy, because `update_scale` sets the next window's scale
        return super().pre_backward(tensor * self.gradient_scale, module)

    def update_scale(self, finite: bool) -> None:
        self.loss_scale.update(finite)

    def state_dict(self) -> dict:
        return super().state_dict() | self.loss_scale.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.loss_scale.load_state_dict(state_dict)
