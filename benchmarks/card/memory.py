"""Stage 3 compares the predicted memory with a card's, and finds the smallest memory in which a recipe still works.

It runs fourteen recipes and two with bitsandbytes, most of them from benchmarks/plan_error.py. For each it measures
live bytes by phase, the bytes that the allocator reserves, and the smallest cap (`set_per_process_memory_fraction`)
under which two steps and an evaluation still work; every try runs in a process of its own. Then it tests whether paged
optimizer state stays outside the allocator's memory, also after `resume=`; what a run prints that runs out of memory;
and whether the allocator's snapshots can be read.
"""

import csv
import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import plan_error
from benchmarks.card.case import Case, Here, Size, Stage
from benchmarks.runner import ROOT
from lowmem.system.units import GIB

FILE = "memory_snapshot.pickle"
STAGE = Stage(3, "memory", __name__, seconds=470, together=6, gib=8)
PRESET = ["precision=16-master", "optim=adamw8bit", "gradient_checkpointing=every_layer", "loss=chunked"]
PAIRS = ("data=preference", f"data.path={ROOT}/examples/preference.jsonl", "data.packing=documents")
PREDICTIONS = ("device_peak", "reserved_peak", "smallest_cap", "device_need")
LOWEST = 0.97  # share of the peak of live bytes: a cap that is taken to fail, where the search begins
PHASES = ("forward", "backward", "step", "evaluation")


def recipes() -> dict[str, list[str]]:
    """Returns {name: overrides} of the recipes that are measured.

    These are the preset's techniques, the default recipe, each mixed recipe of plan_error.py once, pairs of answers,
    and grouped heads in fp32, for which torch has only the kernel that stores attention's scores.
    """
    rows = plan_error.rows()
    mixed = [name for name in rows if ": precision=" in name][::2]
    wanted = ("(as shipped)", *mixed, "llama: 1 x 1024", "qwen3: 16 x 64")
    preset = [*plan_error.GPT2, *plan_error.USUAL, *PRESET]
    scores = [*plan_error.LLAMA, *plan_error.sized(2, 1024), "precision=32"]
    pairs = [*plan_error.GPT2, *plan_error.USUAL, "precision=bf16", "loss=dpo", *PAIRS]
    found = {"gpt2: the preset's techniques": preset, "gpt2: loss=dpo, 4 pairs": pairs}
    found |= {name: rows[name] for name in wanted}
    return found | {"llama: precision=32, 2 x 1024": scores}


def cases(size: Size) -> Mapping[str, Case]:
    wanted = list(recipes())[: None if size.whole else 1]
    found = {name: Case(partial(recipe, name=name), 300) for name in wanted}
    found |= {"out of memory": Case(out_of_memory, 90), "paged state": Case(paged, 120)}
    return found | ({"memory.snapshot=true": Case(snapshot, 90)} if size.whole else {})


def recipe(here: Here, name: str) -> dict:
    """Returns a recipe's predicted memory, its measured memory, and the smallest cap under which it works."""
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
        "predicted": {key: predicted[f"{key}_bytes"] for key in PREDICTIONS},
        "allocated": summary["peak_bytes"]["device"],
        "reserved": max(reserved.values()),
        "by_category": summary["peak_bytes_by_category"],
    }
    here.keep(found)
    here.release()
    found |= smallest(here, cfg, found)
    return found | ({"right": planned_enough(found)} if here.on_card else {})  # without a card the figures are made up


def planned_enough(found: Mapping) -> bool:
    """Returns whether a run is not known to fail in the planned smallest cap, which is the first that is tried."""
    planned = found["predicted"]["smallest_cap"]
    return found["smallest_cap"] is not None and all(works or cap < planned for cap, works in found["tried"].items())


def smallest(here: Here, cfg, found: dict) -> dict:
    """Returns the smallest cap that works, in bytes and as a share of the card, and every cap that was tried."""
    from lowmem.system.errors import Refused

    fails = round(LOWEST * found["allocated"])
    planned = found["predicted"]["smallest_cap"] or found["reserved"]  # 0: a rehearsal without a card plans none
    at_work = partial(works, cfg)
    try:
        cap, tried = smallest_that_works(fails, planned, found["reserved"], at_work, here.size.tries)
    except Refused as error:  # a try that failed for another reason
        return {"smallest_cap": None, "why_no_cap": str(error)[-1500:]}
    return {"smallest_cap": cap, "smallest_fraction": cap and cap / here.memory, "tried": tried}


def stand_in(here: Here) -> None:
    """Makes up the figures of a card's allocator where there is no card, as the meter's tests do."""
    if not here.on_card:
        from types import SimpleNamespace

        from made_up import Allocator

        Allocator().install(SimpleNamespace(setattr=setattr))


def reserved_by_phase(file: Path) -> dict[str, int]:
    """Returns {phase: the most bytes that the allocator reserved}."""
    found: dict[str, int] = {}
    with file.open(newline="") as rows:
        for row in csv.DictReader(rows):
            if row["reserved_peak_bytes"]:
                found[row["phase"]] = max(int(row["reserved_peak_bytes"]), found.get(row["phase"], 0))
    return found


def smallest_that_works(
    fails: int, planned: int, most: int, works: Callable[[int], bool], tries: int
) -> tuple[int | None, dict[int, bool]]:
    """Tries the planned cap first, and then bisects between it and one that is taken to fail; or, where it fails,
    between it and one that should work, which is tried, too.

    Returns:
        The smallest cap that worked, or None; every cap that was tried, and whether it worked.
    """
    tried = {planned: works(planned)}
    if tried[planned]:
        most = planned
    else:
        fails, tried[most] = planned, works(most)
    if not tried[most]:
        return None, tried
    for _ in range(tries):
        middle = (fails + most) // 2
        tried[middle] = works(middle)
        fails, most = (fails, middle) if tried[middle] else (middle, most)
    return most, tried


