"""Makes the masters of a module without training it."""

from torch import nn

from lowmem.offload.master_weights import MasterWeights
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.techniques.precision.contract import BasePrecision
from lowmem.techniques.precision.masters import BFloat16Master


def made(
    module: nn.Module,
    precision: BasePrecision | None = None,
    weights: WeightsOnDevice | None = None,
) -> MasterWeights:
    """Makes masters of the module's parameters. Returns the `MasterWeights` callback that owns the masters."""
    callback = MasterWeights()
    callback.connect(precision or BFloat16Master(), weights or WeightsOnDevice())
    callback.make(module)
    return callback
