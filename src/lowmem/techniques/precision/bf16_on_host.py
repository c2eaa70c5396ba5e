"""Holds weights in bf16 without masters, and steps them where they wait: in host memory (`weights=streamed`).

The host holds 2 bytes per parameter and the optimizer's state: each weight is widened for its step alone and then
rounded up or down at random, so that the mean is right. Source: Zamirai et al. 2020, arXiv 2010.06192.
"""

import torch
from torch import nn

from lowmem.techniques.precision.host_masters import HostMasters
from lowmem.techniques.precision.host_weight import HostWeight, StochasticHostWeight


class BFloat16Stochastic(HostMasters):
    """Does on the host what the class of this name in `weights_16bit.py` does on the device. Lightning saves a
    precision's state in a checkpoint under its class's name, and a run may be resumed with either: so they share it."""

    dtype = torch.bfloat16

    def new_host_weight(self, name: str, p: nn.Parameter) -> HostWeight:
        if p.dtype != self.dtype:  # a module that an adapter keeps in fp32: nothing is rounded
            return HostWeight(name, p, p.dtype)
        host_weight = StochasticHostWeight(name, p, self.dtype)
        host_weight.seed = torch.initial_seed()
        return host_weight

    def state_dict(self) -> dict:
        return super().state_dict() | {"steps": {m.name: m.steps for m in self._at_random()}}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for master in self._at_random():
            # a run that stepped on the device saved no counts
            master.steps = state_dict.get("steps", {}).get(master.name, 0)

    def _at_random(self) -> list[StochasticHostWeight]:
        return [master for master in self.masters.values() if isinstance(master, StochasticHostWeight)]
