"""Stage 6 tests the settings that the program chooses itself: batch_size=auto and plan=auto.

A batch size is right if the next larger one does not work; a plan is compared with the memory that its run needed.
"""

from collections.abc import Mapping
from functools import partial

from benchmarks.card.case import Case, Here, Size, Stage
from lowmem.system.units import GIB

STAGE = Stage(6, "batch_size=auto and plan=auto", __name__, seconds=450, gib=10)
SHORT = ["max_steps=3", "val_every=1000", "val_sequences=8", "save_every=1000", "scheduler=constant", "log_every=1"]


def cases(size: Size) -> Mapping[str, Case]:
    found = {
        "batch_size=auto, planned": Case(partial(batch_size, plan="check"), 180),
        "plan=auto under a cap": Case(partial(chosen, cap=size.cap), 180),
    }
    if size.whole:
        found["batch_size=auto, by trying alone"] = Case(partial(batch_size, plan="off"), 240)
        found["plan=auto"] = Case(partial(chosen, cap=None), 180)
    return found


def batch_size(here: Here, plan: str) -> dict:
    """Returns the batch size that was chosen, and tries the next larger one under the same cap.

    The cap limits torch's memory alone.
    """
    from lowmem.config.accumulation import divisors
    from lowmem.plan.batch_size import fits

    auto = ["accumulation=effective_batch", f"accumulation.size={here.size.effective}", f"memory.limit={here.size.cap}"]
    typed = [*without_batch(here.size.model), *auto, *SHORT, "precision=bf16"]
    summary = here.train(*typed, "batch_size=auto", f"plan={plan}")
    found = {
        "batch_size": summary["batch_size"],
        "allocated": summary["peak_bytes"]["device"],
        "predicted": summary["predicted"] and summary["predicted"]["device_peak_bytes"],
        "said": _log(here, "batch_size="),
    }
    here.keep(found)
    here.release()
    larger = next((n for n in divisors(here.size.effective) if n > summary["batch_size"]), None)
    works = larger is not None and fits(here.config(*here.typed(), *typed, f"batch_size={larger}"), larger)
    return found | {"larger": larger, "larger_works": works, "right": not works}


def without_batch(typed: tuple[str, ...]) -> list[str]:
    return [line for line in typed if not line.startswith("batch_size=")]


def chosen(here: Here, cap: str | None) -> dict:
    """Returns the recipe that the planner chooses for the free memory, and the memory that its run needed."""
    limit = [f"memory.limit={cap}"] if cap else []
    summary = here.train(*here.size.model, *SHORT, *limit, *here.size.chosen, "plan=auto")
    return {
        "said": _log(here, "plan="),
        "allocated": summary["peak_bytes"]["device"],
        "predicted": summary["predicted"]["device_peak_bytes"],
        "need": summary["predicted"]["device_need_bytes"],
        "seconds_per_step": summary["seconds_per_step"],
    }


def _log(here: Here, word: str) -> list[str]:
    """Returns the lines of the run's log that begin with a word."""
    file = here.folder / "run" / "train.log"
    return [line for line in file.read_text().splitlines() if line.startswith(word)] if file.exists() else []


def says(results: Mapping[str, dict]) -> str:
    parts = []
    for name, one in results.items():
        if "batch_size" in one:
            tight = {True: ", but the next larger works too", False: ", and the next larger does not work"}
            parts.append(f"{name}: {one['batch_size']}{tight[one['larger_works']] if one.get('larger') else ''}")
        else:
            parts.append(f"{name}: {one['allocated'] / GIB:.2f} GiB of {one['predicted'] / GIB:.2f} predicted")
    return "; ".join(parts)


def table(results: Mapping[str, dict]) -> str:
    lines = ["| case | live GiB, predicted / measured | what it said |", "|---|---|---|"]
    for name, one in results.items():
        expected = f"{one['predicted'] / GIB:.3f}" if one["predicted"] else "-"
        said = "; ".join(one["said"]).replace("|", " ")
        if one.get("larger") is not None:
            said += f" The next larger, {one['larger']}, {'works' if one['larger_works'] else 'does not work'}."
        lines.append(f"| {name} | {expected} / {one['allocated'] / GIB:.3f} | {said} |")
    return "\n".join(lines)
