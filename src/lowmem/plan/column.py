"""Defines the planner's memory reports for the device, the host and the drive."""

from dataclasses import asdict, dataclass, fields, replace
from math import floor
from typing import Self

from lowmem.system.units import GIB, WORDS

LABELS = WORDS | {
    "temporaries": WORDS["other"],
    "in_flight": "copies in flight",
    "workspaces": "workspaces (cuBLAS)",
    "fragments": "rounding and fragments of the allocator",
    "context": "CUDA context (and NCCL)",
    "libraries": "Python and its libraries",
    "threads": "threads and code of the first step",
    "cuda": "CUDA libraries",
    "generator": "torch.compile",
    "masters": "master weights",
    "staging": "staging buffers",
    "state": "master weights and optimizer state",
}


class Column:
    """Base class of memory reports. Each field except `phase` is a row, in bytes. `total` is the sum of all rows."""

    @property
    def rows(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "phase"}

    @property
    def total(self) -> int:
        return sum(self.rows.values())

    def plus(self, **more: int) -> Self:
        return replace(self, **{name: getattr(self, name) + size for name, size in more.items()})

    def as_dict(self) -> dict[str, int | str]:
        return asdict(self) | {"total": self.total}


@dataclass(frozen=True)
class DeviceBytes(Column):
    """Device memory in one phase of one process. `Prediction.device` is for the phase that needs the most memory; its
    `total` is the memory of the smallest card on which the run works, or for a run on a CPU the bytes of tensors."""

    phase: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0  # temporary tensors of the optimizer step, and temporary memory inside its operators
    in_flight: int = 0  # gradients on their way to the host; with CPU offload, also weights on their way to the card
    workspaces: int = 0
    fragments: int = 0  # memory that the allocator must reserve in addition to tensors and workspaces
    context: int = 0  # CUDA context and NCCL communicators, outside of torch's allocator


@dataclass(frozen=True)
class HostBytes(Column):
    """Host memory in one phase of one process. `Prediction.host` is for the phase that needs the most memory, and for
    all processes on a host. For a run on a CPU, the rows include device memory."""

    phase: str
    libraries: int = 0
    threads: int = 0  # code that the first step loads, and threads that it starts
    cuda: int = 0
    generator: int = 0
    weights: int = 0
    masters: int = 0
    optimizer: int = 0  # includes paged state that does not fit on the card
    gradients: int = 0
    activations: int = 0  # includes the bytes by which sizes of pinned tensors are rounded up
    temporaries: int = 0  # temporary tensors of updates on the host, and tensors that are being loaded or written
    staging: int = 0  # pinned staging buffers, and buffers for swapping with a drive

    def times(self, processes: int) -> "HostBytes":
        return replace(self, **{name: processes * size for name, size in self.rows.items()})


@dataclass(frozen=True)
class DriveBytes(Column):
    """Bytes of the files on a drive."""

    state: int = 0  # masters and optimizer state
    weights: int = 0


def lines(column: Column, title: str, sum_is: str) -> list[str]:
    """Formats a report in GiB. Each row is rounded up or down, so that the printed rows add up to the printed sum.
    Args: title: the headline; sum_is: the label of the sum."""
    exact, total = {name: 1000 * size / GIB for name, size in column.rows.items()}, round(1000 * column.total / GIB)
    shown = {name: floor(size) for name, size in exact.items()}
    by_rest = sorted(exact, key=lambda name: shown[name] - exact[name])
    for name in by_rest[: total - sum(shown.values())]:
        shown[name] += 1
    rows = [(LABELS[name], size) for name, size in shown.items() if size]
    return [f"{title:<42}{'GiB':>10}", *(line(*row) for row in rows), f"{'-' * 8:>52}", line(sum_is, total)]


def line(label: str, thousandths: int) -> str:
    return f"  {label:<40}{thousandths / 1000:>10,.3f}"
