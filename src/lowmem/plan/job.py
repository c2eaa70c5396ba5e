"""Implements the command plan.py: prints the memory of one run, the table of recipes, or the answers to longest=."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lowmem.config import cards, drives
from lowmem.config.check import check, settled
from lowmem.config.declarations import SHARED, class_of, techniques
from lowmem.config.settle import Config, Run, run_of
from lowmem.config.typed_lines import as_mapping, key, replaced, without
from lowmem.memory.cap import parse_bytes
from lowmem.model import loading
from lowmem.plan import table
from lowmem.plan.prediction import predict
from lowmem.plan.search.candidates import Typed
from lowmem.plan.search.longest import answers, lines_that_stay
from lowmem.plan.search.recipes import NO_BF16, Plan, largest_model, search
from lowmem.plan.target import Target
from lowmem.system import process
from lowmem.system.errors import Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.system.terminal import folded

# keys of plan.py that are left out of the printed train.py command
OURS = ("gpu", "ram", "drive", "search", "longest", "rows", "node", "may_change")


def plan(
    cfg: Config,
    output_dir: Path,
    choices: Mapping[str, str],
    typed: Sequence[str],
) -> dict:
    """Prints the plan and writes plan.json to `output_dir`.

    Returns:
        The contents of plan.json.

    Raises:
        Refused: a typed size is invalid, the settings are refused, or `search` or `predict` raises Refused (for example
            because the model cannot be traced).
    """
    start = time.perf_counter()
    run = settled(cfg)
    if run.longest and not run.search:
        raise Refused(
            f"longest={run.longest}: each answer is a search, and search=false predicts one run. Type one of the two."
        )
    card, ram = cards.card(run.gpu), parse_bytes(run.ram, "ram", plain=False)
    if run.batch_size == "auto" and not run.search:
        raise Refused(
            "batch_size=auto: search=false predicts one run, which needs a fixed batch size. Type a number, or remove "
            "search=false."
        )
    on_card = card is not None or run.runs_on == "cuda"
    run = resolved(shared(run, typed), on_card)
    check(run, choices)
    quiet()
    loading.check_architecture(run)
    is_of_here = card is None  # False if gpu= was typed; then several devices are assumed to be in other machines
    card = cards.here() if card is None and on_card else card
    if ram is None and (is_of_here or run.devices == 1):
        ram = process.available_bytes()
    target = Target(on_card, card, ram, run.node, drives.space(run.drive, run.drive_folder))
    typed, gpu_lines = without(OURS, typed), [line for line in typed if key(line) == "gpu"]

    def plan_of(lines: Sequence[str]) -> Plan:
        asked = replaced(typed, as_mapping(lines))
        this = resolved(shared(run_of([*asked, *gpu_lines], "plan"), asked), on_card)
        loading.check_architecture(this)
        changeable = run.may_change and run.may_change.split(",")
        return search(Typed(this, asked, partial(_composed, [*asked, *gpu_lines], on_card=on_card), changeable), target)

    question = run.longest or ("model" if run.gpu and not typed and run.search else None)
    if question:
        typed = lines_that_stay(question, typed)
        text, content = "", _answered(question, plan_of)
    elif run.search:
        searched = plan_of([])
        print(table.command(typed, searched.chosen) if searched.chosen else folded(table.nothing_fits(searched)))
        text, content = f"\n{table.of_plan(searched, run.rows)}", _as_dict(searched, typed)
        if searched.chosen is None and any(line.startswith("model=") for line in typed):
            smaller = largest_model(searched)
            text += f"\nThe largest model of conf/model that would fit instead: {smaller or 'none'}."
    else:
        if card and not card.multiplies(run.multiplies_in):
            raise Refused(NO_BF16)
        prediction = predict(run, target)
        text = table.of_prediction(prediction, target)
        recipe = prediction.as_dict() | {"overrides": typed, "fits": prediction.fits(target)}
        content = {"chosen": None, "recipes": [recipe]}
    content |= {"seconds": time.perf_counter() - start}
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(folded(text))
    print(f"\nplanned in {content['seconds']:.1f} s; {output_dir / 'plan.json'} has all figures")
    return content


def _answered(question: str, plan_of: Callable[[Sequence[str]], Plan]) -> dict:
    """Prints each answer to `longest=` as soon as it is found, and then the command of the last answer that fits.

    Returns:
        The contents of plan.json: `chosen` has the overrides of the last answer that fits (None if no answer fits), and
        `recipes` has the first recipe of each answer that is not refused.
    """
    chosen, recipes = None, []
    print(table.ANSWERS)
    for line, found in answers(question, plan_of):
        print(table.of_answer(line, found), flush=True)
        if isinstance(found, Plan):
            recipes += _as_dict(found, found.typed.lines)["recipes"][:1]
            chosen = found if found.chosen else chosen
    if chosen is not None:
        print(f"\n{table.command(chosen.typed.lines, chosen.chosen)}")
    return {"chosen": chosen and replaced(chosen.typed.lines, as_mapping(chosen.chosen.overrides)), "recipes": recipes}


def shared(run: Run, typed: Sequence[str]) -> Run:
    """Returns the run from which the search starts. If several devices were typed without a strategy, this run has a
    strategy that keeps the full model on each device, and the search also tries other strategies. In all other cases,
    and with search=false, the run is returned unchanged."""
    if not run.search or run.devices == 1 or any(key(line) == SHARED for line in typed):
        return run
    tried = (name for name, technique in techniques(SHARED).items() if technique.tried)
    replicated = next(name for name in tried if not class_of(SHARED, name).divides)
    return run_of([*typed, f"{SHARED}={replicated}"], "plan")


def resolved(run: Run, on_card: bool) -> Run:
    """Returns a copy of the run with resolved interpolations, and with device=cpu, because a run is always traced on
    the CPU. With batch_size=auto and without memory.limit, the size of the card in gpu= (if any) becomes
    memory.limit."""
    run = run.knowing(device="cpu")
    if run.batch_size == "auto" and run.memory.limit is None:  # batch_size=auto needs a memory limit
        card = cards.card(run.gpu)
        run = run.knowing(memory={"limit": card and card.size})
    return run.resolved()


def _composed(typed: Sequence[str], recipe: Mapping[str, str], on_card: bool) -> Run:
    return resolved(run_of(replaced(typed, recipe), "plan"), on_card)


def _as_dict(searched: Plan, typed: Sequence[str]) -> dict:
    recipes = [
        recipe.prediction.as_dict()
        | {
            "overrides": replaced(typed, as_mapping(recipe.overrides)),
            "relative_step_time": recipe.seconds / searched.seconds,
            "changes": [change.says for change in recipe.changes],
            "traced": recipe.traced,
            "fits": searched.fits(recipe),
        }
        for recipe in searched.recipes
    ]
    return {
        "chosen": recipes[0]["overrides"] if searched.chosen else None,
        "gpu_bytes": searched.target.device_memory,
        "ram_bytes": searched.target.host_memory,
        "recipes": recipes,
    }
