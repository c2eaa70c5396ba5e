"""Makes the traces that a search needs, in this process and in a helper process."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread

from tqdm import tqdm

from lowmem.config.settle import Run
from lowmem.plan.search.derive import Derivation, Needed
from lowmem.plan.search.helper import Helper
from lowmem.plan.tracing.trace import untraceable
from lowmem.system.errors import Refused

WAIT = 2  # seconds: a longer wait is announced


def trace_all(run: Run, derivation: Derivation, needed: Iterable[Needed], helper: Helper | None = None) -> None:
    """Makes all traces, the slow step of a search. Its duration is printed after the first trace.

    Raises:
        Refused: the model cannot be traced.
    """
    todo = deque(need for need in {str(need): need for need in needed}.values() if not derivation.has(*need))
    if not todo:
        return
    tqdm.write(f"Tracing {len(todo)} way{'s' * (len(todo) > 1)} to compute by shape ...", file=sys.stderr)
    with tqdm(total=len(todo), desc="tracing", unit="way", delay=WAIT, disable=None, leave=False) as bar:
        with _helped(derivation, todo, helper, bar.update):
            _trace(run, derivation, todo, 2 if helper else 1, bar.update)
        _trace(run, derivation, todo, 1, bar.update)  # what the helper could not trace


def _trace(run: Run, derivation: Derivation, todo: deque[Needed], processes: int, done: Callable[[], object]) -> None:
    announced = False
    while need := _taken(todo.popleft):
        start = time.perf_counter()
        try:
            derivation.traced(*need)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"model.name={run.model.name}: a search needs traces of the model, and {untraceable(error)} For an "
                "estimate of one run, add search=false to python plan.py."
            ) from None
        done()
        if not announced and (seconds := (time.perf_counter() - start) * len(todo) / processes) > WAIT:
            # Other traces differ from the first, and the helper still imports: 0.7 to 1.8 times this was measured.
            tqdm.write(f"... which takes {seconds:.0f} to {2 * seconds:.0f} s.", file=sys.stderr)
        announced = True


@contextmanager
def _helped(
    derivation: Derivation, todo: deque[Needed], helper: Helper | None, done: Callable[[], object]
) -> Iterator[None]:
    """Lets the helper take work from the end of `todo`, and give back what it cannot trace."""
    if helper is None:
        yield
        return
    for need in todo:
        derivation.compose(need[0])  # in this thread: Hydra works in one only

    def take() -> None:
        while need := _taken(todo.pop):
            corners, target = derivation.corners(*need), derivation.target
            jobs = [(run.as_dict(), target.on_card, depth, target.capability) for depth, _, run in corners]
            if not isinstance(traces := helper.traces(jobs), list):  # this process then raises the refusal
                todo.append(need)
                return
            derivation.take(*need, corners, traces)
            done()

    thread = Thread(target=take, daemon=True)
    thread.start()
    yield
    thread.join()


def _taken(take: Callable[[], Needed]) -> Needed | None:
    """Returns the next item; None: nothing is left."""
    try:
        return take()
    except IndexError:
        return None
