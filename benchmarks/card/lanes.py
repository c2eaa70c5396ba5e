"""Lanes that look at the clock: how long copies to the device take, and how long the device stands still for them."""

import time
from collections.abc import Callable

import torch

from lowmem.offload.link import CudaLane
from made_up import SlowLane

Timed = list[Callable[[], float]]  # each: seconds, asked for when all is done
FIRST = 3  # the first of so many parts is not looked at: nothing is warm


class OnCard(CudaLane):
    """By the device's own clock, on the stream that copies and on the one that computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copied: Timed = []
        self.waited: Timed = []

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        if not to.is_cuda:
            return super().copy(to, source, after)
        self._up.wait_event(after)  # before the clock starts: a copy that has to wait takes no longer
        return _on(self._up, self.copied, lambda: super(OnCard, self).copy(to, source, after))

    def hold(self, until: torch.cuda.Event) -> None:
        now = torch.cuda.current_stream(self.device)
        _on(now, self.waited, lambda: super(OnCard, self).hold(until))


def _on(stream: torch.cuda.Stream, into: Timed, call: Callable):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    found = call()
    end.record(stream)
    into.append(lambda: start.elapsed_time(end) / 1000)
    return found


class Rehearsed(SlowLane):
    """By this machine's clock, of copies that are made up."""

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
    """Of all that was timed once everything was warm."""
    return sum(one() for one in timed[len(timed) // FIRST :])
