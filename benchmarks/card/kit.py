"""Runs the stages one after the other and writes down their results.

It keeps each stage within its time limit, reuses earlier results of the same card where that is wanted, and writes the
file of results after every case and the page after every stage.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.card import page, process
from benchmarks.card.case import SIZES, Stage, text
from benchmarks.runner import ROOT
from lowmem.report.summary import write
from lowmem.system import processors
from lowmem.system.errors import Refused
from lowmem.system.units import GIB

PAGE = ROOT / "benchmarks" / "results" / "card.md"
FORMAT = 2  # raise it when the results of a case change: older files are then renamed, not read
SAME = ("name", "driver", "versions")  # equal on two machines whose results may share a file
LEAST = 5.0  # seconds: with less of a stage's time left no case is begun
REHEARSED = 4  # cases that run at once in a rehearsal, in which nothing is timed
HOST = 4 * GIB  # the host's memory that a case may take, including CUDA's libraries


@dataclass
class Kit:
    """Runs stages on a device. Args: file: the file of results; stages: all stages, for the page."""

    device: str
    file: Path
    stages: Sequence[Stage]

    def run(self, wanted: Sequence[Stage], resume: bool = False, retry: bool = False) -> int:
        """Returns 0, or 1 if a case has no complete result or a wrong one.

        Raises:
            Refused: there is no device, the file cannot be written, or another run of this command is at work.
        """
        _check_place(self.file)
        with _alone():
            machine = self._machine()
            print(page.card(machine), flush=True)
            found = self._known(machine)
            # a rehearsal times nothing, so the cases of all its stages share one pool
            for stages in [[stage] for stage in wanted] if SIZES[self.device].whole else [wanted]:
                for stage in stages:
                    self._begin(stage, found, resume or retry, retry)
                self._stages(stages, found)
        print(f"\n{page.page(found, self.stages)}\nwrote {self.file}")
        for stage in wanted:  # repeated, because of a long page only the end is on the screen
            print(page.line(stage, found["stages"][str(stage.number)]))
        return int(any(not _is_complete(found["stages"][str(stage.number)]) for stage in wanted))

    def table(self) -> int:
        """Prints the page of the file's results, and writes it into docs/ if they are a card's.

        Raises:
            Refused: the file does not exist or is no file of results.
        """
        known = _read(self.file)
        if known is None:
            raise Refused(f"{self.file}: no results of this command can be read there.")
        print(page.page(known, self.stages))
        if known["machine"]["device"] == "cuda":
            page.write(PAGE, known, self.stages)
        return 0

    def _machine(self) -> dict:
        card = process.case("benchmarks.card.link", "card", self.device, process.SCRATCH, seconds=120)
        if card["status"] == "left out":
            raise Refused(
                f"There is no CUDA device to run on: {card['why']}. Check nvidia-smi and that torch is a CUDA build, "
                "or type --device cpu for a rehearsal."
            )
        if card["status"] != "done":
            raise Refused(f"{card['why']}\nThe device could not be asked what it is; the reason stands above.")
        return card["result"]

    def _known(self, machine: dict) -> dict:
        """Returns earlier results of this card; renames the file if it holds anything else."""
        known = _read(self.file)
        if known is not None and all(known["machine"].get(key) == machine.get(key) for key in SAME):
            return known
        if self.file.exists():
            aside = self.file.with_stem(f"{self.file.stem}-{int(self.file.stat().st_mtime)}")
            os.replace(self.file, aside)
            print(f"{self.file.name} held other results than this card's; they are in {aside.name} now.", flush=True)
        return {"format": FORMAT, "machine": machine, "stages": {}}

    def _begin(self, stage: Stage, found: dict, resume: bool, retry: bool) -> None:
        """Begins a stage's record with those results of an earlier record that stay valid."""
        known = found["stages"].get(str(stage.number), {}).get("cases", {}) if resume else {}
        planned, again = list(stage.cases(SIZES[self.device])), ("failed", "ended") if retry else ()
        kept = {name: known[name] for name in planned if name in known and known[name]["status"] not in again}
        record = {"name": stage.name, "cases": kept, "planned": planned}
        memory = found["machine"].get("memory_bytes")
        if memory is not None and memory < stage.gib * GIB:
            record["left_out"] = f"it needs {stage.gib:g} GiB and the card has {memory / GIB:.1f}"
        found["stages"][str(stage.number)] = record

    def _stages(self, stages: Sequence[Stage], found: dict) -> None:
        """Runs the stages' cases that have no record, and writes down each as soon as it has ended."""
        size, memory = SIZES[self.device], found["machine"].get("memory_bytes")
        records = {stage: found["stages"][str(stage.number)] for stage in stages}
        at_once, threads = _at_once(stages[0], memory) if size.whole else (min(processors.usable(), REHEARSED), 1)
        print(f"Cases at once: {at_once}.", flush=True)  # one on a machine with little memory
        begin, todo = self._beginner(threads), [(stage, name) for stage in stages for name in _todo(records[stage])]
        with ThreadPoolExecutor(at_once) as pool:
            running = {pool.submit(begin, stage, name): (stage, name) for stage, name in todo}
            try:
                for future in as_completed(running):
                    stage, name = running[future]
                    _keep(records[stage], name, future.result())
                    write(self.file, found)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                process.end_all()
                raise
        write(self.file, found)
        for stage in stages:
            print(page.line(stage, records[stage]), flush=True)
        if self.device == "cuda":
            page.write(PAGE, found, self.stages)

    def _beginner(self, threads: int | None) -> Callable[[Stage, str], dict | None]:
        """Returns a function (stage, name) -> the case's record, or None if too little of the stage's time is left."""
        size, words, start = SIZES[self.device], text(process.SCRATCH / "text"), time.monotonic()
        process.stopped.clear()

        def begin(stage: Stage, name: str) -> dict | None:
            left = start + size.patience * stage.seconds - time.monotonic()
            if left < LEAST:
                return None
            case = stage.cases(size)[name]
            seconds = size.patience * case.seconds
            limit = min(seconds, left)
            found = process.case(stage.module, name, self.device, words, limit, threads, case.environment)
            # a case that the stage's end cut short did not have its full time: --resume begins it again
            return None if found["status"] == "ended" and left < seconds else found

        return begin


