"""The plan on the terminal."""

import shlex
from collections.abc import Sequence

from lowmem.plan.prediction import PHASES, Prediction
from lowmem.plan.recipes import Plan, Recipe
from lowmem.units import GIB


def command(typed: Sequence[str], recipe: Recipe) -> str:
    """As a shell reads it."""
    return shlex.join(["python", "train.py", *typed, *recipe.overrides])


def of_plan(plan: Plan, typed: Sequence[str], rows: int) -> str:
    """The command to copy first, then the recipes."""
    lines = [*_head(plan, typed), ""]
    head = (
        "recipe",
        "device GiB",
        "headroom",
        "host GiB",
        "peak in",
        "weights/gradients/optimizer/activations",
        "time",
    )
    cells = [head, *(_row(plan, recipe) for recipe in plan.recipes[:rows])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    fitting = sum(recipe.fits(plan.gpu, plan.ram) for recipe in plan.recipes)
    lines.append(f"{fitting} of {len(plan.recipes)} recipes fit; the shapes of {plan.traces} were traced.")
    return "\n".join([*lines, *_notes(plan)])


def _head(plan: Plan, typed: Sequence[str]) -> list[str]:
    if plan.chosen:
        return [command(typed, plan.chosen)]
    least = plan.recipes[0]
    need = least.prediction
    short = []
    if plan.gpu is not None and need.device_need > plan.gpu:
        short.append(f"{(need.device_need - plan.gpu) / GIB:.1f} GiB of the card")
    host = need.host_need(plan.gpu)
    if plan.ram is not None and host > plan.ram:
        short.append(f"{(host - plan.ram) / GIB:.1f} GiB of the host")
    return [
        f"Nothing fits. The smallest recipe lacks {' and '.join(short)}:",
        f"  {command(typed, least)}",
        f"It needs {need.device_need / GIB:.1f} GiB of a card and {host / GIB:.1f} GiB of host memory. "
        "Type a smaller seq_len or model; batch_size is 1 in the smallest.",
    ]


def _row(plan: Plan, recipe: Recipe) -> tuple[str, ...]:
    need, fastest = recipe.prediction, min(r.seconds for r in plan.recipes)
    by = need.by_category
    kinds = "/".join(f"{by[kind] / GIB:.1f}" for kind in ("weights", "gradients", "optimizer", "activations"))
    room = "" if plan.gpu is None else f"{(plan.gpu - need.device_need) / GIB:+.1f}"
    return (
        " ".join(recipe.overrides) or "(as typed)",
        f"{'about ' if need.estimate else ''}{need.device_need / GIB:.2f}",
        room if recipe.fits(plan.gpu, plan.ram) else f"{room} does not fit",
        f"{need.host_need(plan.gpu) / GIB:.1f}",
        need.peak_phase,
        kinds,
        f"{recipe.seconds / fastest:.2f}",
    )


def _notes(plan: Plan) -> list[str]:
    estimates = dict.fromkeys(recipe.prediction.estimate for recipe in plan.recipes if recipe.prediction.estimate)
    return [*_facts(plan), *(f"about: {why}" for why in estimates)]


def _facts(plan: Plan) -> list[str]:
    if not plan.recipes[0].prediction.on_card:
        return ["Device and host are one here: device is what the tensors take, host all resident memory."]
    found = [
        f"device: the least that CUDA's allocator works with, and {_beside(plan.recipes[0].prediction)}. "
        "time: relative, counted from operations and bytes."
    ]
    if plan.recipes[0].prediction.paged:
        found.append(_paged(plan.recipes[0].prediction, plan.gpu))
    return found if plan.card is None else [*found, f"the card: {plan.card.says}: {plan.card.size / GIB:.2f} GiB."]


def _beside(prediction: Prediction) -> str:
    return f"{prediction.beside / GIB:.2f} GiB for CUDA's context and kernels"


def _paged(prediction: Prediction, gpu: int | None) -> str:
    state, host = prediction.paged / GIB, prediction.paged_on_host(gpu) / GIB
    return (
        f"beside that {state:.2f} GiB of state are paged: {state - host:.2f} lie on the card, where there is room, and "
        f"{host:.2f} on the host (all of it while a checkpoint is written or read)"
    )


def of_prediction(prediction: Prediction, gpu: int | None, ram: int | None) -> str:
    """One run, phase by phase."""
    lines = [f"{'phase':<12}{'device GiB':>12}{'host GiB':>12}"]
    for name in PHASES:
        need = prediction.phases[name]
        mark = "  <- the device's peak" if name == prediction.peak_phase else ""
        lines.append(f"{name:<12}{need.device / GIB:>12.3f}{need.host / GIB:>12.3f}{mark}")
    by = ", ".join(f"{kind} {size / GIB:.3f}" for kind, size in prediction.by_category.items())
    lines.append(f"at the peak: {by} GiB")
    lines.append(f"host, GiB: {', '.join(f'{k} {v / GIB:.2f}' for k, v in prediction.host_categories.items() if v)}")
    if prediction.on_card:
        reserved, need = prediction.reserved / GIB, prediction.device_need / GIB
        lines.append(
            f"CUDA reserves {reserved:.2f} GiB where there is room, and works with {prediction.smallest / GIB:.2f}: "
            f"with {_beside(prediction)} a card of {need:.2f}"
        )
    if prediction.paged:
        lines.append(_paged(prediction, gpu))
    verdict = "fits" if prediction.fits(gpu, ram) else "does not fit"
    sizes = [f"{name} of {size / GIB:.1f} GiB" for name, size in (("a card", gpu), ("a host", ram)) if size is not None]
    lines.append(f"It {verdict} {' and '.join(sizes)}.")
    if prediction.estimate:
        lines.append(f"An estimate: {prediction.estimate}")
    return "\n".join(lines)
