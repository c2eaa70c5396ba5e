"""Where weights are that wait for their turn: host memory, one flat buffer per block, in the order of its parameters.

One buffer of exact size is one copy to the device, and one piece of memory to register for it. What the host steps is
what travels, so the two wait for each other: a copy for the last update, an update for the last copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowmem.memory.tracker import belongs, host_side
from lowmem.techniques.weights.link import Mark

ALIGNED = 256  # bytes: where a weight may begin in a buffer, which is where CUDA's own allocator lets one begin


class Place(NamedTuple):
    """Of one weight in a buffer."""

    start: int  # bytes
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def within(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Home:
    """Of the weights of one block. Args: parameters: what they hold is copied here, one after the other."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.places: dict[nn.Parameter, Place] = {}
        end = 0
        for p in parameters:
            start = -(-end // ALIGNED) * ALIGNED
            self.places[p] = Place(start, p.shape, p.dtype)
            end = start + self.places[p].size
        self.updates: list[Future[None]] = []  # by the host, that a copy has to wait for
        self.read: Mark | None = None  # reached when the last copy out of it is complete
        self.steps = 0  # updates so far: a copy that was made after fewer is an old one
        with host_side(), torch.no_grad():
            self.flat = torch.empty(end, dtype=torch.uint8)
            self.tensors = self.within(self.flat)
            for p, here in self.tensors.items():
                here.copy_(p.data)
        belongs(self.flat, "other", "host")

    def within(self, buffer: Tensor) -> dict[nn.Parameter, Tensor]:
        """Each weight, in a buffer that is laid out as this one."""
        return {p: place.within(buffer) for p, place in self.places.items()}

    def arrived(self) -> None:
        """Return when the host has done all updates that were asked for, or raise what went wrong there."""
        updates, self.updates = self.updates, []  # what went wrong is told once
        for update in wait(updates).done:
            update.result()


class Resident:
    """All weights stay on the device: what whoever steps, measures or saves them asks, with the answers of no host.

    Args: network: a model; steps_in: see conf/weights; head_in_tiles: whether the loss reads the head in tiles.
    """

    streams = False

    def __init__(
        self, network: nn.Module | None = None, steps_in: str = "weights_16bit", head_in_tiles: bool = False
    ) -> None:
        self.homes: list[Home] = []
        self.edges: list = []  # weights outside the blocks that are on the host, too (`edges.py`)

    def move_in(self, device: torch.device) -> None:
        """The precision calls this when every weight has its dtype. Args: device: that computes."""

    def start(self, sink: object = None) -> None:
        """Called before the first forward pass. Args: sink: where gradients go (`edges.py`); None: there are none."""

    def stop(self) -> None:
        """Called when no pass follows, before the model is brought to the host: every parameter is a plain tensor."""

    def takes(self, p: nn.Parameter) -> bool:
        """Whether a weight will wait in host memory."""
        return False

    def home(self, p: nn.Parameter) -> Home | None:
        """Where a weight waits; None: it is on the device."""
        return None

    def stored(self, p: nn.Parameter) -> Tensor:
        """A weight, wherever it is."""
        home = self.home(p)
        return p.data if home is None else home.tensors[p]

    def device_tensors(self) -> Iterable[Tensor]:
        """Of the device, beside what the parameters hold."""
        return ()

    def host_tensors(self) -> Iterator[Tensor]:
        return (home.flat for home in self.homes)


def nowhere(p: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """One NaN, expanded to a parameter's shape: what is held in its place, so that who reads it gets no number."""
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(p.shape)
