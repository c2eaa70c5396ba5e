"""A second process that traces, beside a search: half of its time where there are two processors.

It is a fresh Python, not a copy of this one: a copy of a process with threads can hang, and one in which CUDA is in use
must not be made. It imports torch for itself, while this one does. It ends when its input does, so nothing is left
behind, however this process ends; and whatever it cannot do is done here, where errors are told.

Nothing heavy is imported at module level: a command starts it before it imports anything itself.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lowmem import processors
from lowmem.errors import Refused
from lowmem.settle import Run

if TYPE_CHECKING:
    from lowmem.plan.trace import Trace

Job = tuple  # a run as plain values, and the other arguments of `trace`


class NotTraced(Exception):
    """By another process."""


class Helper:
    """A process that traces. It is closed as a file is."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # a Ctrl-C is meant for the command, which ends this one
        )

    def __enter__(self) -> "Helper":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(OSError):  # what was not read any more
            self._process.stdin.close()
        self._process.stdout.close()

    @property
    def rss_bytes(self) -> int:
        import psutil

        with suppress(psutil.Error):
            return psutil.Process(self._process.pid).memory_info().rss
        return 0

    def traces(self, jobs: Sequence[Job]) -> "list | Refused | None":
        """What `trace` returns for each, or why one is refused; None: it cannot, and is not asked again."""
        try:
            pickle.dump(list(jobs), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, pickle.PickleError):
            return None


def elsewhere(run: "Run", on_card: bool, capability: float | None, rank: int = 0) -> "Trace":
    """What `trace` returns, of a process that is not one of several: these cannot make up others.

    Raises:
        NotTraced: it did not answer.
        Refused: what the run itself would be refused for.
    """
    with Helper() as one:
        traces = one.traces([(run.as_dict(), on_card, None, capability, rank)])
    if traces is None:
        raise NotTraced("the process that traces has ended without an answer.")
    if isinstance(traces, Refused):
        raise traces
    return traces[0]


def helper() -> Helper | None:
    """None: there is one processor, and two processes would wait for each other."""
    return Helper() if processors.usable() > 1 else None


def serve() -> None:
    """The process itself: answers until there is nobody to ask. What goes wrong ends it."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    from lowmem.settle import Run
    from lowmem.starting import undisturbed

    with undisturbed(), suppress(EOFError):
        from lowmem.plan.trace import trace

        while True:
            jobs = pickle.load(sys.stdin.buffer)
            try:
                found = [trace(Run.read(values), *others) for values, *others in jobs]
            except Refused as error:
                found = error
            pickle.dump(found, answers)
            answers.flush()
