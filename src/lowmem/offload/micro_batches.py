"""Gives each micro-batch of a window its own random number generator state, so that dropout masks do not depend on the
order of execution.

A window is the group of micro-batches of one optimizer step. The micro-batches run one after the other, or take turns
with weights.order=by_layer: all micro-batches compute a block before any of them computes the next block. In both
orders a micro-batch must draw the same random numbers, so the initial states are:

    micro-batch 0           the generators' current state
    micro-batch n > 0       seeded from a SHA-256 digest of n and of the states at the beginning of the window
    the next window         the state at the end of micro-batch 0 (`CausalLM.run_window` restores this state)

In a window of one micro-batch no state is saved or restored. `CausalLM.run_window` creates the states of a window.
`WeightsOnDevice.run_micro_batches` or `ByLayer` restores a micro-batch's state whenever the micro-batch starts or
continues, and saves the state whenever the micro-batch pauses or ends. `Generators.alike` creates the states of forward
passes without gradients.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch

from lowmem.system.random_state import States, captured, restored, seeded


class Generators:
    """The states of the random number generators, separate for each micro-batch.

    Args:
        device: the device that computes.
        states: the initial state of each micro-batch. If an item is None, the micro-batch uses the generators as they
            are, and its state is not saved.
    """

    def __init__(self, device: torch.device, states: Sequence[States | None]) -> None:
        self.device, self.states = device, [*states]

    @classmethod
    def of_window(cls, device: torch.device, count: int) -> "Generators":
        """Returns the initial states of the micro-batches of a training window. Args: count: number of
        micro-batches."""
        if count == 1:
            return cls(device, [None])
        now = captured(device)
        return cls(device, [now, *(_seeded(now, number, device) for number in range(1, count))])

    @classmethod
    def alike(cls, device: torch.device, count: int, seed: int | None) -> "Generators":
        """Returns the initial states of `count` forward passes, which are all equal. Args: seed: seed of the states;
        None if the passes draw no random numbers."""
        return cls(device, [None if seed is None else seeded(seed, device)] * count)

    def resume(self, number: int) -> None:
        """Sets the generators to the state of a micro-batch that starts or continues."""
        if (states := self.states[number]) is not None:
            restored(states, self.device)

    def pause(self, number: int) -> None:
        """Saves the generators' state when a micro-batch pauses or ends, for its next `resume`."""
        if self.states[number] is not None:
            self.states[number] = captured(self.device)


def _seeded(now: States, number: int, device: torch.device) -> States:
    digest = sha256(number.to_bytes(8))
    for state in now:
        digest.update(state.numpy())
    return seeded(int.from_bytes(digest.digest()[:4]), device)  # torch's CPU generator uses only 32 bits of a seed
