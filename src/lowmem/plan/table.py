"""Formats plans and predictions for the terminal: tables, notes below them, and commands to copy."""

import shlex
from collections.abc import Sequence
from itertools import compress, groupby
from operator import attrgetter

from lowmem.config.declarations import CHANGEABLE
from lowmem.config.drives import FOLDER, READ, WRITTEN
from lowmem.config.typed_lines import as_mapping, replaced
from lowmem.plan import column
from lowmem.plan.cost.step_time import free_from
from lowmem.plan.prediction import PHASES, Prediction
from lowmem.plan.search.extend import network
from lowmem.plan.search.recipes import Plan, Recipe
from lowmem.plan.target import Target
from lowmem.system.units import GIB


def command(typed: Sequence[str], recipe: Recipe) -> str:
    """Returns the shell command that runs a recipe. With several hosts, users must type the command on each host, and
    replace HOST by the name of the first host."""
    program, need = ["python"], recipe.prediction
    if need.devices > need.node:
        count = range(-(-need.devices // need.node), need.devices + 1)
        hosts = next(n for n in count if need.devices % n == 0)  # all hosts have equal numbers of ranks
        program = ["torchrun", f"--nnodes={hosts}", f"--nproc-per-node={need.devices // hosts}"]
        program += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    return shlex.join([*program, "train.py", *replaced(typed, as_mapping(recipe.overrides))])


ANSWERS = f"{'':<28}{'device':>8}{'host':>8}  GiB, with the fastest recipe that fits"


def of_answer(line: str, found: Plan | str) -> str:
    """Formats one answer to `longest=` as a line. Args: line: the tried override; found: the plan with this override,
    or the reason why the override is refused."""
    if isinstance(found, str):
        return f"{line:<28}{'-':>8}{'-':>8}  {found.partition(': ')[2] or found}"
    recipe = found.recipes[0]
    need, words = recipe.prediction, " ".join(recipe.overrides) or "as typed"
    fits = "" if found.chosen else "nothing fits; the smallest: "
    return f"{line:<28}{need.device.total / GIB:>8.2f}{need.host.total / GIB:>8.1f}  {fits}{words}"


def of_plan(plan: Plan, rows: int) -> str:
    """Formats the table of recipes. Consecutive recipes with the same changes to the training form a group, below a
    heading with the overrides that they share. Each recipe has a row of numbers, and a line with its other overrides.
    Args: rows: maximum number of recipes."""
    head = ("time", "device", "spare", "PyTorch", "host", "peak in")
    cells = [_row(plan, recipe) for recipe in plan.recipes[:rows]]
    used = [any(column) for column in zip(*cells, strict=True)]  # empty columns are left out, for example on a CPU
    head, *cells = (tuple(compress(row, used)) for row in (head, *cells))
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines, rows_left = [_line(head, widths)], iter(cells)
    for says, same_changes in groupby(plan.recipes[:rows], attrgetter("says")):
        recipes = list(same_changes)
        shared = [line for line in recipes[0].overrides if all(line in recipe.overrides for recipe in recipes)]
        lines.append(f"{says}:{''.join(f' {line}' for line in shared)}")
        for recipe in recipes:
            fits = "" if plan.fits(recipe) else "does not fit: "
            own = [line for line in recipe.overrides if line not in shared]
            lines += [_line(next(rows_left), widths), f"  {fits}{' '.join(own) or 'as it is'}"]
    return "\n".join([*lines, *_notes(plan)])


def nothing_fits(plan: Plan) -> str:
    least = plan.recipes[0]
    need, gpu, ram = least.prediction, plan.target.device_memory, plan.target.host_memory
    short = []
    if gpu is not None and need.device.total > gpu:
        short.append(f"the card by {(need.device.total - gpu) / GIB:.1f} GiB")
    host = need.host.total
    if ram is not None and host > ram:
        short.append(f"the host by {(host - ram) / GIB:.1f} GiB")
    if plan.target.drive is not None and need.drive.total > plan.target.drive.size:
        short.append(f"the drive by {(need.drive.total - plan.target.drive.size) / GIB:.1f} GiB")
    drive = ", or drive=200GB to also use a drive" if host > (ram or host) and plan.target.drive is None else ""
    return "\n".join(
        [
            f"Nothing fits. The smallest recipe exceeds {' and '.join(short)}:",
            f"  {command(plan.typed.lines, least)}",
            f"It needs a card of {need.device.total / GIB:.1f} GiB and {host / GIB:.1f} GiB of host memory, with "
            f"batch_size=1. Type a smaller seq_len or model{drive}.",
        ]
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Formats a row of the table. Numbers are right-aligned; the phase in the last column is left-aligned."""
    *figures, (peak, _) = zip(cells, widths, strict=True)
    return "  ".join([*(cell.rjust(width) for cell, width in figures), peak])


def _row(plan: Plan, recipe: Recipe) -> tuple[str, ...]:
    need, gpu = recipe.prediction, plan.target.device_memory
    return (
        f"{recipe.seconds / plan.seconds:.2f}" if plan.fits(recipe) else "",
        f"{'~' if need.estimate else ''}{need.device.total / GIB:.2f}",
        "" if gpu is None else f"{(gpu - need.device.total) / GIB:+.2f}",
        f"{(need.reserved + need.device.context) / GIB:.2f}" if need.on_card else "",
        f"{need.host.total / GIB:.1f}",
        need.device.phase,
    )


def _notes(plan: Plan) -> list[str]:
    counted = f"{len(plan.fitting)} of {len(plan.recipes)} recipes fit"
    if plan.too_large:
        counted += f"; {plan.too_large} other combinations were skipped, since they need more memory"
    estimates = dict.fromkeys(recipe.prediction.estimate for recipe in plan.recipes if recipe.prediction.estimate)
    advised = dict.fromkeys(recipe.prediction.advice for recipe in plan.recipes if recipe.prediction.advice)
    lines = [f"{counted}.", *_facts(plan), *_others(plan)]
    return [*lines, *(f"~: {why}" for why in estimates), *advised]


def _others(plan: Plan) -> list[str]:
    """Returns a note that says why recipes that change precision or optimizer are listed or left out; empty if the plan
    needs no such note."""
    if plan.chosen is None or plan.typed.may_change is not None or all(map(plan.typed.keeps, CHANGEABLE)):
        return []
    if plan.chosen.changes:
        return ["No recipe with the typed training fits. Each heading names what its recipes change."]
    return ["No recipe changes the training. Type may_change=precision,optim to include recipes that do."]


def _facts(plan: Plan) -> list[str]:
    if not plan.recipes[0].prediction.on_card:
        return [
            "Sizes are in GiB. On a CPU, device and host share one memory: device is the tensors, host all resident "
            "memory."
        ]
    notes = [
        "Sizes are in GiB. device: the smallest card that works; PyTorch: memory it reserves if the card has room; "
        f"both include {_context(plan.recipes[0].prediction)}. spare: what the card has left. time: relative to the "
        "fastest recipe, computed from operations and bytes."
    ]
    if plan.recipes[0].prediction.paged:
        notes.append(_paged(plan.recipes[0].prediction))
    if plan.recipes[0].prediction.trace.streamed:
        notes.append(_streams(plan))
    if plan.recipes[0].prediction.drive.total:
        notes.append(on_drive(plan.recipes[0].prediction, plan.target))
    if plan.recipes[0].prediction.devices > 1:
        notes.append(_ranks(plan.recipes[0].prediction))
    card = plan.target.card
    return notes if card is None else [*notes, f"Card: {card.says}."]


def _context(prediction: Prediction) -> str:
    users = "the CUDA context and NCCL's buffers" if prediction.devices > 1 else "the CUDA context"
    return f"{prediction.device.context / GIB:.2f} GiB for {users}"


def _ranks(prediction: Prediction) -> str:
    inside, between = (size / GIB for size in prediction.traffic)
    shared = (
        f"{prediction.devices} devices: device is per device, host is for all {prediction.on_host} devices of a host"
    )
    if not any(prediction.traffic):  # the strategy was not traced
        return shared
    return (
        f"{shared}. Each receives {inside:.2f} GiB per optimizer step from devices of its node, and {between:.2f} GiB "
        "from other nodes"
    )


def _streams(plan: Plan) -> str:
    recipe = plan.typed.config(as_mapping(plan.recipes[0].overrides))
    model = network(recipe)
    tokens = free_from(plan.machine, recipe.multiplies_in) / model.active_in_blocks
    computes = ""
    if model.inactive:
        active = (model.parameters - model.inactive) / 1e9
        computes = f" ({active:.1f} of {model.parameters / 1e9:.1f} billion parameters compute a token)"
    unit, micro_batches = ("window", recipe.windows.largest) if recipe.by_layer else ("micro-batch", 1)
    return (
        f"Streaming is free from about {round(tokens, -1):,.0f} tokens per {unit} on {plan.machine.name}"
        f"{computes}; this recipe has {micro_batches * recipe.batch_size * recipe.seq_len:,}."
    )


def _paged(prediction: Prediction) -> str:
    state, host = prediction.paged / GIB, prediction.paged_on_host / GIB
    return (
        f"A further {state:.2f} GiB of optimizer state are paged: {state - host:.2f} are on the card, where there is "
        f"room, and {host:.2f} in host memory (all of it while a checkpoint is written or read)."
    )


def on_drive(prediction: Prediction, target: Target) -> str:
    """Formats the bytes on a drive, the bytes that each step reads and writes, and the seconds that reading and writing
    take at the assumed rates of a drive."""
    read, written, folder = prediction.drive_read, prediction.drive_written, target.drive.folder
    seconds = _rounded(read / READ + written / WRITTEN)
    sentence = (
        f"{prediction.drive.total / GIB:.2f} GiB are on the drive. A step reads {read / GIB:.2f} GiB and writes "
        f"{written / GIB:.2f} GiB, which is {_rounded(written / 1e9)} TB written per 1,000 steps. This takes the drive "
        f"{seconds} s per step, if it reads {READ / 1e9:.1f} GB/s and writes {WRITTEN / 1e9:.1f} GB/s, as assumed here."
    )
    return f"{sentence} Replace {FOLDER} by a folder on the drive." if folder == FOLDER else sentence


def _rounded(number: float) -> str:
    """Formats a number of 10 or more as an integer, and a smaller number with two significant digits."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def of_prediction(prediction: Prediction, target: Target) -> str:
    """Formats the prediction of a single run: the reports of device, host and drive, the peaks of each phase, and
    notes."""
    lines = [*_columns(prediction), "", f"{'phase':<12}{'device GiB':>12}{'host GiB':>12}"]
    for name in PHASES:
        need = prediction.phases[name]
        lines.append(f"{name:<12}{need.device / GIB:>12.3f}{need.host / GIB:>12.3f}")
    lines += ["", *_verdict(prediction, target)]
    if prediction.paged:
        lines.append(_paged(prediction))
    if prediction.mapped:
        size = prediction.mapped / GIB
        lines.append(
            f"Loading also maps {size:.2f} GiB of weight files; the system frees this memory when it is short."
        )
    if prediction.drive.total:
        lines.append(on_drive(prediction, target))
    if prediction.devices > 1:
        lines.append(f"{_ranks(prediction)}.")
    lines += [f"An estimate: {prediction.estimate}"] if prediction.estimate else []
    return "\n".join([*lines, *([prediction.advice] if prediction.advice else [])])


def _columns(prediction: Prediction) -> list[str]:
    """Formats the reports of the device, the host and the drive."""
    device, host = prediction.device, prediction.host
    needed = "the smallest card that works" if prediction.on_card else "device"
    room = round(1000 * (prediction.reserved + device.context) / GIB)
    shared = f" for {prediction.on_host} processes" if prediction.on_host > 1 else ""
    lines = column.lines(device, f"device, highest in {device.phase}", needed)
    lines += [column.line("PyTorch takes, if there is room", room)] if prediction.on_card else []
    lines += ["", *column.lines(host, f"host, highest in {host.phase}{shared}", "host memory")]
    return [*lines, *(["", *column.lines(prediction.drive, "drive", "files")] if prediction.drive.total else [])]


def _verdict(prediction: Prediction, target: Target) -> list[str]:
    card, host = prediction.device.total / GIB, prediction.host.total / GIB
    needs = "Device and host share one memory: host memory includes device memory."
    if prediction.on_card:
        needs = f"Needs a {card:.1f} GiB card and {host:.1f} GiB of host memory."
    drive = target.drive.size if target.drive and prediction.drive.total else None
    named = (("a card", target.device_memory), ("a host", target.host_memory), ("a drive", drive))
    sizes = [f"{name} of {size / GIB:.1f} GiB" for name, size in named if size is not None]
    return [needs, f"It {'fits' if prediction.fits(target) else 'does not fit'} {' and '.join(sizes)}."]
