"""Writes the results of the stages as a page, which is benchmarks/results/card.md after a run on a card."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.card.case import Stage
from lowmem.system.units import GIB


def card(machine: Mapping) -> str:
    """Returns one line with the card, its driver, the host's processor and the versions of the packages."""
    memory = machine.get("memory_bytes")
    parts = [machine["name"], f"{memory / GIB:.1f} GiB" if memory else None]
    parts += [f"driver {machine['driver']}" if machine.get("driver") else None]
    parts += [f"{machine['processor']}, {machine['cores']} cores"]
    parts += [f"{package} {version}" for package, version in machine["versions"].items()]
    return ", ".join(part for part in parts if part)


def results(stage: Mapping) -> dict[str, dict]:
    """Returns {case: result} in the order of the cases, incomplete results included."""
    cases = stage["cases"]
    return {name: cases[name]["result"] for name in stage["planned"] if "result" in cases.get(name, {})}


def is_wrong(case: Mapping) -> bool:
    """Returns whether a case has judged its own result to be wrong."""
    return case.get("result", {}).get("right") is False


def line(stage: Stage, found: Mapping) -> str:
    return f"{stage.number} {stage.name}: {went(stage, found)}"


def went(stage: Stage, found: Mapping) -> str:
    """Returns how many of a stage's cases succeeded and failed, and its results in one sentence."""
    if "left_out" in found:
        return f"left out, {found['left_out']}"
    counts = dict.fromkeys(("done", "failed", "ended", "left out"), 0)
    for case in found["cases"].values():
        counts[case["status"]] += 1
    missing = len(found["planned"]) - len(found["cases"])
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    wrong = sum(map(is_wrong, found["cases"].values()))
    parts += [f"{wrong} NOT RIGHT"] if wrong else []
    parts += [f"{missing} not begun in its {stage.seconds:.0f} s"] if missing else []
    return f"{', '.join(parts)}; {_text_or_error(stage, 'says', found)}"


def _text_or_error(stage: Stage, what: str, found: Mapping) -> str:
    """Returns the text of a stage's `says` or `table`.

    Where a result is incomplete it returns the error instead, so that the rest of the page is still written.
    """
    try:
        return getattr(import_module(stage.module), what)(results(found))
    except Exception as error:
        return f"its results cannot be told ({type(error).__name__}: {error})"


def page(found: Mapping, stages: Sequence[Stage]) -> str:
    lines = ["# On a card", "", f"Measured on {card(found['machine'])}.", ""]
    lines += ["By `python -m benchmarks.card` ([its stages](../card)).", ""]
    for stage in stages:
        record = found["stages"].get(str(stage.number))
        if record is None:
            continue
        lines += [f"## {stage.number}. {stage.name}", "", f"{went(stage, record)}.", ""]
        if results(record):
            lines += [_text_or_error(stage, "table", record), ""]
        lines += [f"- **{name}** {case['status']}: {short(case['why'])}" for name, case in _gone_wrong(record)]
        lines += [""] if _gone_wrong(record) else []
    return "\n".join(lines).rstrip() + "\n"


def _gone_wrong(stage: Mapping) -> list[tuple[str, Mapping]]:
    return [(name, case) for name, case in stage.get("cases", {}).items() if "why" in case]


def short(why: str) -> str:
    """Returns the last line of a text, which is the error of a traceback."""
    return (why.strip().splitlines() or [""])[-1][-300:]


def write(file: Path, found: Mapping, stages: Sequence[Stage]) -> None:
    draft = file.with_name(f".{file.name}.writing")
    draft.write_text(page(found, stages))
    draft.replace(file)
