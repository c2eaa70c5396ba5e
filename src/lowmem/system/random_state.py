"""Captures and restores the states of torch's random number generators, which dropout uses: the CPU's generator and,
with CUDA, the device's generator.

Computation that runs twice (a checkpointed block, a slice of a sequence, steps after a resume) must draw equal random
numbers both times. The state of a CPU generator takes 5 KB, the state of a GPU generator 16 bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

States = list[Tensor]  # states of the CPU's generator and, with CUDA, of the device's generator


def captured(device: torch.device) -> States:
    """Returns the current states of the generators that computations on a device use."""
    return [generator.get_state() for generator in generators(device)]


def restored(states: Sequence[Tensor], device: torch.device) -> None:
    """Sets the generators to states from `captured` or `seeded`. If `states` has no state for a GPU, as in a checkpoint
    of a CPU run, only the CPU's generator is set."""
    for generator, state in zip(generators(device), states, strict=False):
        generator.set_state(state)


def seeded(seed: int, device: torch.device) -> States:
    """Returns the states that generators have after `manual_seed(seed)`, without changing torch's generators."""
    return [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in generators(device)]


@contextmanager
def forked(device: torch.device, states: States | None = None) -> Iterator[None]:
    """Context manager that restores, at the end of the `with`, the states that the generators had before. Args: states:
    states to set at the beginning of the `with`; None keeps the current states."""
    before = captured(device)
    try:
        if states is not None:
            restored(states, device)
        yield
    finally:
        restored(before, device)


def generators(device: torch.device) -> list[torch.Generator]:
    """Returns the default generators that computations on a device use: the CPU's and, with CUDA, the device's."""
    if device.type != "cuda":
        return [torch.default_generator]
    number = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[number]]
