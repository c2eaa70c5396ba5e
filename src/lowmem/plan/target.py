"""Describes the device, host and drive that a planned run must fit."""

from dataclasses import dataclass

from lowmem.config.cards import Card
from lowmem.config.drives import DriveSpace
from lowmem.plan.tracing.traffic import NODE


@dataclass(frozen=True)
class Target:
    """The device, host and drive that a planned run may use."""

    on_card: bool  # True: plan for CUDA, even on a machine without CUDA; False: for a CPU
    card: Card | None = None  # its size limits device memory, for a CPU too (memory.limit); None: unlimited
    host_memory: int | None = None  # bytes for all processes on one host; None: unlimited
    node: int = NODE  # maximum number of devices per host
    drive: DriveSpace | None = None  # None: no drive may be used

    @property
    def device_memory(self) -> int | None:
        return self.card.size if self.card else None

    @property
    def context_bytes(self) -> int:
        """Returns the bytes of `device_memory` that torch's allocator cannot reserve, because CUDA needs them for its
        context and kernels; 0 if `card` is None."""
        return self.card.context_bytes if self.card else 0

    @property
    def capability(self) -> float | None:
        return self.card.capability if self.card else None
