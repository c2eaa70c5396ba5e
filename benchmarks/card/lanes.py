"""Copy lanes that measure how long copies to the device take, and how long the device waits for them.

`OnCard` measures with CUDA events; `Rehearsed` simulates copies without a card.
"""

import time
from collections.abc import Callable

import torch

from lowmem.offload.copy_lanes import CardLane
from made_up import SlowLane

Timed = list[Callable[[], float]]  # functions that return seconds; to be called after all copies have ended
FIRST = 3  # the first 1/FIRST of the measurements is left out as warm-up


class OnCard(CardLane):
    """Measures with CUDA events, on the copy stream and on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copied: Timed = []
        self.waited: Timed = []

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: torch.Event) -> torch.Event:
        if self.is_host(to):
            return super().copy(to, source, after)
        self._up.wait_event(after)  # before the first event, so that the copy's time does not include the wait
        return _on(self._up, self.copied, lambda: super(OnCard, self).copy(to, source, after))

    def hold(self, until: torch.Event) -> None:
        _on(self.computing(), self.waited, lambda: super(OnCard, self).hold(until))


def _on(stream: torch.Stream, into: Timed, call: Callable):
    """Calls `call` between two events on `stream`. Returns its result, and appends to `into` a function that returns
    the seconds between the events."""
    start, end = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
    start.record(stream)
    found = call()
    end.record(stream)
    into.append(lambda: start.elapsed_time(end) / 1000)
    return found


class Rehearsed(SlowLane):
    """Measures simulated copies with the clock of this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: Timed = []
        self.waited: Timed = []

    def copy(self, to, source, after):
        start, ended = time.perf_counter(), []
        landed = super().copy(to, source, after)
        landed.future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        self.copied.append(lambda: ended[0] - start)
        return landed

    def hold(self, until):
        start = time.perf_counter()
        super().hold(until)
        taken = time.perf_counter() - start
        self.waited.append(lambda: taken)


def seconds(timed: Timed) -> float:
    """Returns the sum of the measured seconds, without the first third (warm-up)."""
    return sum(one() for one in timed[len(timed) // FIRST :])