def works(cfg, cap: int) -> bool:
    """Returns whether two steps and an evaluation work under a cap, tried in a new process as batch_size=auto does."""

    from lowmem.plan.batch_size import fits

    return fits(cfg.knowing(memory={"limit": cap}), cfg.batch_size)


def paged(here: Here) -> dict:
    """Returns the share of paged optimizer state that is outside the allocator, in a run and in a resumed run.

    Stage 1 tests whether pages move when the card has no room for them.
    """
    typed = [*plan_error.GPT2, *plan_error.DRY, *plan_error.sized(4, 256), *here.size.small]
    here.config("optim=paged_adamw32bit")
    ways = {
        "adamw": ["optim=adamw"],
        "paged": ["optim=paged_adamw32bit", "max_steps=2"],
        "resumed": ["optim=paged_adamw32bit", f"resume={here.folder / 'paged'}"],
    }
    runs = {}
    for way, line in ways.items():
        runs[way] = here.train(*plan_error.SHORT, *typed, *line, "plan=off", folder=way)
        here.release()
    state = 8 * runs["adamw"]["parameters"]
    held = {way: one["peak_bytes"]["device"] for way, one in runs.items()}
    spared = {way: (held["adamw"] - held[way]) / state for way in ("paged", "resumed")}
    least = 0.5 if here.on_card else -0.05  # without CUDA nothing is paged
    return {"held": held, "state_spared": spared, "right": min(spared.values()) > least}


def out_of_memory(here: Here) -> dict:
    """Tests what a run leaves that runs out of memory: what used it, what to try, and a card's allocator snapshot."""
    typed = [*plan_error.GPT2, *plan_error.USUAL, *here.size.small, f"memory.limit={here.size.limit}", "plan=off"]
    try:
        here.train(*plan_error.SHORT, *typed)
        said = "it did not run out of memory"
    except SystemExit as error:
        said = str(error)
    file = here.folder / "run" / FILE
    found = {
        "says what was held": "Memory at the peak, by category" in said,
        "says what to try": "Try these overrides" in said,
        "its snapshot tells of the end": ("oom" in actions(file)) == here.on_card,
    }
    size = os.path.getsize(file) if file.exists() else None
    return {"found": found, "right": all(found.values()), "snapshot_bytes": size, "said": said[:1500]}


def snapshot(here: Here) -> dict:
    """Tests memory.snapshot=true in a run that ends well: the snapshot names the Python lines that allocated."""
    here.train(*plan_error.SHORT, *plan_error.GPT2, *plan_error.USUAL, *here.size.small, "memory.snapshot=true")
    file = here.folder / "run" / FILE
    found = {
        "tells of allocations": {"alloc", "free_completed"} <= actions(file),
        "and who asked for them": asked_by(file, "lowmem"),
    }
    return {"found": found, "right": all(found.values()), "snapshot_bytes": os.path.getsize(file)}


def events(file: Path) -> list[dict]:
    """Returns the events in a file of torch.cuda.memory._dump_snapshot, or none if there is no file."""
    if not file.exists():
        return []
    return [event for trace in pickle.loads(file.read_bytes())["device_traces"] for event in trace]


def actions(file: Path) -> set[str]:
    return {event["action"] for event in events(file)}


def asked_by(file: Path, package: str) -> bool:
    """Returns whether any allocation names a line of this package."""
    return any(f"/{package}/" in frame["filename"] for event in events(file) for frame in event.get("frames", ()))


def says(results: Mapping[str, dict]) -> str:
    measured = [one for one in results.values() if "phases" in one]
    parts = []
    for what, key in (("live", "allocated"), ("reserved", "reserved"), ("smallest cap", "smallest_cap")):
        off = [one["predicted"][PREDICTED[key]] / one[key] - 1 for one in measured if one.get(key)]
        if off:
            parts.append(f"{what} predicted {min(off):+.1%} to {max(off):+.1%} of measured")
    wrong = [name for name, one in results.items() if not one.get("right", True)]
    return ", ".join(parts) + (f"; not right: {', '.join(wrong)}" if wrong else "")


PREDICTED = {"allocated": "device_peak", "reserved": "reserved_peak", "smallest_cap": "smallest_cap"}


def table(results: Mapping[str, dict]) -> str:
    lines = [
        "| recipe | live GiB, predicted / measured | reserved GiB | smallest cap that works | of the card |",
        "|---|---|---|---|---|",
    ]
    for name, one in results.items():
        if "phases" in one:
            live, held = (f"{both(one['predicted'][PREDICTED[key]], one[key])}" for key in ("allocated", "reserved"))
            known = one.get("smallest_cap") is not None
            cap = both(one["predicted"]["smallest_cap"], one["smallest_cap"]) if known else "-"
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
            lines.append(f"| {name} | {'yes' if one['right'] else 'NO'} | {_findings(one)} |")
    return "\n".join(lines)


def _findings(one: Mapping) -> str:
    if "found" in one:
        return ", ".join(f"{what}: {'yes' if is_so else 'NO'}" for what, is_so in one["found"].items())
    if "state_spared" not in one:
        return "the smallest cap that works is within the plan's need"
    spared = ", ".join(f"{share:.0%} in the {way} run" for way, share in one["state_spared"].items())
    return f"of the state is spared: {spared}"


def both(predicted: int, measured: int) -> str:
    return f"{predicted / GIB:.3f} / {measured / GIB:.3f} ({predicted / measured - 1:+.1%})"
