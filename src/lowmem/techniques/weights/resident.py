"""Stores weights that wait for their turn in host memory: one flat buffer per block, in the order of its parameters.

One buffer of exact size is one copy to the device, and one piece of memory to register. The host steps the memory that
is copied, so each waits for the other: a copy for the last update, an update for the last copy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lowmem.memory.tracker import belongs, host_side
from lowmem.system.copy_lanes import Mark
from lowmem.system.scratch_file import Drive

ALIGNED = 256  # bytes; weights start at multiples of it in a buffer, as in CUDA's own allocator


class Place(NamedTuple):
    """The place of one weight in a buffer."""

    start: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Returns the size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Home:
    """Host memory of the weights of one block. Args: weights: their data is copied here, one after the other."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.places: dict[Tensor, Place] = {}
        end = 0
        for p in weights:
            start = -(-end // ALIGNED) * ALIGNED
            self.places[p] = Place(start, p.shape, p.dtype)
            end = start + self.places[p].size
        self.updates: list[Future[None]] = []  # by the host; a copy has to wait for them
        self.last_copy: Mark | None = None  # reached when the last copy from here is complete
        self.steps = 0  # updates so far; a copy with fewer is out of date
        with host_side(), torch.no_grad():
            self.flat = torch.empty(end, dtype=torch.uint8)  # with weights.drive_holds=all its data is elsewhere
            for p, view in self.within(self.flat).items():
                view.copy_(p.data)
        belongs(self.flat, "other", "host")

    def tensor(self, p: Tensor) -> Tensor:
        """Returns a weight, where it waits now."""
        return self.places[p].within(self.flat)

    def within(self, buffer: Tensor) -> dict[Tensor, Tensor]:
        """Returns views of a buffer that is laid out like this one, by weight."""
        return {p: place.within(buffer) for p, place in self.places.items()}

    def wait_for_updates(self) -> None:
        """Returns when the host has done all updates that were asked for, or raises the error that it met."""
        updates, self.updates = self.updates, []  # so that an error is raised once
        for update in wait(updates).done:
            update.result()


class Pass(Protocol):
    """The forward and backward pass of one micro-batch. Between two `resume`s other micro-batches may have run."""

    def run(self) -> None:
        """Computes everything. It is called once, between `resume` and `pause`."""

    def resume(self) -> None:
        """Is called when its turn begins, or begins again."""

    def pause(self) -> None:
        """Is called when its turn ends, or is interrupted."""


class Resident:
    """Keeps all weights on the device, and is the base class for weights that wait on the host. Code that steps,
    measures or saves weights asks its methods.

    Args: network: a model; steps_in: see conf/weights; head_in_tiles: the loss reads the head in tiles.
    """

    streams = False
    overlaps = False  # True: several micro-batches of a window may be under way at once

    def __init__(
        self, network: nn.Module | None = None, steps_in: str = "weights_16bit", head_in_tiles: bool = False
    ) -> None:
        self.homes: list[Home] = []
        self.edges: list = []  # weights outside the blocks that wait on the host (`edges.py`)

    def move_in(self, device: torch.device) -> None:
        """Is called by the precision when every weight has its dtype. Args: device: the one that computes."""

    def start(self, sink: object = None) -> None:
        """Is called before the first forward pass. Args: sink: receives gradients (`edges.py`); None: there are
        none."""

    def stop(self) -> None:
        """Is called when no pass follows: every parameter becomes a plain tensor."""

    def run_micro_batches(self, passes: Sequence[Pass]) -> None:
        """Runs the passes of a window: one after the other, unless the weights' own order is another."""
        for each in passes:
            each.resume()
            each.run()
            each.pause()

    def take_gradient(self, p: nn.Parameter) -> Tensor | None:
        """Takes a gradient that backward has just made from its parameter. Returns: what may leave for the host; None:
        later micro-batches add to it first."""
        gradient, p.grad = p.grad, None
        return gradient

    def bring_in(self, p: nn.Parameter) -> None:
        """Is called before the host steps a weight: what it stores of it comes into memory, from wherever it is."""

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
        """Returns True if a weight will wait in host memory."""
        return False

    def home(self, p: nn.Parameter) -> Home | None:
        """Returns the memory where a weight waits; None: it is on the device."""
        return None

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns a weight, wherever it is."""
        home = self.home(p)
        return p.data if home is None else home.tensor(p)

    def device_tensors(self) -> Iterable[Tensor]:
        """Returns tensors on the device that are not the parameters' own data."""
        return ()

    def host_tensors(self) -> Iterator[Tensor]:
        return (home.flat for home in self.homes)

    @property
    def drive(self) -> Drive | None:
        """Returns the drive that stores `drive_tensors`, with counts of what it has read and written."""
        return None

    def drive_tensors(self) -> Iterable[Tensor]:
        """Returns tensors that are on a drive: their data is a view of a file."""
        return ()


def nowhere(p: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns one NaN, expanded to a weight's shape: it stands in for a weight that is elsewhere, so that reading it
    too early or too late cannot give a plausible number. Packed bits have none, but their scales have."""
    missing = torch.nan if dtype.is_floating_point else 0
    return torch.full((), missing, dtype=dtype, device=device).expand(p.shape)
