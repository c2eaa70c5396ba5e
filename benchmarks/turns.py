"""Loops that take turns, one step each: what slows the machine down for a while slows all of them alike.

Each loop is a process of its own that waits before every step until it is told to go on. While one steps, the others
wait, so a step is as fast as if its process were alone, and the steps of two loops that are compared were a few
seconds apart. Started by hand, a loop waits for nobody.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.runner import ROOT, environment, result

PIPES = "ROW_PIPES"  # in the environment of a loop: what it reads its turns from, and where it gives them back
SETTLE = 0.05  # seconds between two turns, in which the threads of the last one fall asleep


class Turns:
    """In the process of a loop. Args: settled: returns when the device has done all that it was asked."""

    def __init__(self, settled: Callable[[], object] = lambda: None) -> None:
        self.settled = settled
        self.seconds: list[float] = []  # of every step but the last, from its start to the next one's
        self.pages: list[int] = []  # that had to be faulted in meanwhile
        self._pipes = [int(pipe) for pipe in os.environ.get(PIPES, "").split()]
        self._start: tuple[float, int] | None = None

    def next(self) -> None:
        """Call it where a step starts: gives the turn back, and returns when it is this loop's again."""
        self.settled()
        if self._start is not None:
            seconds, pages = _now()
            self.seconds.append(seconds - self._start[0])
            self.pages.append(pages - self._start[1])
        if self._pipes:
            to_read, to_write = self._pipes
            os.write(to_write, b".")
            os.read(to_read, 1)
        self._start = _now()


def _now() -> tuple[float, int]:
    """Seconds, and the pages that this process has faulted in."""
    return time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class _Loop:
    """In the process that measures."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        folder.mkdir()
        self.arguments, self.folder = arguments, folder
        (to_read, self.go), (self.back, to_write) = os.pipe(), os.pipe()
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment(folder) | {PIPES: f"{to_read} {to_write}"},
                stdout=out,
                stderr=err,
                pass_fds=(to_read, to_write),
            )
        os.close(to_read)
        os.close(to_write)

    def gave_back(self) -> bool:
        """Waits for it. False: the process has ended."""
        return bool(os.read(self.back, 1))

    def step(self) -> bool:
        time.sleep(SETTLE)
        os.write(self.go, b".")
        return self.gave_back()

    def result(self) -> dict:
        texts = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
        return result(self.arguments, self.process.wait(), *texts)


def _all_or_none(failure: SystemExit) -> dict:
    raise failure


def together(
    rows: Mapping[str, Sequence[str]], otherwise: Callable[[SystemExit], dict] = _all_or_none
) -> dict[str, dict]:
    """Args: rows: name -> arguments of `python`; otherwise: what stands in the place of a loop that failed.

    Returns:
        Name -> what it printed.
    """

    def ended(loop: _Loop) -> dict:
        try:
            return loop.result()
        except SystemExit as failure:
            return otherwise(failure)

    with tempfile.TemporaryDirectory() as folder:
        loops = {name: _Loop(arguments, Path(folder) / str(i)) for i, (name, arguments) in enumerate(rows.items())}
        going = [loop for loop in loops.values() if loop.gave_back()]
        while going:  # in alternating directions, so that nobody always follows the same
            going = [loop for loop in going if loop.step()][::-1]
        return {name: ended(loop) for name, loop in loops.items()}


def measure(teams: Sequence[Mapping[str, Sequence[str]]], rounds: int) -> dict[str, list[dict]]:
    """Args: teams: those that take turns. Returns: name -> what each round printed."""
    found: dict[str, list[dict]] = {name: [] for team in teams for name in team}
    for number in range(1, rounds + 1):
        for team in teams:
            for name, one in together(team).items():
                found[name].append(one)
                print(f"round {number}/{rounds}  {name:<32}{one['tokens_per_second']:,.0f} tokens/s", flush=True)
    return found


def speed_ratio(ours: Sequence[Mapping], theirs: Sequence[Mapping], warm_up: int) -> float:
    """How many times as fast we are: the median over the steps of all rounds, each beside the other's same step.

    What is done in few steps, such as the meter's break-down, is not in it; it is in `tokens_per_second`.
    """
    return median(their / our for our, their in _steps(ours, theirs, warm_up))


def difference(ours: Sequence[Mapping], theirs: Sequence[Mapping], warm_up: int) -> float:
    """Seconds that a step of ours takes longer, likewise."""
    return median(our - their for our, their in _steps(ours, theirs, warm_up))


def _steps(ours: Sequence[Mapping], theirs: Sequence[Mapping], warm_up: int) -> Iterator[tuple[float, float]]:
    for pair in zip(ours, theirs, strict=True):
        yield from zip(*(one["seconds"][warm_up:] for one in pair), strict=True)
