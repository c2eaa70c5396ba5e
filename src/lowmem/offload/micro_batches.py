"""Gives each micro-batch of a window random numbers of its own, in whatever order micro-batches run.

A window's micro-batches run one after the other, or stop in the middle while others run (weights.order=by_layer), and
what dropout draws must not depend on that. So the first micro-batch goes on with the generators as they are, and each
of the others starts from a seed: a digest of the states at the beginning of the window. After the window the generators
go on where the first micro-batch has left them. A window of one micro-batch leaves them alone.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

States = list[Tensor]  # of the CPU's generator and, with CUDA, the device's


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
        now = present(device)
        return cls(device, [now, *(_seeded(now, number, device) for number in range(1, count))])

    @classmethod
    def alike(cls, device: torch.device, count: int, seed: int | None) -> "Generators":
        """Returns states that are the same for each. Args: seed: None: they draw no numbers."""
        return cls(device, [None if seed is None else seeded(seed, device)] * count)

    def resume(self, number: int) -> None:
        """Sets the generators to where a micro-batch has left them."""
        if (states := self.states[number]) is not None:
            for generator, state in zip(_generators(self.device), states, strict=True):
                generator.set_state(state)

    def pause(self, number: int) -> None:
        """Stores where a micro-batch leaves the generators."""
        if self.states[number] is not None:
            self.states[number] = present(self.device)


def present(device: torch.device) -> States:
    return [generator.get_state() for generator in _generators(device)]


def _seeded(now: States, number: int, device: torch.device) -> States:
    digest = sha256(number.to_bytes(8))
    for state in now:
        digest.update(state.numpy())
    return seeded(int.from_bytes(digest.digest()[:4]), device)  # 32 bits, of which a CPU's generator reads no more


def seeded(seed: int, device: torch.device) -> States:
    """Returns the states that a seed sets."""
    return [torch.Generator(own.device).manual_seed(seed).get_state() for own in _generators(device)]


def _generators(device: torch.device) -> list[torch.Generator]:
    cards = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    return [torch.default_generator, *cards]
