"""Defines the interface `WeightsOnDevice`. This class and its subclasses decide where weights are stored while they are
not in use, and in which order the micro-batches of a window run through the blocks.

`WeightsOnDevice` itself is the default: all weights stay on the device. `StreamedWeights` (`streamed.py`) overrides
most methods. The main callers are `MasterWeights`, `HostOptimizer`, `CausalLM` and the memory meter. Their most
important calls:

    bring_in, put                   before and after each weight's update on the host (swapping with a drive); also when
                                    the master or the optimizer state has been created or restored
    move_in                         once per fit, after the model has its final dtypes
    start, stop                     before the first forward pass, after the last pass
    run_micro_batches               for each window: runs its micro-batches
    take_gradient                   right after backward has computed a gradient for the optimizer on the host
    finish                          before code reads the host tensors: waits for the drive
    *_tensors, staging_buffers      to measure memory (called by the memory meter)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lowmem.offload.host_block import HostBlock
from lowmem.offload.micro_batches import Generators
from lowmem.system.scratch_file import Drive


class WeightsOnDevice:
    """Keeps all weights on the device. The subclass `StreamedWeights` keeps some weights in host memory."""

    streams = False  # True: some weights are stored in host memory, and are copied to the device before their use
    overlaps = False  # True: several micro-batches of a window may be in progress at the same time

    def __init__(self) -> None:
        self.host_blocks: list[HostBlock] = []
        self.edges: list = []  # `Edge` objects: weights outside the blocks that are in host memory (`edges.py`)
        self.under_way = 0  # index (in its window) of the micro-batch that computes now
        # True: the micro-batch that computes now, or that has computed most recently, is the last of its window; in a
        # pipeline: the last backward pass of the window has ended
        self.last = False

    def move_in(self, device: torch.device) -> None:
        """Moves streamed weights into their `HostBlock`. Call this method when every weight has its final dtype. The
        caller, or Lightning, then moves all other weights to the device. Args: device: the device that computes."""

    def start(self, sink: object = None) -> None:
        """Prepares streaming before the first forward pass; a no-op if already started. Args: sink: receives the
        gradients of the embedding and the head (`edges.GradientSink`); None if there is no training."""

    def stop(self) -> None:
        """Ends streaming after the last pass, and sets the data of each streamed parameter to its full, current value
        in host memory (or on the drive)."""

    def run_micro_batches(self, runs: Sequence[Callable[[], None]], generators: Generators) -> None:
        """Computes the micro-batches of a window. The base class computes them one after the other.

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
            at_once: maximum number of passes in a group. `run_micro_batches` computes one group after the other; with
                weights.order=by_layer all passes of a group compute a block before any computes the next block.
            device: the device that computes.
            seed: seed at the beginning of every pass; None if the passes draw no random numbers.
        """
        for start in range(0, len(runs), at_once):
            together = runs[start : start + at_once]
            self.run_micro_batches(together, Generators.alike(device, len(together), seed))

    def enter(self, number: int, count: int) -> None:
        """Sets `under_way` and `last` when a micro-batch starts or continues. Args: number: index of the micro-batch;
        count: number of micro-batches in the window."""
        self.under_way, self.last = number, number == count - 1

    def take_gradient(self, p: nn.Parameter) -> Tensor | None:
        """Removes from `p.grad` the gradient that backward has just computed. Returns: the gradient, which the caller
        sends to the host. If the device sums this weight's gradients over the window's micro-batches, returns the sum
        in the last micro-batch, and None in earlier micro-batches."""
        gradient, p.grad = p.grad, None
        return gradient

    def bring_in(self, p: nn.Parameter) -> None:
        """Reads from the drive into host memory the tensors that the update of a weight needs: the master, the
        optimizer state and, with weights.drive_holds=all, the block's 16-bit weights. A no-op without a drive. Call
        this method before the host updates the weight, and before `put` is called with tensors that were created or
        restored. Raises: DriveFailed: a read or write failed."""

    def put(self, p: nn.Parameter, name: str, tensors: Mapping[str, object]) -> None:
        """Allows the drive to swap out the host tensors of a weight until the weight's next `bring_in`. A no-op without
        a drive. Call this method when the tensors have been created, restored or updated.

        Args:
            p: the weight.
            name: the weight's name.
            tensors: master (or lower half) and optimizer state, by name.
        """

    def finish(self) -> None:
        """Waits until the drive has stored all tensors of earlier `put` calls. A no-op without a drive. Raises:
        DriveFailed: a read or write failed."""

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Context manager in which a checkpoint reads all host tensors, which may be on a drive. Raises: DriveFailed: a
        file on the drive cannot be read."""
        yield

    def waits_on_host(self, p: nn.Parameter) -> bool:
        """Returns True if `move_in` moves a weight to host memory."""
        return False

    def host_block(self, p: nn.Parameter) -> HostBlock | None:
        """Returns the `HostBlock` that stores a weight, or None if the weight is on the device."""
        return None

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns the current value of a weight, on the device or in host memory. Updates must be complete (see
        `MasterWeights.arrived`)."""
        host_block = self.host_block(p)
        return p.data if host_block is None else host_block.tensor(p)

    def device_tensors(self) -> Iterable[Tensor]:
        """Returns tensors on the device that store weights, in addition to the data of the parameters."""
        return ()

    def host_tensors(self) -> Iterator[Tensor]:
        """Returns the host buffers of streamed weights, except buffers that are stored on a drive."""
        return (host_block.flat for host_block in self.host_blocks)

    def staging_buffers(self) -> Iterable[Tensor]:
        """Returns host buffers that do not store weights: for copies of embedding rows to the device, and for reads
        from and writes to a drive. The staging slots of `link.py` and `registered.py` are not included."""
        return ()

    @property
    def drive(self) -> Drive | None:
        """Returns the drive that stores `drive_tensors`, or None if no drive is used. The `Drive` also counts the bytes
        that are read and written."""
        return None

    def drive_tensors(self) -> Iterable[Tensor]:
        """Returns the tensors that are stored on a drive. While such a tensor is swapped out, its data is a view of a
        memory-mapped file."""
        return ()
