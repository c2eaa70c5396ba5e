"""Looks for races between streams with torch's own sanitizer for CUDA streams.

TORCH_CUDA_SANITIZER=1 switches the sanitizer on when torch is imported, so this case sets it for its process. The
sanitizer keeps vector clocks of streams and events (`torch.cuda._sanitizer`): a write and another access to one address
are a race if no event orders them, whenever they ran. A short training with streamed weights and offloaded boundaries
must not have a race. The same training without one of its waits must have one; otherwise the sanitizer does not see
these copies, and its silence proves nothing.

The sanitizer identifies a tensor by the address of its first byte, only on the device, and sees only work that the
threads of the training loop launch. `tests/offload/test_races.py` checks host memory and the host's threads without a
card. A rehearsal of this case uses the checker of that test.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from unittest.mock import patch

from torch.utils._python_dispatch import _get_current_dispatch_mode

from benchmarks.card import ours, recipes
from benchmarks.card.case import Here
from lowmem.config.settle import Run
from lowmem.offload.copy_lanes import CardLane
from lowmem.training.training import training_session

RUNS = {
    "streamed weights": False,
    "streamed weights that are not waited for": True,
}  # True: the device does not wait for copies
LINES = (  # two accumulation windows of two micro-batches, and an evaluation
    *("model=gpt2", "model.pretrained=false", *recipes.SMALL["model=gpt2"], "model.architecture.n_layer=4"),
    *("data=random", *recipes.STREAMED, "weights=streamed", "batch_size=2", "seq_len=16", "max_steps=2"),
    *("accumulation=fixed", "accumulation.batches=2", "val_every=2", "val_sequences=2", "sample_tokens=0"),
    *("scheduler=constant", "save_every=1000", "plan=off", "logger=csv", "export=null"),
)
LIBRARY = re.compile(r' *File "[^"]*/lib/python[^\n]*\n(?:    [^\n]*\n)*')  # a frame of a library in a stack trace


@dataclass
class Seen:
    """The accesses that the sanitizer saw during a training."""

    operators: Counter = field(default_factory=Counter)  # stream -> number
    copies: Counter = field(default_factory=Counter)  # True if the sanitizer saw the copy, else False -> number
    races: list[str] = field(default_factory=list)

    def launch(self, checked: Callable[..., list]) -> Callable[..., list]:
        """Wraps the sanitizer's check of an operator, so that a race is counted even if its error is suppressed."""

        def check(stream, *arguments):
            errors = checked(stream, *arguments)
            self.operators[str(stream)] += 1
            self.races += [LIBRARY.sub("", str(error)) for error in errors]
            return errors

        return check

    def copy(self, copies: Callable) -> Callable:
        """Wraps a lane's `copy` to count copies. The sanitizer only sees copies from threads in which it is active."""

        def counted(lane, *arguments):
            self.copies[_get_current_dispatch_mode() is not None] += 1
            return copies(lane, *arguments)

        return counted

    def right(self, wrong: bool) -> bool:
        """Returns whether the sanitizer saw copies and several streams, and found a race if and only if `wrong`: a wait
        was removed."""
        return self.copies[True] > 0 and len(self.operators) > 1 and bool(self.races) == wrong


def streamed_step(here: Here) -> Iterator[dict]:
    """Yields the row of a training, and the row of the same training without one of its waits."""
    run = ours.checked([*LINES, f"device={here.device}"])
    for name, wrong in RUNS.items():
        seen = _watched_run(run, here, wrong)
        found = {"races": len(seen.races), "operators": sum(seen.operators.values()), "streams": len(seen.operators)}
        found["copies seen"] = f"{seen.copies[True]} of {seen.copies.total()}"
        if seen.races and not wrong:
            found["first race"] = seen.races[0]
        yield {"run": name, "by": "lowmem", "found": found, "right": seen.right(wrong)}


def _watched_run(run: Run, here: Here, wrong: bool) -> Seen:
    with _by_torch() if here.on_card else _by_stand_in() as (seen, lane), ExitStack() as patches:
        patches.enter_context(patch.object(lane, "copy", seen.copy(lane.copy)))
        if wrong:
            patches.enter_context(patch.object(lane, "hold", lambda *_: None))
        patches.enter_context(training_session(run, here.folder / f"run-{wrong}", keeps=False))
    return seen


def _checked(handler, seen: Seen) -> AbstractContextManager:
    return patch.object(handler, "_handle_kernel_launch", seen.launch(handler._handle_kernel_launch))


@contextmanager
def _by_torch() -> Iterator[tuple[Seen, type]]:
    """Yields the accesses that torch's sanitizer sees in this process, and the class of the run's copy lanes.

    Raises:
        SystemExit: the sanitizer is off.
    """
    from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

    if not cuda_sanitizer.enabled:
        raise SystemExit("torch's sanitizer is off: torch was imported without TORCH_CUDA_SANITIZER=1.")
    seen = Seen()
    with _checked(cuda_sanitizer.dispatch.event_handler, seen), suppress(CUDASanitizerErrors):  # they are in `seen`
        yield seen, CardLane


@contextmanager
def _by_stand_in() -> Iterator[tuple[Seen, type]]:
    """Yields the accesses without a card, and the class of simulated copy lanes, which report every access to the
    sanitizer's checker."""
    from races import all_over
    from traced_lane import TracedLane, watched

    seen = Seen()
    with watched() as found, _checked(found.handler, seen), all_over(TracedLane(found)):
        yield seen, TracedLane
