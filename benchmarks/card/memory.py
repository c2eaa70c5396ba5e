"""Stage 3: what was predicted beside what a card holds, and the least that it can be made to work in.

Twelve recipes and two with bitsandbytes, most of them those of benchmarks/plan_error.py: live bytes by phase, what the
allocator reserves, and the smallest cap (`set_per_process_memory_fraction`) under which two steps and an evaluation
still work, each try in a process of its own. Then: whether paged state leaves the allocator's memory, and what a run
says that dies of memory.
"""

import csv
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import plan_error
from benchmarks.card.case import Case, Here, Size, Stage
from lowmem.units import GIB

STAGE = Stage(3, "memory", __name__, seconds=470, together=6, gib=8)
PRESET = ["precision=16-master", "optim=adamw8bit", "gradient_checkpointing=every_layer", "loss=chunked"]
LOWEST = 0.97  # of the allocator's peak: where the search for the smallest cap begins, which fails
PHASES = ("forward", "backward", "step", "evaluation")


def recipes() -> dict[str, list[str]]:
    """Name -> what is typed: the preset's techniques, what is shipped, and each mixed recipe of plan_error.py once."""
    rows = plan_error.rows()
    mixed = [name for name in rows if ": precision=" in name][::2]
    wanted = ("(as shipped)", *mixed, "llama: 1 x 1024", "qwen3: 16 x 64")
    preset = [*plan_error.GPT2, *plan_error.USUAL, *PRESET]
    return {"gpt2: the preset's techniques": preset} | {name: rows[name] for name in wanted}


def cases(size: Size) -> Mapping[str, Case]:
    wanted = list(recipes())[: None if size.whole else 1]
    found = {name: Case(partial(recipe, name=name), 300) for name in wanted}
    return found | {"out of memory": Case(out_of_memory, 90), "paged state under a cap": Case(paged, 240)}


def recipe(here: Here, name: str) -> dict:
    """Predicted, measured, and the smallest cap that works."""
    typed = [*recipes()[name], *here.size.small]
    cfg = here.config(*here.typed(), *typed)
    stand_in(here)
    summary = here.train(*plan_error.SHORT, *typed)
    predicted, reserved = summary["predicted"], reserved_by_phase(here.folder / "run" / "memory.csv")
    phases = {
        phase: {
            "predicted": predicted["phases"][phase]["device"],
            "allocated": summary["peak_bytes_by_phase"][phase].get("device"),
            "reserved": reserved.get(phase),
        }
        for phase in PHASES
        if phase in summary["peak_bytes_by_phase"]
    }
    found = {
        "phases": phases,
        "predicted": {key: predicted[f"{key}_bytes"] for key in ("device_peak", "reserved_peak", "device_need")},
        "allocated": summary["peak_bytes"]["device"],
        "reserved": max(reserved.values()),
        "by_category": summary["peak_bytes_by_category"],
    }
    here.keep(found)
    release(here)
    return found | smallest(here, cfg, found)


def smallest(here: Here, cfg, found: dict) -> dict:
    """The smallest cap that works, in bytes and of the card."""
    from lowmem.errors import Refused

    fails = round(LOWEST * found["allocated"])
    try:
        cap, tried = smallest_that_works(fails, found["reserved"], lambda cap: works(cfg, cap), here.size.tries)
    except Refused as error:  # a try that failed for another reason
        return {"smallest_cap": None, "why_no_cap": str(error)[-1500:]}
    return {"smallest_cap": cap, "smallest_fraction": cap and cap / total(here), "tried": tried}


def release(here: Here) -> None:
    """What this process still holds of the card is not the tries' to have."""
    import gc

    import torch

    gc.collect()
    if here.on_card:
        torch.cuda.empty_cache()


def stand_in(here: Here) -> None:
    """Without a card the figures of its allocator are made up, as in the meter's tests."""
    if not here.on_card:
        from types import SimpleNamespace

        from made_up import Allocator

        Allocator().install(SimpleNamespace(setattr=setattr))


def total(here: Here) -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if here.on_card else 1 << 40


def reserved_by_phase(file: Path) -> dict[str, int]:
    """Phase -> the allocator's highest reservation."""
    found: dict[str, int] = {}
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            if row["reserved_peak_bytes"]:
                found[row["phase"]] = max(int(row["reserved_peak_bytes"]), found.get(row["phase"], 0))
    return found


def smallest_that_works(
    fails: int, most: int, works: Callable[[int], bool], tries: int
) -> tuple[int | None, dict[int, bool]]:
    """By bisection between a cap that is taken to fail and one that should work, which is tried first.

    Returns:
        The smallest that was seen to work, None where none was; every cap that was tried, and whether it worked.
    """
    tried = {most: works(most)}
    if not tried[most]:
        return None, tried
    for _ in range(tries):
        middle = (fails + most) // 2
        tried[middle] = works(middle)
        fails, most = (fails, middle) if tried[middle] else (middle, most)
    return most, tried


