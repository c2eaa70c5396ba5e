"""Where a planned run is to fit."""

from dataclasses import dataclass

from lowmem.gpus import Card
from lowmem.plan.links import NODE


@dataclass(frozen=True)
class Target:
    """The device of a run and the host beside it.

    Args:
        on_card: count as CUDA allocates and computes, whether or not a CUDA device is here.
        card: its memory and rates; None: its memory is not limited.
        host_memory: bytes that all processes on one host may take together; None: not limited.
        node: devices that share a host.
    """

    on_card: bool
    card: Card | None = None
    host_memory: int | None = None
    node: int = NODE

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
