"""Describes the device, host and drive that a planned run must fit."""

from dataclasses import dataclass

from lowmem.config.cards import Card
from lowmem.config.drives import DriveSpace
from lowmem.plan.tracing.traffic import NODE


@dataclass(frozen=True)
class Target:
    """The device, host and drive that a planned run may use.

    If `card` or `host_memory` is None, this memory is unlimited. If `drive` is None, no drive may be used.
    """

    on_card: bool  # plan for CUDA, even on a machine without CUDA
    card: Card | None = None
    host_memory: int | None = None  # bytes for all processes on one host
    node: int = NODE  # maximum number of devices per host
    drive: DriveSpace | None = None

    @property
    def device_memory(self) -> int | None:
        return self.card.size if self.card else None

    @property
    def context_bytes(self) -> int:
        """Returns the bytes of device memory for the CUDA context, which torch's allocator cannot reserve; 0 if `card`
        is None."""
        return self.card.context_bytes if self.card else 0

    @property
    def capability(self) -> float | None:
        return self.card.capability if self.card else None
