"""Gives each micro-batch of a window its own random numbers, so that they do not depend on the order of execution.

A window's micro-batches run one after the other, or stop in the middle while others run (weights.order=by_layer), and
what dropout draws must not depend on that. So the first micro-batch goes on with the generators as they are, and each
of the others starts from a seed: a digest of the states at the beginning of the window. After the window the generators
go on where the first micro-batch has left them. A window of one micro-batch leaves them alone.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch

from lowmem.system.random_state import States, captured, restored, seeded


class Generators:
    """The states of the random number generators of several micro-batches.

    Args: device: the one that computes; states: of each micro-batch at its beginning; None: nobody draws in between.
    """

    def __init__(self, device: torch.device, states: Sequence[States | None]) -> None:
        self.device, self.states = device, [*states]

    @classmethod
    def of_window(cls, device: torch.device, count: int) -> "Generators":
        """Returns the states from which the micro-batches of a window start."""
        if count == 1:
            return cls(device, [None])
        now = captured(device)
        return cls(device, [now, *(_seeded(now, number, device) for number in range(1, count))])

    @classmethod
    def alike(cls, device: torch.device, count: int, seed: int | None) -> "Generators":
        """Returns states that are the same for each. Args: seed: None: they draw no numbers."""
        return cls(device, [None if seed is None else seeded(seed, device)] * count)

    def resume(self, number: int) -> None:
        """Sets the generators to where a micro-batch has left them."""
        if (states := self.states[number]) is not None:
            restored(states, self.device)

    def pause(self, number: int) -> None:
        """Stores where a micro-batch leaves the generators."""
        if self.states[number] is not None:
            self.states[number] = captured(self.device)


def _seeded(now: States, number: int, device: torch.device) -> States:
    digest = sha256(number.to_bytes(8))
    for state in now:
        digest.update(state.numpy())
    return seeded(int.from_bytes(digest.digest()[:4]), device)  # 32 bits, of which a CPU's generator reads no more
