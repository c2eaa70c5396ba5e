"""Defines how many micro-batches each optimizer step accumulates (`accumulation=`).

A window consists of the micro-batches of one optimizer step. The loader yields complete windows, and counts the labels
of each window (with preference losses, the pairs or answers). Before the backward pass, the summed loss of each
micro-batch is divided by this count of the *window*. So, up to rounding, the update equals the update from one large
batch, even if sequences differ in length or an epoch ends in a short window. Accumulation saves activation memory:
unless micro-batches overlap (`Run.overlaps`), only the activations of one micro-batch exist at a time. The costs are
smaller matmuls, and gradients that stay in memory between micro-batches.

Lightning's own accumulation weights a short last window too little (Lightning #19987), gives every micro-batch the same
weight whatever its number of tokens (#20350), and schedules by epoch only (#21583).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lowmem.system.errors import Refused


@dataclass(frozen=True)
class WindowSize:
    """The number of micro-batches in each window. The last window of an epoch may be shorter.

    Args:
        sizes: index of an epoch or window, counted from 0 -> number of micro-batches in each window, starting with this
            epoch or window.
        by: the unit of the keys of `sizes`. A window counts as one optimizer step, even if fp16 skips the step.
    """

    sizes: Mapping[int, int]
    by: Literal["epoch", "window"] = "window"

    def __call__(self, epoch: int, window: int) -> int:
        now = epoch if self.by == "epoch" else window
        return self.sizes[max(start for start in self.sizes if start <= now)]

    @property
    def largest(self) -> int:
        return max(self.sizes.values())


def fixed(batches: int) -> WindowSize:
    """Returns a `WindowSize` of `batches` micro-batches for every window."""
    if not _counts(batches):
        raise Refused(
            f"accumulation.batches={batches}: an optimizer step needs at least one micro-batch. Type "
            "accumulation.batches=1 or more."
        )
    return WindowSize({0: batches})


def effective_batch(size: int, batch_size: int, devices: int = 1) -> WindowSize:
    """Returns a `WindowSize` with which each optimizer step uses `size` sequences, counted over all devices."""
    sequences = batch_size * devices
    if not _counts(size) or size % sequences:
        near = max(1, round(size / sequences)) * sequences
        raise Refused(
            f"accumulation.size={size}: this is not a multiple of devices x batch_size = {devices} x {batch_size}. "
            f"Type accumulation.size={near}, or a batch_size that divides it."
        )
    return WindowSize({0: size // sequences})


def by_epoch(sizes: Mapping[int, int]) -> WindowSize:
    """Returns a `WindowSize` that depends on the epoch: `{0: 1, 3: 4}` means one micro-batch per window in epochs 0 to
    2, and four micro-batches from epoch 3 on."""
    return WindowSize(_checked(sizes), "epoch")


def by_step(sizes: Mapping[int, int]) -> WindowSize:
    """Returns a `WindowSize` that depends on the number of completed windows: `{0: 3, 101: 4}` means three
    micro-batches in each of the first 101 windows, and four micro-batches in each later window."""
    return WindowSize(_checked(sizes), "window")


def divisors(n: int) -> list[int]:
    """Returns the divisors of `n`, ascending: the micro-batch sizes into which `n` sequences can be divided evenly."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _checked(sizes: Mapping[int, int]) -> dict[int, int]:
    sizes = dict(sizes)
    if 0 not in sizes or not all(_counts(n) and isinstance(at, int) and at >= 0 for at, n in sizes.items()):
        raise Refused(
            f"accumulation.sizes={sizes}: each key must be an epoch or step, the first one 0, and each value a number "
            "of micro-batches, at least 1. Type accumulation.sizes='{0: 3, 101: 4}'."
        )
    return sizes


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
