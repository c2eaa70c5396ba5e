"""Gives each micro-batch of a window its own random number generator state, so that dropout masks do not depend on the
order of execution.

A window is the group of micro-batches of one optimizer step. By default they run one after the other; with
weights.order=by_layer they take turns at every block. Both orders must draw the same random numbers. So

    micro-batch 0           continues from the generators' current state
    micro-batch n > 0       starts from a seed: a SHA-256 digest of n and of the states at the beginning of the window
    the next window         continues from the state that micro-batch 0 has left

A window of one micro-batch neither saves nor restores a state.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch

from lowmem.system.random_state import States, captured, restored, seeded


class Generators:
    """The states of the random number generators, one per micro-batch.

    Args:
        device: the device that computes.
        states: the initial state of each micro-batch; None: its state is neither restored nor saved.
    """

    def __init__(self, device: torch.device, states: Sequence[States | None]) -> None:
        self.device, self.states = device, [*states]

    @classmethod
    def of_window(cls, device: torch.device, count: int) -> "Generators":
        """Returns the initial states of a window's micro-batches. Args: count: number of micro-batches."""
        if count == 1:
            return cls(device, [None])
        now = captured(device)
        return cls(device, [now, *(_seeded(now, number, device) for number in range(1, count))])

    @classmethod
    def alike(cls, device: torch.device, count: int, seed: int | None) -> "Generators":
        """Returns equal initial states for `count` forward passes. Args: seed: None: the passes draw no random
        numbers."""
        return cls(device, [None if seed is None else seeded(seed, device)] * count)

    def resume(self, number: int) -> None:
        """Restores the generators' state for a micro-batch that starts or continues."""
        if (states := self.states[number]) is not None:
            restored(states, self.device)

    def pause(self, number: int) -> None:
        """Saves the generators' state of a micro-batch that stops, for its next `resume`."""
        if self.states[number] is not None:
            self.states[number] = captured(self.device)


def _seeded(now: States, number: int, device: torch.device) -> States:
    digest = sha256(number.to_bytes(8))
    for state in now:
        digest.update(state.numpy())
    return seeded(int.from_bytes(digest.digest()[:4]), device)  # a CPU's generator reads 32 bits of a seed
