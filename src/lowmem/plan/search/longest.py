"""Implements longest= of plan.py: finds the longest sequence that fits, the largest micro-batch that fits, or the
models of conf/model that fit.

Each tried value is a separate search, so each answer that fits has a recipe. Sequence lengths and batch sizes grow by a
factor of GROWTH while a recipe fits. Then HALVINGS steps of bisection narrow the gap between the largest number that
fits and the smallest number that does not. For longest=model, each model of conf/model except hf is tried, smallest
first.
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
# question -> overrides that are added to each tried value. With gradient accumulation, the search would split each
# batch into micro-batches that fit, so accumulation is switched off.
BESIDE = {"batch_size": ["accumulation=none"]}
# question -> prefixes of keys. Typed overrides of keys with these prefixes are dropped, because each answer replaces
# them.
INSTEAD_OF = {"seq_len": (), "batch_size": ("accumulation.",), "model": ("model.name", "model.architecture")}
GROWTH = 4  # factor between two successive numbers while recipes fit
HALVINGS = 2  # number of bisection steps
HOPELESS = 1 << 24  # numbers grow up to this limit, which itself is not tried

PlanOf = Callable[[Sequence[str]], Plan]  # overrides that replace typed overrides -> the result of a search


def lines_that_stay(question: str, typed: Iterable[str]) -> list[str]:
    """Returns the typed overrides without the overrides that INSTEAD_OF names. An override of the question's own key
    remains, and each answer replaces it. Args: question: one of `QUESTIONS`."""
    return [line for line in typed if not key(line).startswith(INSTEAD_OF[question])]


def answers(question: str, plan_of: PlanOf) -> Iterator[tuple[str, Plan | str]]:
    """Yields a pair for each tried value: an override, such as "seq_len=4096", and the plan with this override or the
    reason why it is refused. Args: question: one of `QUESTIONS`; plan_of: runs a search."""
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
    except (Refused, ConfigCompositionException) as error:  # for example, a model lacks a typed key
        return str(error)


def _fits(found: Plan | str) -> bool:
    return isinstance(found, Plan) and found.chosen is not None
