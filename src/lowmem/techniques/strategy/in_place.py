"""A single-device strategy for Lightning, which leaves the model on the device when a run ends.

Lightning's SingleDeviceStrategy copies all weights and optimizer state to the host when a run on a card ends. With
AdamW in fp32 this takes 12 bytes of host memory per parameter. Without this copy, an export after the run needs host
memory for only one weight file at a time.
"""

from collections.abc import Mapping

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy


class InPlace(SingleDeviceStrategy):
    """Leaves weights and optimizer state where they are when a run ends."""

    strategy_name = "in_place"

    @property
    def root_device(self) -> torch.device:
        """Returns the accelerator's device. A property, because Lightning sets the accelerator only after it has
        created the strategy."""
        on_card = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """Restores optimizer state directly into the memory in which the optimizer keeps it. For example, the state of
        masters in host memory is restored in host memory."""
        self.lightning_module.load_optimizer(self.optimizers[0], checkpoint)

    def teardown(self) -> None:
        """Ends threads and removes hooks, without moving weights or optimizer state."""
        self.lightning_module.weights.stop()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
