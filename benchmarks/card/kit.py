"""The stages one after the other: their cases, their time, what is known already, and what is written down of it."""

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
from lowmem import processors
from lowmem.errors import Refused
from lowmem.report.summary import write
from lowmem.units import GIB

PAGE = ROOT / "docs" / "card.md"
FORMAT = 1  # raise it when what a case returns changes: older files are then set aside
SAME = ("name", "driver", "versions")  # of two machines whose results may stand together
LEAST = 5.0  # seconds: with less of a stage's time left no case is begun
REHEARSED = 4  # cases at once of a rehearsal, in which no clock is looked at
HOST = 4 * GIB  # of the host's memory that a case may take, CUDA's libraries with it


@dataclass
class Kit:
    """Args: file: of the results; stages: all there are, for the page."""

    device: str
    file: Path
    stages: Sequence[Stage]

    def run(self, wanted: Sequence[Stage], resume: bool = False, retry: bool = False) -> int:
        """Returns: 0, or 1 where a case has no whole result or one that is not right.

        Raises:
            Refused: no device, no place to write to, or another kit at work.
        """
        _check_place(self.file)
        with _alone():
            machine = self._machine()
            print(page.card(machine), flush=True)
            found = self._known(machine)
            # in a rehearsal no clock is looked at: all at once
            for stages in [[stage] for stage in wanted] if SIZES[self.device].whole else [wanted]:
                for stage in stages:
                    self._begin(stage, found, resume or retry, retry)
                self._stages(stages, found)
        print(f"\n{page.page(found, self.stages)}\nwrote {self.file}")
        for stage in wanted:  # once more: of a long page one sees the end
            print(page.line(stage, found["stages"][str(stage.number)]))
        return int(any(not _whole(found["stages"][str(stage.number)]) for stage in wanted))

    def table(self) -> int:
        """What is known, as a page; one of a card into docs/.

        Raises:
            Refused: there is no file of results, or it is something else.
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
        """Earlier results of this card; whatever else is in the file is set aside."""
        known = _read(self.file)
        if known is not None and all(known["machine"].get(key) == machine.get(key) for key in SAME):
            return known
        if self.file.exists():
            aside = self.file.with_stem(f"{self.file.stem}-{int(self.file.stat().st_mtime)}")
            os.replace(self.file, aside)
            print(f"{self.file.name} held other results than this card's; they are in {aside.name} now.", flush=True)
        return {"format": FORMAT, "machine": machine, "stages": {}}

    def _begin(self, stage: Stage, found: dict, resume: bool, retry: bool) -> None:
        """A stage's record, with what stays of an earlier one."""
        known = found["stages"].get(str(stage.number), {}).get("cases", {}) if resume else {}
        planned, again = list(stage.cases(SIZES[self.device])), ("failed", "ended") if retry else ()
        kept = {name: known[name] for name in planned if name in known and known[name]["status"] not in again}
        record = {"name": stage.name, "cases": kept, "planned": planned}
        memory = found["machine"].get("memory_bytes")
        if memory is not None and memory < stage.gib * GIB:
            record["left_out"] = f"it needs {stage.gib:g} GiB and the card has {memory / GIB:.1f}"
        found["stages"][str(stage.number)] = record

    def _stages(self, stages: Sequence[Stage], found: dict) -> None:
        """Their cases that have no record, each written down as soon as it has ended."""
        size, memory = SIZES[self.device], found["machine"].get("memory_bytes")
        records = {stage: found["stages"][str(stage.number)] for stage in stages}
        at_once, threads = _at_once(stages[0], memory) if size.whole else (min(processors.usable(), REHEARSED), 1)
        print(f"Cases at once: {at_once}.", flush=True)  # of which a machine with little memory has one
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
        """(stage, name) -> the record of a case; None: what is left of the stage's time is not enough."""
        size, words, start = SIZES[self.device], text(process.SCRATCH / "text"), time.monotonic()
        process.stopped.clear()

        def begin(stage: Stage, name: str) -> dict | None:
            left = start + size.patience * stage.seconds - time.monotonic()
            if left < LEAST:
                return None
            seconds = size.patience * stage.cases(size)[name].seconds
            found = process.case(stage.module, name, self.device, words, min(seconds, left), threads)
            # one that the stage's end cut short has not had its time: --resume begins it again
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
    """(cases at once, threads of each): two cores for each, and what a case may need of the host and the card."""
    from lowmem.memory.process import available_bytes  # and with it torch

    cores = processors.usable()
    most = min(stage.together, cores // 2, available_bytes() // HOST)
    if memory is not None and stage.gib:
        most = min(most, int(memory / GIB / stage.gib))
    at_once = max(1, most)
    return at_once, None if at_once == 1 and cores == os.cpu_count() else cores // at_once


def _whole(record: Mapping) -> bool:
    """Whether every case that can be run here has its result, and none is wrong."""
    cases = record["cases"].values()
    ended = len(cases) == len(record["planned"]) and not any(case["status"] in ("failed", "ended") for case in cases)
    return "left_out" in record or (ended and not any(map(page.is_wrong, cases)))


# --- the file and the place -------------------------------------------------------------------------------------------


def _read(file: Path) -> dict | None:
    """Results of this command; None: there are none, or of another format."""
    try:
        known = json.loads(file.read_text())
        return known if known["format"] == FORMAT and {"name", "device"} <= known["machine"].keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _check_place(file: Path) -> None:
    """Before an hour's results have none."""
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
    """Two at once would measure each other."""
    process.SCRATCH.mkdir(parents=True, exist_ok=True)
    with (process.SCRATCH / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("Another python -m benchmarks.card is at work here. Wait for its end, or end it.") from None
        for left in process.SCRATCH.glob(f"{process.PREFIX}*"):  # by one that was killed: checkpoints, perhaps
            shutil.rmtree(left, ignore_errors=True)
        yield