def works(cfg, cap: int) -> bool:
    """Whether two steps and an evaluation do, in a process of its own, as batch_size=auto tries it."""
    from omegaconf import OmegaConf

    from lowmem.batch_size import fits

    return fits(OmegaConf.merge(cfg, {"memory": {"limit": cap}}), cfg.batch_size)


def paged(here: Here) -> dict:
    """Halfway between the peaks of AdamW and of its paged sister, which one still works?

    The pages are managed memory, of which the card has plenty here: whether the allocator is spared is what this shows,
    not whether pages move; a program that asks for more of it than the card has free can hang the card.
    """
    shared = [*plan_error.GPT2, *plan_error.DRY, *plan_error.sized(4, 256), *here.size.small]
    kinds = {kind: [*shared, f"optim={kind}"] for kind in ("paged_adamw32bit", "adamw")}
    configs = {kind: here.config(*here.typed(), *typed) for kind, typed in kinds.items()}
    runs = {kind: here.train(*plan_error.SHORT, *typed, folder=kind) for kind, typed in kinds.items()}
    peaks = {kind: summary["peak_bytes"]["device"] for kind, summary in runs.items()}
    release(here)
    cap, state = sum(peaks.values()) // 2, 8 * runs["adamw"]["parameters"]
    fits = {kind: works(cfg, cap) for kind, cfg in configs.items()}
    spared = (peaks["adamw"] - peaks["paged_adamw32bit"]) / state
    right = spared > 0.5 and fits == {"paged_adamw32bit": True, "adamw": False}
    return {"peaks": peaks, "cap": cap, "fits": fits, "state_spared": spared, "right": right}


def out_of_memory(here: Here) -> dict:
    """What a run leaves that dies of memory: what was held, what to try, and on a card the allocator's snapshot."""
    typed = [*plan_error.GPT2, *plan_error.USUAL, *here.size.small, f"memory.limit={here.size.limit}", "plan=off"]
    try:
        here.train(*plan_error.SHORT, *typed)
        said = "it did not run out of memory"
    except SystemExit as error:
        said = str(error)
    snapshot = here.folder / "run" / "memory_snapshot.pickle"
    found = {
        "says what was held": "Held at the peak, by category" in said,
        "says what to try": "Try, one after the other" in said,
        "leaves a snapshot": snapshot.exists() == here.on_card,
    }
    size = os.path.getsize(snapshot) if snapshot.exists() else None
    return {"found": found, "right": all(found.values()), "snapshot_bytes": size, "said": said[:1500]}


def says(results: Mapping[str, dict]) -> str:
    measured = [one for one in results.values() if "phases" in one]
    parts = []
    for what, key in (("live", "allocated"), ("reserved", "reserved")):
        off = [one["predicted"][PREDICTED[key]] / one[key] - 1 for one in measured if one[key]]
        if off:
            parts.append(f"{what} predicted {min(off):+.1%} to {max(off):+.1%} of measured")
    wrong = [name for name, one in results.items() if not one.get("right", True)]
    return ", ".join(parts) + (f"; not right: {', '.join(wrong)}" if wrong else "")


PREDICTED = {"allocated": "device_peak", "reserved": "reserved_peak"}


def table(results: Mapping[str, dict]) -> str:
    lines = [
        "| recipe | live GiB, predicted / measured | reserved GiB | smallest cap that works, GiB | of the card |",
        "|---|---|---|---|---|",
    ]
    for name, one in results.items():
        if "phases" in one:
            live, held = (f"{both(one['predicted'][PREDICTED[key]], one[key])}" for key in ("allocated", "reserved"))
            known = one.get("smallest_cap") is not None
            cap = f"{one['smallest_cap'] / GIB:.3f}" if known else "-"
            share = f"{one['smallest_fraction']:.2%}" if known else "-"
            lines.append(f"| {name} | {live} | {held} | {cap} | {share} |")
    lines += ["", "| recipe | phase | predicted GiB | allocated | reserved |", "|---|---|---|---|---|"]
    for name, one in results.items():
        for phase, sizes in one.get("phases", {}).items():
            cells = ("-" if sizes[key] is None else f"{sizes[key] / GIB:.3f}" for key in sizes)
            lines.append(f"| {name} | {phase} | {' | '.join(cells)} |")
    lines += ["", "| case | right | what |", "|---|---|---|"]
    for name, one in results.items():
        if "right" in one:
            lines.append(f"| {name} | {'yes' if one['right'] else 'NO'} | {_what(one)} |")
    return "\n".join(lines)


def _what(one: Mapping) -> str:
    if "found" in one:
        return ", ".join(f"{what}: {'yes' if is_so else 'NO'}" for what, is_so in one["found"].items())
    works = ", ".join(f"{kind} {'works' if fits else 'does not'}" for kind, fits in one["fits"].items())
    return f"{one['state_spared']:.0%} of the state is spared; under {one['cap'] / GIB:.3f} GiB {works}"


def both(predicted: int, measured: int) -> str:
    return f"{predicted / GIB:.3f} / {measured / GIB:.3f} ({predicted / measured - 1:+.1%})"
