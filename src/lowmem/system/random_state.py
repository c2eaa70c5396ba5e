"""Captures and restores the random states from which dropout draws: the CPU's, and with CUDA the device's.

Computation that runs twice (a checkpointed block, a slice, a resumed run) must draw equal numbers both times. The state
of torch's generator takes 5 KB for the CPU and 16 bytes for a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

States = list[Tensor]  # states of the CPU's generator and, with CUDA, of the device's generator


def captured(device: torch.device) -> States:
    """Returns the current states."""
    return [generator.get_state() for generator in generators(device)]


def restored(states: Sequence[Tensor], device: torch.device) -> None:
    """Sets the generators to states that `captured` or `seeded` returned. If `states` has no state for the device, as
    in a checkpoint of a CPU run, only the CPU's generator is set."""
    for generator, state in zip(generators(device), states, strict=False):
        generator.set_state(state)


def seeded(seed: int, device: torch.device) -> States:
    """Returns the states that a 32-bit seed sets, without changing the generators."""
    return [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in generators(device)]


@contextmanager
def forked(device: torch.device, states: States | None = None) -> Iterator[None]:
    """Restores the current states when the `with` ends. Args: states: set at its beginning; None keeps the current
    states."""
    before = captured(device)
    try:
        if states is not None:
            restored(states, device)
        yield
    finally:
        restored(before, device)


def generators(device: torch.device) -> list[torch.Generator]:
    """Returns the generators from which computations on a device draw: the CPU's and, with CUDA, the device's."""
    if device.type != "cuda":
        return [torch.default_generator]
    number = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[number]]
