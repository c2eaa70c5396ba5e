"""Traces a run in a separate process, because a rank of a running process group cannot simulate other ranks.

The process is a new Python interpreter instead of a fork: forking a process with threads can hang, and a process that
uses CUDA must not be forked.
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
    """The other process did not trace the run."""


def trace_elsewhere(run: Run, on_card: bool, capability: float | None = None, rank: int = 0) -> Trace:
    """Returns the result of `trace` from another process.

    Raises:
        NotTraced: the other process did not answer.
        Refused: the run itself would be refused for the same reason.
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
    """The other process: reads a run from stdin, traces it, and writes the trace to stdout."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries must not mix with the answer
    values, *others = pickle.load(sys.stdin.buffer)
    with undisturbed(), answers:
        try:
            answer = trace(Run.read(values), *others)
        except Refused as error:
            answer = error
        pickle.dump(answer, answers)


if __name__ == "__main__":
    main()
