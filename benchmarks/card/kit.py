"""The stages one after the other: their cases, their time, what is known already, and what is written down of it."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.card import page, process
from benchmarks.card.case import SIZES, Stage, text
from benchmarks.runner import ROOT
from lowmem.report.summary import write
from lowmem.units import GIB

PAGE = ROOT / "docs" / "card.md"
SCRATCH = ROOT / ".cache" / "card"
SAME = ("name", "driver", "versions")  # of two machines whose results may stand together
LEAST = 5.0  # seconds: with less of a stage's time left no case is begun


class NoCard(Exception):
    """There is no device to run on."""


class NoResults(Exception):
    """There is no file of results, or it is something else."""


@dataclass
class Kit:
    """Args: file: of the results; stages: all there are, for the page."""

    device: str
    file: Path
    stages: Sequence[Stage]

    def run(self, wanted: Sequence[Stage], resume: bool = False, retry: bool = False) -> int:
        """Returns: 0, or 1 where a case has no whole result.

        Raises:
            NoCard
        """
        machine = self._machine()
        print(page.card(machine), flush=True)
        found = self._known(machine)
        for stage in wanted:
            known = found["stages"].get(str(stage.number), {}).get("cases", {}) if resume else {}
            kept = {name: case for name, case in known.items() if not (retry and case["status"] in ("failed", "ended"))}
            found["stages"][str(stage.number)] = record = self._begun(stage, machine, kept)
            if "left_out" not in record:
                self._cases(stage, record, machine.get("memory_bytes"), lambda: write(self.file, found))
            write(self.file, found)
            print(page.line(stage, record), flush=True)
            if self.device == "cuda":
                page.write(PAGE, found, self.stages)
        print(f"\n{page.page(found, self.stages)}\nwrote {self.file}")
        for stage in wanted:  # once more: of a long page one sees the end
            print(page.line(stage, found["stages"][str(stage.number)]))
        return int(any(not _whole(found["stages"][str(stage.number)]) for stage in wanted))

    def table(self) -> int:
        """What is known, as a page; one of a card into docs/.

        Raises:
            NoResults
        """
        try:
            found = json.loads(self.file.read_text())
            said = page.page(found, self.stages)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NoResults(f"{self.file}: no results of this command can be read there ({error}).") from None
        print(said)
        if found["machine"]["device"] == "cuda":
            page.write(PAGE, found, self.stages)
        return 0

    def _machine(self) -> dict:
        card = process.case("benchmarks.card.link", "card", self.device, SCRATCH, seconds=120)
        if card["status"] != "done":
            raise NoCard(
                f"There is no CUDA device to run on: {page.short(card['why'])}. Check nvidia-smi and that torch is a "
                "CUDA build, or type --device cpu for a rehearsal."
            )
        return card["result"]

    def _known(self, machine: dict) -> dict:
        """Earlier results of this card; those of another one are set aside."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            with suppress(ValueError, KeyError):
                known = json.loads(self.file.read_text())
                if all(known["machine"].get(key) == machine.get(key) for key in SAME):
                    return known
            aside = self.file.with_stem(f"{self.file.stem}-{int(self.file.stat().st_mtime)}")
            os.replace(self.file, aside)
            print(f"{self.file.name} held other results than this card's; they are in {aside.name} now.", flush=True)
        return {"machine": machine, "stages": {}}

    def _begun(self, stage: Stage, machine: dict, kept: dict) -> dict:
        record = {"name": stage.name, "cases": kept, "planned": list(stage.cases(SIZES[self.device]))}
        memory = machine.get("memory_bytes")
        if memory is not None and memory < stage.gib * GIB:
            record["left_out"] = f"it needs {stage.gib:g} GiB and the card has {memory / GIB:.1f}"
        return record

    def _cases(self, stage: Stage, record: dict, memory: int | None, keep: Callable[[], None]) -> None:
        """Those that have no record, each written down as soon as it has ended. Args: memory: of the card."""
        size, words = SIZES[self.device], text(SCRATCH / "text")
        cases, start = stage.cases(size), time.monotonic()
        at_once, threads = _at_once(stage, memory)

        def run(name: str) -> dict | None:
            left = start + size.patience * stage.seconds - time.monotonic()
            if left < LEAST:
                return None
            seconds = min(size.patience * cases[name].seconds, left)
            return process.case(stage.module, name, self.device, words, seconds, threads)

        with ThreadPoolExecutor(at_once) as pool:
            running = {pool.submit(run, name): name for name in record["planned"] if name not in record["cases"]}
            try:
                for future in as_completed(running):
                    _keep(record, running[future], future.result())
                    keep()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                process.end_all()
                raise
        record["seconds"] = round(time.monotonic() - start, 1)


def _keep(record: dict, name: str, case: dict | None) -> None:
    if case is None:
        return
    record["cases"][name] = case
    why = f": {page.short(case['why'])}" if "why" in case else ""
    print(f"  {name}: {case['status']} in {case['seconds']:.0f} s{why}", flush=True)


def _at_once(stage: Stage, memory: int | None) -> tuple[int, int | None]:
    """(cases at once, threads of each): two cores for each, and what a case may need of the card."""
    cores = os.cpu_count() or 1
    most = min(stage.together, cores // 2)
    if memory is not None and stage.gib:
        most = min(most, int(memory / GIB / stage.gib))
    at_once = max(1, most)
    return at_once, None if at_once == 1 else cores // at_once


def _whole(record: Mapping) -> bool:
    """Whether every case that can be run here has its result."""
    statuses = [case["status"] for case in record["cases"].values()]
    return "left_out" in record or (len(statuses) == len(record["planned"]) and not {"failed", "ended"} & set(statuses))
