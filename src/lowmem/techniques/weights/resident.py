"""`weights=resident`, the default: all weights stay on the device."""

from torch import nn

from lowmem.offload.on_device import WeightsOnDevice


class Resident(WeightsOnDevice):
    """Keeps all weights on the device. Args: network, head_in_tiles: not used; accepted because callers pass both to
    every class of weights."""

    def __init__(self, network: nn.Module | None = None, head_in_tiles: bool = False) -> None:
        super().__init__()
