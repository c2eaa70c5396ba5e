"""Defines where idle weights are stored, and in which order micro-batches run through the blocks.

`WeightsOnDevice` is both the default (all weights stay on the device) and the interface. `StreamedWeights`
(`streamed.py`) overrides its methods. In the order of a run:

    move_in                         once the model has its final dtypes
    start, stop                     before the first forward pass, after the last pass
    run_micro_batches               each window: the order of its micro-batches
    take_gradient                   each gradient, right after backward has computed it
    bring_in, put, finish           around each weight's update on the host (swapping with a drive)
    *_tensors, staging_buffers      for code that measures memory
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowmem.offload.host_block import HostBlock
from lowmem.offload.micro_batches import Generators
from lowmem.system.scratch_file import Drive


class WeightsOnDevice:
    """Keeps all weights on the device; subclasses keep some in host memory. Code that updates, measures or saves
    weights calls these methods."""

    streams = False
    overlaps = False  # True: several micro-batches of a window may be in progress at once

    def __init__(self) -> None:
        self.host_blocks: list[HostBlock] = []
        self.edges: list = []  # weights outside the blocks that are in host memory (`edges.py`)
        self.under_way = 0  # index of the micro-batch that computes
        self.last = False  # True: that micro-batch is the last of its window

    def move_in(self, device: torch.device) -> None:
        """Moves the weights to where they are stored. Called once every weight has its final dtype. Args: device: the
        device that computes."""

    def start(self, sink: object = None) -> None:
        """Called before the first forward pass. Args: sink: receives the gradients of the embedding and the head
        (`edges.GradientSink`); None in an evaluation."""

    def stop(self) -> None:
        """Called after the last pass: turns every parameter back into a plain tensor."""

    def run_micro_batches(self, runs: Sequence[Callable[[], None]], generators: Generators) -> None:
        """Computes the micro-batches of a window, by default one after the other.

        Args:
            runs: functions that each compute one micro-batch.
            generators: random number generator states, one per micro-batch.
        """
        for number, run in enumerate(runs):
            self.enter(number, len(runs))
            generators.resume(number)
            run()
            generators.pause(number)

    def run_forward_passes(
        self, runs: Sequence[Callable[[], None]], at_once: int, device: torch.device, seed: int | None
    ) -> None:
        """Computes forward passes without gradients.

        Args:
            runs: functions that each compute one forward pass.
            at_once: number of passes that are given to `run_micro_batches` together; with weights.order=by_layer they
                go through the blocks together.
            device: the device that computes.
            seed: every pass starts from this seed; None: the passes draw no random numbers.
        """
        for start in range(0, len(runs), at_once):
            together = runs[start : start + at_once]
            self.run_micro_batches(together, Generators.alike(device, len(together), seed))

    def enter(self, number: int, count: int) -> None:
        """Called when a micro-batch starts or continues. Args: number: its index; count: micro-batches in the
        window."""
        self.under_way, self.last = number, number == count - 1

    def take_gradient(self, p: nn.Parameter) -> Tensor | None:
        """Takes the gradient that backward has just computed from `p.grad`. Returns: the gradient to send to the host;
        None: later micro-batches add to it first."""
        gradient, p.grad = p.grad, None
        return gradient

    def bring_in(self, p: nn.Parameter) -> None:
        """Reads the master and optimizer state of a weight into host memory. Called before the host updates the
        weight."""

    def put(self, p: nn.Parameter, name: str, tensors: Mapping[str, object]) -> None:
        """Hands over the host tensors of a weight once they are created, restored or updated. They may be swapped to
        the drive at the next `bring_in` of another weight.

        Args:
            p: the weight.
            name: the weight's name.
            tensors: master (or lower half) and optimizer state, by name.
        """

    def finish(self) -> None:
        """Waits until all tensors given to `put` are stored. Raises the error of a write that failed."""

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Context in which a checkpoint or export reads all host tensors."""
        yield

    def waits_on_host(self, p: nn.Parameter) -> bool:
        """Returns True if a weight is stored in host memory after `move_in`."""
        return False

    def host_block(self, p: nn.Parameter) -> HostBlock | None:
        """Returns the `HostBlock` that stores a weight; None: the weight is on the device."""
        return None

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns the current value of a weight, on the device or in host memory."""
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
        """Returns the drive that stores `drive_tensors`, which also counts bytes read and written; None: no drive is
        used."""
        return None

    def drive_tensors(self) -> Iterable[Tensor]:
        """Returns the tensors that are stored on a drive: their data is a view of a memory-mapped file while they are
        not in memory."""
        return ()
