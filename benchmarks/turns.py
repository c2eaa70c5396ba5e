"""Alternates training loops step by step, so that a slow phase of the machine slows all loops equally.

Each loop runs in a separate process and waits for its turn before every step. While a loop runs its step, the other
loops wait, so the step is as fast as if no other loop existed. Corresponding steps of two loops are only a few seconds
apart. A loop that is started by hand does not wait for turns.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.runner import ROOT, environment, result

PIPES = "ROW_PIPES"  # environment variable: descriptors of the pipes by which a loop receives and hands back turns
SETTLE = 0.05  # seconds between two turns, so that the threads of the previous loop become idle


class Turns:
    """Waits for turns in the process of a loop."""

    def __init__(self) -> None:
        # For every step except the last: the seconds and the minor page faults from the beginning of the turn to the
        # next call of `next`. The wait for the next turn is not included.
        self.seconds: list[float] = []
        self.pages: list[int] = []
        self._pipes = [int(pipe) for pipe in os.environ.get(PIPES, "").split()]
        self._start: tuple[float, int] | None = None

    def next(self) -> None:
        """Hands the turn back and waits for the next turn. Call it at the start of each step."""
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
    """Returns (seconds, number of this process's minor page faults)."""
    return time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class _Loop:
    """Starts a loop in another process and gives it turns."""

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
        """Waits until the loop hands its turn back. Returns False if its process has ended instead."""
        return bool(os.read(self.back, 1))

    def step(self) -> bool:
        time.sleep(SETTLE)
        os.write(self.go, b".")
        return self.gave_back()

    def result(self) -> dict:
        texts = ((self.folder / name).read_text() for name in ("stdout", "stderr"))
        return result(self.arguments, self.process.wait(), *texts)


def take_turns(rows: Mapping[str, Sequence[str]]) -> dict[str, dict]:
    """Runs one round of loops that take turns step by step.

    Args:
        rows: name -> arguments of `python`.

    Returns:
        A dict that maps the name of each loop to its result.

    Raises:
        SystemExit: a loop failed. The other loops have run to their end.
    """
    with tempfile.TemporaryDirectory() as folder:
        loops = {name: _Loop(arguments, Path(folder) / str(i)) for i, (name, arguments) in enumerate(rows.items())}
        going = [loop for loop in loops.values() if loop.gave_back()]
        while going:  # in alternating directions, so that no loop always follows the same other loop
            going = [loop for loop in going if loop.step()][::-1]
        return {name: loop.result() for name, loop in loops.items()}


def measure(teams: Sequence[Mapping[str, Sequence[str]]], rounds: int) -> dict[str, list[dict]]:
    """Runs groups of loops, one group after the other, in every round.

    Args:
        teams: groups of loops, each a dict: name of a loop -> arguments of `python`. The loops of a group alternate
            step by step.
        rounds: number of rounds.

    Returns:
        A dict that maps the name of each loop to its results, one per round.
    """
    results: dict[str, list[dict]] = {name: [] for team in teams for name in team}
    for number in range(1, rounds + 1):
        for team in teams:
            for name, figures in take_turns(team).items():
                results[name].append(figures)
                print(f"round {number}/{rounds}  {name:<32}{figures['tokens_per_second']:,.0f} tokens/s", flush=True)
    return results


def speed_ratio(ours: Sequence[Mapping], theirs: Sequence[Mapping], warm_up: int) -> float:
    """Returns the ratio of our loop's speed to the other loop's speed, as the median over all pairs of corresponding
    steps. Args: ours, theirs: results of the rounds; warm_up: number of first steps that are not compared.

    Rare work, such as the meter's sampled steps, hardly changes this median, but it lowers `tokens_per_second`.
    """
    return median(their / our for our, their in _steps(ours, theirs, warm_up))


def difference(ours: Sequence[Mapping], theirs: Sequence[Mapping], warm_up: int) -> float:
    """Returns the seconds by which a step of our loop takes longer than the corresponding step of the other loop
    (median)."""
    return median(our - their for our, their in _steps(ours, theirs, warm_up))


def _steps(ours: Sequence[Mapping], theirs: Sequence[Mapping], warm_up: int) -> Iterator[tuple[float, float]]:
    for pair in zip(ours, theirs, strict=True):
        yield from zip(*(loop["seconds"][warm_up:] for loop in pair), strict=True)
