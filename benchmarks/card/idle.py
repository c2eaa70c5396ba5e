"""Measures how much of a step the card is idle, and how often a step waits for the card, in four training loops.

A loop that reads a number from the card, such as the loss, waits until all queued work is done; until the next work is
queued the card is idle. In GPT-2 124M a step takes less than 20 ms, so that waiting shows; 1.24B parameters are the
smallest model that people train on such a card.
"""

import warnings
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import loops as others
from benchmarks.card import ours
from benchmarks.card.beside import PLAIN, frameworks, other
from benchmarks.card.blocks import Blocks, attempt
from benchmarks.card.case import Here

RUNS = ("GPT-2 124M, bf16", "1.24B, bf16")
STEPS = 3  # that are profiled, and as many in which waits are counted
READS = ("aten::_local_scalar_dense", "aten::nonzero")  # operators whose result the host needs


def loops(here: Here) -> Iterator[dict]:
    """Yields lowmem, a plain loop and the loops of frameworks, for each model."""
    for run in RUNS:
        yield _row(here, run, "lowmem", lambda watch, run=run: ours.train(run, here, watch))
        for by, loop in {PLAIN: others.plain, **frameworks()}.items():
            yield _row(here, run, by, partial(_other, here, loop, by, run))


def _other(here: Here, loop, by: str, run: str, watch: Blocks) -> dict:
    return other(here, loop, by, run, watch)


def _row(here: Here, run: str, by: str, train) -> dict:
    watch = Profiled(here)
    row = attempt(lambda: train(watch))
    here.release()
    why = {"why": row["why"]} if "why" in row else {}
    return {"run": run, "by": by, "found": watch.found} | why


class Profiled(Blocks):
    """Profiles some steps and counts waits in as many more. The block itself is not a measurement of speed."""

    def __init__(self, here: Here) -> None:
        super().__init__(here, 2 * STEPS)
        self.found: dict[str, float | None] = {}
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if here.on_card else [])]
        self._profile = profile(activities=activities)
        self._caught = warnings.catch_warnings(record=True)

    def begin(self) -> None:
        if self.begun == self.warm_up:
            self.here.settle()
            self._profile.start()
        elif self.begun == self.warm_up + STEPS:
            self._end_profile()
            self._begin_counting()
        super().begin()

    def end(self) -> None:
        super().end()
        if self.ended == self.all_steps and self.here.on_card:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.found["waits per step"] = sum("synchroniz" in str(one.message) for one in self._messages) / STEPS

    def _end_profile(self) -> None:
        self.here.settle()
        self._profile.stop()
        counted = {event.key: event.count for event in self._profile.key_averages()}
        self.found["operators per step that return a number"] = sum(counted.get(name, 0) for name in READS) / STEPS
        if self.here.on_card:
            on_card = [e for e in self._profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            self.found["share of time that the card is idle"] = idle(
                (e.time_range.start, e.time_range.end) for e in on_card
            )

    def _begin_counting(self) -> None:
        if self.here.on_card:
            self._messages = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")


def idle(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Returns the share of the time from the first start to the last end in which no interval lasts, or None."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, busy, until = ordered[0][0], 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - first)
