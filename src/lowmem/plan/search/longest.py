"""Implements longest=: finds the longest sequence, the largest micro-batch, or the models of conf/model that fit.

Each tried value is a separate search of recipes, so each answer has the recipe that fits. Sequence lengths and batch
sizes grow by powers of two while a recipe fits, and are then refined by bisection.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from hydra.errors import ConfigCompositionException

from lowmem.config.settle import run_of
from lowmem.config.typed_lines import CONF, key
from lowmem.plan.search.extend import network
from lowmem.plan.search.recipes import Plan
from lowmem.system.errors import Refused

QUESTIONS = ("seq_len", "batch_size", "model")
FIRST = {"seq_len": 1024, "batch_size": 1}
# Without accumulation a micro-batch is a full optimizer step. With accumulation the search would split each batch size
# into micro-batches that fit.
BESIDE = {"batch_size": ["accumulation=none"]}
# question -> prefixes of further typed lines that an answer replaces, besides the line with its key
INSTEAD_OF = {"seq_len": (), "batch_size": ("accumulation.",), "model": ("model.name", "model.architecture")}
GROWTH = 4  # factor from one number to the next while recipes fit
HALVINGS = 2  # bisection steps between the last number that fits and the first that does not
HOPELESS = 1 << 24  # upper limit of the search

PlanOf = Callable[[Sequence[str]], Plan]  # overrides that replace typed lines with equal keys -> the search's result


def lines_that_stay(question: str, typed: Iterable[str]) -> list[str]:
    """Returns the typed lines that no answer replaces. Args: question: one of `QUESTIONS`."""
    return [line for line in typed if not key(line).startswith(INSTEAD_OF[question])]


def answers(question: str, plan_of: PlanOf) -> Iterator[tuple[str, Plan | str]]:
    """Yields (an override such as seq_len=4096, the plan with this override or the reason why it is refused). Args:
    question: one of `QUESTIONS`; plan_of: runs a search."""
    if question == "model":
        yield from _models(plan_of)
        return

    def planned(number: int) -> Plan | str:
        return _planned(plan_of, [f"{question}={number}", *BESIDE.get(question, [])])

    fits, fails = 0, FIRST[question]
    while fails < HOPELESS:
        yield f"{question}={fails}", (found := planned(fails))
        if not _fits(found):
            break
        fits, fails = fails, GROWTH * fails
    for _ in range(HALVINGS):
        if (middle := (fits + fails) // 2) in (fits, fails):
            return
        yield f"{question}={middle}", (found := planned(middle))
        fits, fails = (middle, fails) if _fits(found) else (fits, middle)


def _models(plan_of: PlanOf) -> Iterator[tuple[str, Plan | str]]:
    names = sorted(yaml.stem for yaml in (CONF / "model").glob("*.yaml") if yaml.stem != "hf")
    sizes = {name: network(run_of([f"model={name}", "device=cpu"]).resolved()).parameters for name in names}
    for name in sorted(names, key=sizes.get):
        yield f"model={name}", _planned(plan_of, [f"model={name}"])


def _planned(plan_of: PlanOf, lines: Sequence[str]) -> Plan | str:
    try:
        return plan_of(lines)
    except (Refused, ConfigCompositionException) as error:  # the model has fewer positions, or lacks a typed key
        return str(error)


def _fits(found: Plan | str) -> bool:
    return isinstance(found, Plan) and found.chosen is not None
