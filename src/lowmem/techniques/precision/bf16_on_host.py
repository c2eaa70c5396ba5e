"""Weights in bf16 without masters, stepped where they lie: in host memory, while they stream (`weights=streamed`).

2 bytes per parameter and the optimizer's state are all that the host holds: each weight is widened for its step alone,
and rounded up or down at random, right in the mean. Source: Zamirai et al. 2020, arXiv 2010.06192.
"""

import torch
from torch import nn

from lowmem.techniques.precision.host_masters import HostMasters
from lowmem.techniques.precision.host_weight import HostWeight, StochasticHostWeight


class BFloat16Stochastic(HostMasters):
    """As `weights_16bit.py`'s, which steps on the device."""

    dtype = torch.bfloat16

    def new_host_weight(self, name: str, p: nn.Parameter) -> HostWeight:
        if p.dtype != self.dtype:  # beside weights of 16 bits, a part that is held in full: nothing is rounded
            return HostWeight(name, p, p.dtype)
        made = StochasticHostWeight(name, p, self.dtype)
        made.seed = torch.initial_seed()
        return made

    def state_dict(self) -> dict:
        return super().state_dict() | {"steps": {m.name: m.steps for m in self._at_random()}}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        for master in self._at_random():
            master.steps = state_dict.get("steps", {}).get(master.name, 0)  # none of a run that stepped on the device

    def _at_random(self) -> list[StochasticHostWeight]:
        return [master for master in self.masters.values() if isinstance(master, StochasticHostWeight)]
