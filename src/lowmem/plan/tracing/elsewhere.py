"""Traces a run in a separate process. When a run on several devices starts, rank 0 uses this module to predict the
memory, because a process that belongs to a process group cannot simulate ranks (`one_rank.py`).

The process is a new Python interpreter and not a fork: a fork of a process with threads can hang, and a forked process
cannot use CUDA if its parent has used it.
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
    """The separate process ended without returning a trace."""


def trace_elsewhere(run: Run, on_card: bool, capability: float | None = None, rank: int = 0) -> Trace:
    """Calls `trace` in a separate process, with all blocks of the model, and returns the result.

    Raises:
        NotTraced: the separate process failed, for example because the model cannot be traced.
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
    """Runs in the separate process: reads a pickled run and arguments of `trace` from stdin, calls `trace`, and writes
    the pickled result to stdout. The result is the trace, or the `Refused` that `trace` raised."""
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
