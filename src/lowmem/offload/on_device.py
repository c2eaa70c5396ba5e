"""Defines where weights are while no block needs them, and in which order micro-batches run through the blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowmem.offload.host_block import HostBlock
from lowmem.offload.micro_batches import Generators
from lowmem.system.scratch_file import Drive


class WeightsOnDevice:
    """Keeps all weights on the device, and is the base class of weights that are in host memory. Code that steps,
    measures or saves weights asks its methods."""

    streams = False
    overlaps = False  # True: several micro-batches of a window may be under way at once

    def __init__(self) -> None:
        self.host_blocks: list[HostBlock] = []
        self.edges: list = []  # weights outside the blocks that are in host memory (`edges.py`)
        self.under_way = 0  # the number of the micro-batch that computes
        self.last = False  # True: it is its window's last

    def move_in(self, device: torch.device) -> None:
        """Is called when every weight has its dtype. Args: device: the one that computes."""

    def start(self, sink: object = None) -> None:
        """Is called before the first forward pass. Args: sink: where embedding and head send gradients (`edges.py`);
        None in an evaluation."""

    def stop(self) -> None:
        """Is called when no pass follows: every parameter becomes a plain tensor."""

    def run_micro_batches(self, runs: Sequence[Callable[[], None]], generators: Generators) -> None:
        """Computes the micro-batches of a window: one after the other, unless the weights' own order is another.

        Args: runs: each computes one; generators: as many states.
        """
        for number, run in enumerate(runs):
            self.enter(number, len(runs))
            generators.resume(number)
            run()
            generators.pause(number)

    def run_forward_passes(
        self, runs: Sequence[Callable[[], None]], at_once: int, device: torch.device, seed: int | None
    ) -> None:
        """Computes forward passes without gradients. Args: at_once: so many go through a block before the next block,
        where the order is by layer; seed: of the random numbers of each; None: they draw none."""
        for start in range(0, len(runs), at_once):
            together = runs[start : start + at_once]
            self.run_micro_batches(together, Generators.alike(device, len(together), seed))

    def enter(self, number: int, count: int) -> None:
        """Is called when a micro-batch begins to compute, or goes on. Args: count: of the window."""
        self.under_way, self.last = number, number == count - 1

    def take_gradient(self, p: nn.Parameter) -> Tensor | None:
        """Takes a gradient that backward has just made from its parameter. Returns: what may leave for the host; None:
        later micro-batches add to it first."""
        gradient, p.grad = p.grad, None
        return gradient

    def bring_in(self, p: nn.Parameter) -> None:
        """Brings the host tensors of a weight into memory. It is called before the host steps the weight."""

    def put(self, p: nn.Parameter, name: str, tensors: Mapping[str, object]) -> None:
        """Is called with what the host stores of a weight beside its 16 bits, when that is made, restored or stepped.
        It may leave memory with the next `bring_in` of another weight. Args: name: the weight's."""

    def finish(self) -> None:
        """Returns when all that was put away is where it belongs, or raises the error that it met."""

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Is entered around a save, which reads everything."""
        yield

    def waits_on_host(self, p: nn.Parameter) -> bool:
        """Returns True if a weight will be in host memory."""
        return False

    def host_block(self, p: nn.Parameter) -> HostBlock | None:
        """Returns the host memory of a weight; None: it is on the device."""
        return None

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns a weight, wherever it is."""
        host_block = self.host_block(p)
        return p.data if host_block is None else host_block.tensor(p)

    def device_tensors(self) -> Iterable[Tensor]:
        """Returns tensors on the device that are not the parameters' own data."""
        return ()

    def host_tensors(self) -> Iterator[Tensor]:
        """Returns the host memory of weights."""
        return (host_block.flat for host_block in self.host_blocks)

    def staging_buffers(self) -> Iterable[Tensor]:
        """Returns host memory through which weights pass on their way to the device, or to and from a drive."""
        return ()

    @property
    def drive(self) -> Drive | None:
        """Returns the drive that stores `drive_tensors`, with its counts of bytes read and written."""
        return None

    def drive_tensors(self) -> Iterable[Tensor]:
        """Returns tensors that are on a drive: their data is a view of a file."""
        return ()
