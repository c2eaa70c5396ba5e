"""Stage 9 looks for races between streams, with torch's own sanitizer for CUDA streams.

TORCH_CUDA_SANITIZER=1 switches it on when torch is imported, so each case has a process that begins with it. It keeps
vector clocks of streams and events (`torch.cuda._sanitizer`): two accesses to one address are a race if nothing orders
one after the other, whenever they ran. A short training with streamed weights and offloaded boundaries must have none.
The same training with one wait left out must have one: otherwise the sanitizer sees nothing here, and "none" says
nothing.

It sees a tensor by its first byte, only on the device, and only what the training loop's threads ask for. Host memory
and the host's own threads are watched by `tests/techniques/weights/test_races.py`, without a card. Its checker is the
same, and so it stands in here where there is no card.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

from benchmarks.card.case import Case, Here, LeftOut, Size, Stage

STAGE = Stage(9, "races between streams", __name__, seconds=300)
SWITCH = {"TORCH_CUDA_SANITIZER": "1"}
RIGHT, WRONG = "streamed weights", "the same without waiting for a copy"
RECIPE = ("optim=adamw8bit", "clip=null", "gradient_checkpointing=offload", "loss=tiled", "weights=streamed")
RUN = ("max_steps=3", "val_sequences=8", "save_every=1000", "scheduler=constant", "log_every=1", "plan=off")
LIBRARY = re.compile(r' *File "[^"]*/lib/python[^\n]*\n(?:    [^\n]*\n)*')  # a library's frame in a stack


@dataclass
class Seen:
    """Holds what the sanitizer saw of a training."""

    operators: Counter = field(default_factory=Counter)  # stream -> number
    copies: Counter = field(default_factory=Counter)  # "seen" or "not seen" -> number
    races: list[str] = field(default_factory=list)

    def launch(self, checked: Callable[..., list]) -> Callable[..., list]:
        """Wraps the sanitizer's check of an operator, so that a race counts even if somebody suppresses its error."""

        def check(stream, *arguments):
            errors = checked(stream, *arguments)
            self.operators[str(stream)] += 1
            self.races += [LIBRARY.sub("", str(error)) for error in errors]
            return errors

        return check

    def copy(self, copies: Callable) -> Callable:
        """Wraps a lane's `copy`: the sanitizer sees those of threads in which it is on."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        def counted(lane, *arguments):
            self.copies["not seen" if _get_current_dispatch_mode() is None else "seen"] += 1
            return copies(lane, *arguments)

        return counted


def cases(size: Size) -> Mapping[str, Case]:
    switch = SWITCH if size.whole else {}  # without a CUDA device torch could not run an operator with it
    return {name: Case(partial(find_races, wrong=name == WRONG), 150, environment=switch) for name in (RIGHT, WRONG)}


def find_races(here: Here, wrong: bool) -> dict:
    """Trains a few steps and returns the races that were found. Args: wrong: the device waits for no copy."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    cfg = _settled(here)
    with (_by_torch if here.on_card else _by_stand_in)() as (seen, lane), ExitStack() as patches:
        patches.enter_context(patch.object(lane, "copy", seen.copy(lane.copy)))
        if wrong:
            patches.enter_context(patch.object(lane, "hold", lambda *_: None))
        with suppress(CUDASanitizerErrors):  # they are in `seen`
            _train(here, cfg)
    found = {"races": seen.races, "operators": dict(seen.operators), "copies": dict(seen.copies)}
    return found | {"right": right(found, wrong)}


def right(found: Mapping, wrong: bool) -> bool:
    """Returns whether the sanitizer saw copies, and a race only where one was made."""
    return found["copies"].get("seen", 0) > 0 and len(found["operators"]) > 1 and bool(found["races"]) == wrong


def _settled(here: Here):
    """Returns the settings of the run, in the 16-bit precision that this card has.

    Raises:
        LeftOut: they are refused on this card.
    """
    from lowmem.config import cards
    from lowmem.config.check import check
    from lowmem.config.settle import run_of
    from lowmem.system.errors import Refused

    precision = "bf16" if not here.on_card or cards.here().multiplies("bfloat16") else "16"
    lines = [*here.typed(), *here.size.bits, *RECIPE, *RUN, f"precision={precision}-master"]
    try:
        cfg = run_of(lines).resolved()
        check(cfg, {})
    except Refused as why:
        raise LeftOut(str(why)) from None
    return cfg


def _train(here: Here, cfg) -> None:
    from lowmem.training.training import training_session

    with training_session(cfg, here.folder / "run", keeps=False):
        pass


@contextmanager
def _by_torch() -> Iterator[tuple[Seen, type]]:
    """Yields what torch's sanitizer sees of this process, and the class of its lanes.

    Raises:
        SystemExit: it is not on.
    """
    from torch.cuda._sanitizer import cuda_sanitizer

    from lowmem.system.copy_lanes import CardLane

    if not cuda_sanitizer.enabled:
        raise SystemExit("torch's sanitizer is off: torch was imported without TORCH_CUDA_SANITIZER=1.")
    seen, handler = Seen(), cuda_sanitizer.dispatch.event_handler
    with patch.object(handler, "_handle_kernel_launch", seen.launch(handler._handle_kernel_launch)):
        yield seen, CardLane


@contextmanager
def _by_stand_in() -> Iterator[tuple[Seen, type]]:
    """Yields the same where there is no card: simulated lanes tell the sanitizer's checker of every access."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    from lowmem.techniques.gradient_checkpointing import boundary
    from lowmem.techniques.precision import host_masters
    from lowmem.techniques.weights import streamed
    from lowmem.techniques.weights.link import StagedLink
    from traced_lane import TracedLane, watched

    seen = Seen()
    with watched() as races, ExitStack() as patches:
        check, lane = seen.launch(races.handler._handle_kernel_launch), TracedLane(races)

        def as_torch(*arguments):  # a race ends the training
            if errors := check(*arguments):
                raise CUDASanitizerErrors(errors)
            return errors

        link = lambda device: StagedLink(lane, slot_bytes=1 << 14, slots=2)  # noqa: E731
        for owner, name, value in (
            (races.handler, "_handle_kernel_launch", as_torch),
            (boundary, "_lane", lambda device: lane),
            (streamed, "lane_of", lambda device: lane),
            (host_masters, "link_to", link),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield seen, TracedLane


def says(results: Mapping[str, dict]) -> str:
    return "; ".join(f"{name}: {_races(one)}" for name, one in results.items())


def _races(one: Mapping) -> str:
    seen, unseen = (one["copies"].get(key, 0) for key in ("seen", "not seen"))
    count = len(one["races"])
    said = "no race" if not count else f"{count} race{'s' if count > 1 else ''}"
    return f"{said} in {sum(one['operators'].values()):,} operators; {seen} of {seen + unseen} copies were seen"


def table(results: Mapping[str, dict]) -> str:
    """Returns the counts, and the whole report of a race that should not be there."""
    lines = ["| training | found | streams |", "|---|---|---|"]
    lines += [f"| {name} | {_races(one)} | {len(one['operators'])} |" for name, one in results.items()]
    for race in results.get(RIGHT, {}).get("races", []):
        lines += ["", "```", race, "```"]
    return "\n".join(lines)
