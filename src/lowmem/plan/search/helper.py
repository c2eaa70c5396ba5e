"""Starts a second process that traces for a search: with two processors a search takes half the time.

The helper is a fresh Python, not a fork: a forked process with threads can hang, and a process that uses CUDA must not
be forked. It imports torch while this process does the same. It ends when its input ends, so it does not survive this
process, however that ends. This process does what the helper cannot, and reports the errors.

Nothing heavy is imported at module level: a command starts the helper before its own imports.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lowmem.config.settle import Run
from lowmem.system import processors
from lowmem.system.errors import Refused

if TYPE_CHECKING:
    from lowmem.plan.tracing.trace import Trace

Job = tuple  # a run as plain values, and the other arguments of `trace`


class NotTraced(Exception):
    """The other process did not trace the run."""


class Helper:
    """Wraps a process that traces. Close it with a `with` block, like a file."""

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
        with suppress(OSError):  # the process may not have read its input
            self._process.stdin.close()
        self._process.stdout.close()

    @property
    def rss_bytes(self) -> int:
        import psutil

        with suppress(psutil.Error):
            return psutil.Process(self._process.pid).memory_info().rss
        return 0

    def traces(self, jobs: Sequence[Job]) -> "list | Refused | None":
        """Returns the result of `trace` for each job, or the refusal of one; None: it failed and is not used again."""
        try:
            pickle.dump(list(jobs), self._process.stdin)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, pickle.PickleError):
            return None


def elsewhere(run: "Run", on_card: bool, capability: float | None, rank: int = 0) -> "Trace":
    """Returns the result of `trace` from another process: a rank of a running process group cannot simulate others.

    Raises:
        NotTraced: the other process did not answer.
        Refused: the run itself would be refused for the same reason.
    """
    with Helper() as process:
        traces = process.traces([(run.as_dict(), on_card, None, capability, rank)])
    if traces is None:
        raise NotTraced("the process that traces has ended without an answer.")
    if isinstance(traces, Refused):
        raise traces
    return traces[0]


def helper() -> Helper | None:
    """Starts a helper; None: there is only one processor, and two processes would wait for each other."""
    return Helper() if processors.usable() > 1 else None


def serve() -> None:
    """Runs in the helper process: answers jobs until its input ends. An error ends the process."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output that a library prints must not mix with answers
    from lowmem.config.settle import Run
    from lowmem.system.without_gc import undisturbed

    with undisturbed(), suppress(EOFError):
        from lowmem.plan.tracing.trace import trace

        while True:
            jobs = pickle.load(sys.stdin.buffer)
            try:
                answer = [trace(Run.read(values), *others) for values, *others in jobs]
            except Refused as error:
                answer = error
            pickle.dump(answer, answers)
            answers.flush()
