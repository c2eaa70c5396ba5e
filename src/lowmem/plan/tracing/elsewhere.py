"""Traces a run in a separate process. In a run on several devices, rank 0 uses this module to predict the memory,
because a process that belongs to a process group cannot simulate ranks (`one_rank.py`).

The process is a new Python interpreter and not a fork: forking a process with threads can hang, and a process that uses
CUDA must not be forked.
"""

import os
import pickle
import subprocess
import sys

from lowmem.config.settle import Run
from lowmem.plan.tracing.trace import trace
from lowmem.plan.tracing.traces import Trace
from lowmem.system.errors import Refused
from lowmem.system.without_gc import undisturbed


class NotTraced(Exception):
    """The separate process did not trace the run."""


def trace_elsewhere(run: Run, on_card: bool, capability: float | None = None, rank: int = 0) -> Trace:
    """Calls `trace` in a separate process, and returns its result. All blocks of the model are traced.

    Raises:
        NotTraced: the separate process failed.
        Refused: `trace` raised it in the separate process.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((run.as_dict(), on_card, None, capability, rank)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        raise NotTraced("the process that traces has ended without an answer.")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, Refused):
        raise answer
    return answer


def main() -> None:
    """Runs in the separate process: reads a pickled run from stdin, traces the run, and writes the pickled trace to
    stdout, or the `Refused` that `trace` raised."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # text that libraries print must not be mixed with the answer
    values, *others = pickle.load(sys.stdin.buffer)
    with undisturbed(), answers:
        try:
            answer = trace(Run.read(values), *others)
        except Refused as error:
            answer = error
        pickle.dump(answer, answers)


if __name__ == "__main__":
    main()
