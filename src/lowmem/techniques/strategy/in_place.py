"""Lightning's strategy for a process that computes on one device, and leaves the model there when a run ends.

Lightning's own copies all weights and the whole optimizer state to the host then: 12 bytes per parameter with AdamW in
fp32, before the results are written. An export needs one file's worth of host memory.
"""

from collections.abc import Mapping

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy


class InPlace(SingleDeviceStrategy):
    """A single-device strategy that never moves the optimizer's state."""

    strategy_name = "in_place"

    @property
    def root_device(self) -> torch.device:
        """Returns the device of the accelerator, which Lightning sets later than it makes a strategy."""
        on_card = isinstance(self.accelerator, CUDAAccelerator)
        return torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """Restores the state where the optimizer keeps it: that of masters and paged state belong on the host."""
        self.lightning_module.load_optimizer(self.optimizers[0], checkpoint)

    def teardown(self) -> None:
        """Ends threads and hooks, and leaves weights and optimizer state where they are."""
        self.lightning_module.weights.stop()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