def _todo(record: Mapping) -> list[str]:
    return [] if "left_out" in record else [name for name in record["planned"] if name not in record["cases"]]


def _keep(record: dict, name: str, case: dict | None) -> None:
    if case is None:
        return
    record["cases"][name] = case
    why = f": {page.short(case['why'])}" if "why" in case else ", and NOT RIGHT" if page.is_wrong(case) else ""
    print(f"  {name}: {case['status']} in {case['seconds']:.0f} s{why}", flush=True)


def _at_once(stage: Stage, memory: int | None) -> tuple[int, int | None]:
    """Returns (cases at once, threads of each), so that each case has two cores and enough memory of host and card.

    The threads are None where a single case may use every core of the machine.
    """
    from lowmem.system.process import available_bytes  # here, because it imports torch

    cores = processors.usable()
    most = min(stage.together, cores // 2, available_bytes() // HOST)
    if memory is not None and stage.gib:
        most = min(most, int(memory / GIB / stage.gib))
    at_once = max(1, most)
    return at_once, None if at_once == 1 and cores == os.cpu_count() else cores // at_once


def _is_complete(record: Mapping) -> bool:
    """Returns whether every case that can run here has its result, and none is wrong."""
    cases = record["cases"].values()
    ended = len(cases) == len(record["planned"]) and not any(case["status"] in ("failed", "ended") for case in cases)
    return "left_out" in record or (ended and not any(map(page.is_wrong, cases)))


# --- the file and the place -------------------------------------------------------------------------------------------


def _read(file: Path) -> dict | None:
    """Returns the results in a file, or None if it has none of this format."""
    try:
        known = json.loads(file.read_text())
        return known if known["format"] == FORMAT and {"name", "device"} <= known["machine"].keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _check_place(file: Path) -> None:
    """Raises Refused if the file cannot be written, before an hour of measuring."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            why = "it is a folder" if file.is_dir() else None
    except OSError as error:
        why = error.strerror
    if why:
        raise Refused(f"--to {file}: it cannot be written there ({why}). Type a file in a folder that can.")


@contextmanager
def _alone() -> Iterator[None]:
    """Holds a lock while this command runs, because two at once would slow each other; removes leftover folders.

    Raises:
        Refused: another process holds the lock.
    """
    process.SCRATCH.mkdir(parents=True, exist_ok=True)
    with (process.SCRATCH / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("Another python -m benchmarks.card is at work here. Wait for its end, or end it.") from None
        for left in process.SCRATCH.glob(f"{process.PREFIX}*"):  # left by a killed run, perhaps with checkpoints
            shutil.rmtree(left, ignore_errors=True)
        yield
