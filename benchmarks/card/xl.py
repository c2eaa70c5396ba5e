"""Stage 5 trains all weights of GPT-2 XL (1558M parameters) under 12 GiB, with the preset as shipped.

The weights start at random. A second run makes a sixth of the steps under 6 GiB.
"""

from collections.abc import Mapping
from functools import partial
from math import isfinite

from benchmarks.card.case import Case, Here, Size, Stage
from benchmarks.gpt2_xl import CAPS, capped
from lowmem.memory.cap import parse_bytes
from lowmem.system.units import GIB

STAGE = Stage(5, "GPT-2 XL under 12 GiB", __name__, seconds=470, gib=11)
# cap -> (share of the preset's steps, time limit in seconds: what was measured until then counts)
SHARES = {CAPS[0]: (1, 330), CAPS[1]: (1 / 6, 110)}

LEARNT = 20  # steps after which the loss must be below the initial one: the learning rate rises from 0 over fifty steps


def cases(size: Size) -> Mapping[str, Case]:
    found = {}
    for cap, (share, seconds) in list(SHARES.items())[: None if size.whole else 1]:
        run = partial(preset, cap=cap, share=share, seconds=seconds)
        found[f"the preset under {cap}"] = Case(run, seconds + 15, imports="psutil")
    return found


def preset(here: Here, cap: str, share: float, seconds: float) -> dict:
    """Returns the peaks, the pace and every step's loss, as a user would see them but for dropout's random numbers."""
    typed, seconds = [*here.typed(), *here.size.preset], here.size.patience * seconds
    found = capped(cap, typed, max(2, round(share * here.size.steps)), seconds)
    if not found["losses"]:
        raise SystemExit(f"{found['last_words']}\nNot one step was done within {seconds:.0f} s.")
    return found | {"right": right(found, parse_bytes(cap))}


def right(found: Mapping, cap: int) -> bool:
    """Returns whether a run stayed within its cap, and its loss fell if it had enough steps to show it."""
    held, losses = found["reserved_peak"] or found["allocated_peak"], found["losses"]
    return held <= cap and all(map(isfinite, losses)) and (len(losses) < LEARNT or losses[-1] < losses[0])


def says(results: Mapping[str, dict]) -> str:
    return "; ".join(
        f"{name}: {one['steps']} steps, loss {one['losses'][0]:.2f} to {one['losses'][-1]:.2f}, "
        f"{one['allocated_peak'] / GIB:.2f} GiB"
        + (f", {one['seconds_per_step']:.2f} s per step" if _paced(one) else "")
        for name, one in results.items()
        if one["losses"]
    )


def _paced(one: Mapping) -> bool:
    return one["seconds_per_step"] is not None


def table(results: Mapping[str, dict]) -> str:
    lines = [
        "| run | steps | live GiB, predicted / measured | reserved GiB | host GiB | s per step | tokens/s | losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in results.items():
        expected = f"{one['predicted']['device_peak_bytes'] / GIB:.2f}" if one["predicted"] else "-"
        sizes = ["-" if size is None else f"{size / GIB:.2f}" for size in (one["allocated_peak"], one["reserved_peak"])]
        pace = f"{one['seconds_per_step']:.2f} | {one['tokens_per_second']:,.0f}" if _paced(one) else "- | -"
        losses = " ".join(f"{loss:.2f}" for loss in one["losses"])
        steps = f"{one['steps']}{' (ended by its time)' if one['ended_early'] else ''}"
        host = f"{one['host_peak'] / GIB:.1f}"
        lines.append(f"| {name} | {steps} | {expected} / {sizes[0]} | {sizes[1]} | {host} | {pace} | {losses} |")
    return "\n".join(lines)
