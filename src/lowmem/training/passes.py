"""One micro-batch's forward and backward pass, with random numbers of its own.

A window's micro-batches run one after the other, or stop in the middle while others run (weights.order=by_layer), and
what dropout draws must not depend on that. So the first micro-batch goes on with the generators as they are, and each
of the others starts from a seed: a digest of the states at the beginning of the window. After the window the generators
go on where the first micro-batch has left them. A window of one micro-batch, and a run that draws no numbers, leaves
them alone.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from lowmem.techniques.weights.resident import Resident

States = list[Tensor]  # of the CPU's generator and, with CUDA, the device's


class MicroBatchPass:
    """One of a window's passes. Args: run: computes all of it; begins: called whenever its turn begins; states: of
    generators, at its beginning; None: nobody else draws from them."""

    def __init__(
        self, run: Callable[[], None], begins: Callable[[], None], device: torch.device, states: States | None
    ) -> None:
        self.run, self.begins, self.device, self.states = run, begins, device, states

    def resume(self) -> None:
        self.begins()
        self.restore()

    def pause(self) -> None:
        if self.states is not None:
            self.states = present(self.device)

    def restore(self) -> None:
        """Sets the generators to where this micro-batch has left them."""
        if self.states is not None:
            for generator, state in zip(_generators(self.device), self.states, strict=True):
                generator.set_state(state)


def run_forward_passes(
    weights: Resident, computations: Sequence[Callable[[], None]], at_once: int, device: torch.device, seed: int | None
) -> None:
    """Runs forward passes without gradients. Args: at_once: so many of them go through a block of `weights` in one turn
    of it; seed: of the random numbers of each; None: they draw none."""
    for start in range(0, len(computations), at_once):
        passes = []
        for run in computations[start : start + at_once]:
            states = None if seed is None else seeded(seed, device)
            passes.append(MicroBatchPass(run, lambda: None, device, states))
        weights.run_micro_batches(passes)


def states_of(count: int, device: torch.device) -> Sequence[States | None]:
    """Returns the states from which the micro-batches of a window start. Args: count: of micro-batches."""
    if count == 1:
        return [None]
    now = present(device)
    return [now, *(_seeded(now, number, device) for number in range(1, count))]


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
