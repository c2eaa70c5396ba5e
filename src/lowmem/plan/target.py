"""Where a planned run is to fit."""

from dataclasses import dataclass

from lowmem.gpus import Card
from lowmem.plan.links import NODE


@dataclass(frozen=True)
class Target:
    """The device of a run and the host beside it. Bytes that are None are not limited."""

    on_card: bool  # count as CUDA allocates and computes, whether or not a CUDA device is here
    card: Card | None = None
    host_memory: int | None = None  # of all processes on one host together
    node: int = NODE  # devices that share a host

    @property
    def device_memory(self) -> int | None:
        return self.card.size if self.card else None

    @property
    def beside(self) -> int:
        """Bytes of the card that torch cannot reserve."""
        return self.card.beside if self.card else 0

    @property
    def capability(self) -> float | None:
        return self.card.capability if self.card else None
