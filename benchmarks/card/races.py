"""Looks for races between CUDA streams with torch's sanitizer.

TORCH_CUDA_SANITIZER=1 switches the sanitizer on when torch is imported, so the variable is set for the process of this
case. The sanitizer (`torch.cuda._sanitizer`) keeps vector clocks of streams and events. A write and another access to
the same address are a race if no event orders them, regardless of when they ran. A short training with streamed weights
and offloaded boundaries must not have a race. The same training must have a race if the device does not wait for
copies. If the sanitizer reports none then, it does not see the copies, and a training without reported races proves
nothing.

The sanitizer identifies a tensor by the address of its first byte. It sees only device memory, and only work that
threads of the training loop launch. `tests/offload/test_races.py` checks host memory and the other host threads,
without a card. A rehearsal of this case uses the checker of that test.
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
LINES = (  # two accumulation windows of two micro-batches each, then an evaluation
    *("model=gpt2", "model.pretrained=false", *recipes.SMALL["model=gpt2"], "model.architecture.n_layer=4"),
    *("data=random", *recipes.STREAMED, "weights=streamed", "batch_size=2", "seq_len=16", "max_steps=2"),
    *("accumulation=fixed", "accumulation.batches=2", "val_every=2", "val_sequences=2", "sample_tokens=0"),
    *("scheduler=constant", "save_every=1000", "plan=off", "logger=csv", "export=null"),
)
LIBRARY = re.compile(r' *File "[^"]*/lib/python[^\n]*\n(?:    [^\n]*\n)*')  # a stack frame in a library


@dataclass
class Seen:
    """The accesses that the sanitizer saw during a training."""

    operators: Counter = field(default_factory=Counter)  # stream -> number of operators
    copies: Counter = field(default_factory=Counter)  # True: copies seen by the sanitizer; False: other copies
    races: list[str] = field(default_factory=list)

    def launch(self, checked: Callable[..., list]) -> Callable[..., list]:
        """Returns a wrapper of the sanitizer's check of an operator. The wrapper counts operators and records races,
        because the error that the sanitizer raises for a race may be suppressed."""

        def check(stream, *arguments):
            errors = checked(stream, *arguments)
            self.operators[str(stream)] += 1
            self.races += [LIBRARY.sub("", str(error)) for error in errors]
            return errors

        return check

    def copy(self, copies: Callable) -> Callable:
        """Returns a wrapper of a lane's `copy` that counts copies. The sanitizer sees a copy only if a dispatch mode is
        active in the copying thread."""

        def counted(lane, *arguments):
            self.copies[_get_current_dispatch_mode() is not None] += 1
            return copies(lane, *arguments)

        return counted

    def right(self, wrong: bool) -> bool:
        """Returns True if the sanitizer saw copies and several streams, and found a race if and only if `wrong` is
        True. Args: wrong: True if the device did not wait for copies."""
        return self.copies[True] > 0 and len(self.operators) > 1 and bool(self.races) == wrong


def streamed_step(here: Here) -> Iterator[dict]:
    """Yields the row of a training, and the row of the same training in which the device does not wait for copies."""
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
    """Yields a `Seen` and the class of the run's copy lanes. The `Seen` is filled with the accesses that torch's
    sanitizer sees in this process.

    Raises:
        SystemExit: the sanitizer is off.
    """
    from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

    if not cuda_sanitizer.enabled:
        raise SystemExit("torch's sanitizer is off: torch was imported without TORCH_CUDA_SANITIZER=1.")
    seen = Seen()
    with _checked(cuda_sanitizer.dispatch.event_handler, seen), suppress(CUDASanitizerErrors):  # stored in `seen`
        yield seen, CardLane


@contextmanager
def _by_stand_in() -> Iterator[tuple[Seen, type]]:
    """Yields a `Seen` and the class of the simulated copy lanes. The `Seen` is filled with the accesses that these
    lanes report to the sanitizer's checker. Needs no card."""
    from races import all_over
    from traced_lane import TracedLane, watched

    seen = Seen()
    with watched() as found, _checked(found.handler, seen), all_over(TracedLane(found)):
        yield seen, TracedLane
