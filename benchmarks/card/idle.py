"""Measures, for five training loops, the share of time in which the card is idle, and how many times per step the host
waits for the card.

A loop that reads a number from the card, such as the loss, waits until the queued work is done. Then the card is idle
until new work is queued. GPT-2 124M shows such waits best, because its steps take less than 20 ms. The other model,
with 1.24B parameters, is of a more usual size for a data-center card.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks import loops as others
from benchmarks.card import ours
from benchmarks.card.beside import PLAIN, frameworks, other
from benchmarks.card.blocks import Blocks, attempt
from benchmarks.card.case import Here

RUNS = ("GPT-2 124M, bf16", "1.24B, bf16")
STEPS = 3  # number of steps that are profiled, and number of further steps in which waits are counted
READS = ("aten::_local_scalar_dense", "aten::nonzero")  # operators whose result the host reads
WAITED = "called a synchronizing CUDA operation"  # these words are not in torch's warning that the mode is a prototype


def loops(here: Here) -> Iterator[dict]:
    """Yields the rows of lowmem, of a plain loop and of the frameworks' loops, for each model."""
    for run in RUNS:
        yield _row(here, run, "lowmem", lambda watch, run=run: ours.train(run, here, watch))
        for by, loop in {PLAIN: others.plain, **frameworks()}.items():
            yield _row(here, run, by, partial(other, here, loop, by, run))


def _row(here: Here, run: str, by: str, train) -> dict:
    watch = Profiled(here)
    row = attempt(lambda: train(watch))
    watch.close()
    here.release()
    why = {"why": row["why"]} if "why" in row else {}
    return {"run": run, "by": by, "found": watch.found} | why


class Profiled(Blocks):
    """Profiles STEPS steps, then counts waits in STEPS more steps. No times of these steps are used, because profiling
    slows the steps."""

    def __init__(self, here: Here) -> None:
        super().__init__(here, 2 * STEPS)
        self.found: dict[str, float | None] = {}
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if here.on_card else [])]
        self._profile = profile(activities=activities)
        self._under_way = ExitStack()

    def begin(self) -> None:
        if self.begun == self.warm_up:
            self.here.settle()
            self._under_way.enter_context(self._profile)
        elif self.begun == self.warm_up + STEPS:
            self._end_profile()
            self._begin_counting()
        super().begin()

    def end(self) -> None:
        super().end()
        if self.ended == self.all_steps and self.here.on_card:
            self.close()
            self.found["waits per step"] = waits(self._messages) / STEPS

    def close(self) -> None:
        """Ends active measurements. Must also be called after an error, because the next loop runs in the same
        process."""
        self._under_way.close()

    def _end_profile(self) -> None:
        self.here.settle()
        self.close()
        counted = {event.key: event.count for event in self._profile.key_averages()}
        self.found["operators per step that return a number"] = sum(counted.get(name, 0) for name in READS) / STEPS
        if self.here.on_card:
            self.found["share of time that the card is idle"] = idle(on_card(self._profile.events()))

    def _begin_counting(self) -> None:
        if self.here.on_card:
            self._messages = self._under_way.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            self._under_way.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode("warn")


def waits(messages: Iterable[warnings.WarningMessage]) -> int:
    """Returns how many of the messages are torch's warning that the host waits for the card."""
    return sum(WAITED in str(one.message) for one in messages)


def on_card(events: Iterable[FunctionEvent]) -> Iterator[tuple[float, float]]:
    """Yields (start, end) of kernels and copies on the card. Skips named regions, such as an optimizer's step, because
    their events include the gaps between kernels."""
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            yield event.time_range.start, event.time_range.end


def idle(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Returns the share of the time from the first start to the last end that no interval covers, or None without
    intervals."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, busy, until = ordered[0][0], 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - busy / (until - first)
