"""The planner lists the recipes, decides which of them fit, and ranks them by time."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from lowmem.config.declarations import SHARED
from lowmem.config.refusals import refused
from lowmem.config.settle import Run
from lowmem.config.typed_lines import CONF, as_lines, as_mapping
from lowmem.model.blocks import stack_of
from lowmem.model.loading import describe, period
from lowmem.model.trainable import trainable
from lowmem.plan.cost.machine import Machine, machine
from lowmem.plan.prediction import LEAST_RESERVED, Prediction, needs, outline, outlined, predict
from lowmem.plan.search.candidates import Candidate, Training, Typed, candidates, micro_batches, strategies, trainings
from lowmem.plan.search.changes import Change, Tier
from lowmem.plan.search.derive import DRIVE, STAY, Derivation, Needed
from lowmem.plan.search.helper import Helper
from lowmem.plan.search.trace_all import trace_all
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import trace
from lowmem.system import process
from lowmem.system.errors import Refused
from lowmem.system.without_gc import undisturbed
from lowmem.techniques.weights.streamed import HOLDS

SAME = 1.03  # recipes whose counted times differ by less than this factor are equally fast
NO_BF16 = (
    "precision: this card has no bf16 units, so torch emulates bf16 products at half the speed of fp32. Type "
    "precision=16, 16-master or 32."
)


@dataclass(frozen=True)
class Recipe:
    """Holds a recipe with its prediction.

    Args: overrides: added to the typed lines, in place of those with the same key; seconds: estimate for an optimizer
    step; changes: how the training differs from the typed one.
    """

    overrides: tuple[str, ...]
    prediction: Prediction
    seconds: float
    changes: tuple[Change, ...] = ()
    traced: bool = False  # the recipe itself was traced, not derived

    @property
    def says(self) -> str:
        return ", ".join(change.says for change in self.changes) or "as typed"


@dataclass(frozen=True)
class Plan:
    """Holds the result of a search. Args: recipes: those that fit, best first, then the others, smallest first;
    hopeless: how many more are too large by their weights, gradients and state alone."""

    typed: Typed
    recipes: list[Recipe]
    target: Target
    traces: int
    hopeless: int = 0
    machine: Machine | None = None

    def fits(self, recipe: Recipe) -> bool:
        return recipe.prediction.fits(self.target)

    @property
    def fitting(self) -> list[Recipe]:
        return [*filter(self.fits, self.recipes)]

    @property
    def seconds(self) -> float:
        """Returns the seconds of the fastest recipe that fits, or of the fastest at all if none fits: the unit of
        relative times."""
        return min(recipe.seconds for recipe in self.fitting or self.recipes)

    @property
    def chosen(self) -> Recipe | None:
        return self.recipes[0] if self.fits(self.recipes[0]) else None


@undisturbed()  # a trace leaves little garbage, and a collection would scan everything that is imported
def search(typed: Typed, target: Target, helper: Helper | None = None) -> Plan:
    """Searches rank by rank until a recipe fits: the typed training, then those close to it, then another.

    Args: helper: traces some of the recipes.

    Raises:
        Refused: recipes cannot be derived for this model or strategy (`depth_and_period`), the model cannot be traced,
            every recipe is refused, or the card cannot multiply in bf16.
    """
    state = _Search(typed, target, helper)
    tried: list[Recipe] = []
    for rank in sorted(state.by_rank):
        tried += state.recipes(rank)
        if any(recipe.prediction.fits(target) for recipe in tried):
            break
    else:
        tried += state.smallest_of_the_hopeless()
    if not tried:
        raise Refused(next(state.refused()))
    fitting = [r for r in tried if r.prediction.fits(target)]
    others = [r for r in tried if not r.prediction.fits(target)]
    others.sort(key=lambda r: (r.prediction.device_need, r.prediction.host_peak))
    return Plan(typed, fitting + others, target, state.derivation.traces, len(state.hopeless), state.derivation.machine)


class _Search:
    """Holds the state of a search. Args: as for `search`."""

    def __init__(self, typed: Typed, target: Target, helper: Helper | None) -> None:
        self.typed, self.target, self.helper = typed, target, helper
        self.libraries = process.rss_bytes()
        self.trainings = trainings(typed, target.card)
        if not self.trainings and target.card and not target.card.multiplies("bfloat16"):
            raise Refused(NO_BF16)
        self.by_rank: dict[int, list[Training]] = {}
        for training in self.trainings:
            self.by_rank.setdefault(_rank(training, typed.may_change), []).append(training)
        self.hopeless: list[Candidate] = []  # too large by weights, gradients and state alone
        rates = machine(target.on_card, target.card, typed.run.multiplies_in)
        depth, turn = depth_and_period(typed.run)
        run_of = {name: typed.config({SHARED: name}) for name in strategies(typed)}
        sizes = [size for run in run_of.values() for size, _ in micro_batches(typed, run)]
        self.derivation = Derivation(typed.config, depth, (min(sizes), max(sizes)), target, rates, period=turn)
        self.reasons: dict[str, str] = {}  # strategy -> why it does not work
        self.strategies = [name for name in run_of if len(run_of) == 1 or self._works(name)]

    def _works(self, strategy: str) -> bool:
        """Returns whether a strategy works with this model, by a trace of one block. If not, stores the reason: a width
        may not be divisible by the number of devices."""
        short = self.typed.config({SHARED: strategy}).knowing(batch_size=1, seq_len=1)
        try:
            trace(short, self.target.on_card, 1, self.target.capability)
        except Refused as error:
            self.reasons[strategy] = str(error)
        return strategy not in self.reasons

    def refused(self) -> Iterator[str]:
        """Yields the reasons why no recipe can be tried."""
        for training in self.trainings:
            for strategy in self.strategies:
                yield from refused(self.typed.config({**training.chosen, SHARED: strategy}))
        yield from self.reasons.values()

    def recipes(self, rank: int) -> list[Recipe]:
        """Returns the recipes of a rank that were tried; those that fit are in order, best first.

        Recipes that need data from the host in every pass are tried only if no other fits: they compute the same, and
        the link may slow them down. Those that need a drive, which may be slower and which they wear, come last.
        """
        of_rank = self.by_rank[rank]
        listed = [candidate for training in of_rank for candidate in candidates(self.typed, training, self.strategies)]
        tried = []
        for group in self._groups(listed):
            tried += self._recipes(group)
            if any(recipe.prediction.fits(self.target) for recipe in tried):
                break
        return tried

    def _groups(self, listed: list[Candidate]) -> Iterator[list[Candidate]]:
        """Yields the candidates, best group first."""
        yield [candidate for candidate in listed if not candidate.over_the_link]
        yield (waiting := [candidate for candidate in listed if candidate.over_the_link])
        typed = DRIVE in self.typed.values or self.typed.run.drive_folder is not None
        if self.target.drive is not None and not typed:
            streaming = [c for c in waiting if c.streams and not self._is_hopeless(c)]
            for holds in HOLDS:
                yield [candidate.on_drive(self.target.drive.folder, holds) for candidate in streaming]

    def _recipes(self, group: list[Candidate]) -> list[Recipe]:
        hopeful = []
        self._make_traces(need for c in group for need in self.derivation.needed(c.option, c.run)[1::2])
        for candidate in group:
            (self.hopeless if self._is_hopeless(candidate) else hopeful).append(candidate)
        derived = self._derived(hopeful)
        derived += self._derived(list(self._partly_resident(hopeful, derived)))
        ranked = _best_first(r for r in derived if r.prediction.fits(self.target))
        return self._confirmed(ranked) + [r for r in derived if not r.prediction.fits(self.target)]

    def _partly_resident(self, hopeful: list[Candidate], derived: list[Recipe]) -> Iterator[Candidate]:
        """Yields streaming candidates with as many blocks resident on the card as fit."""
        memory = self.target.device_memory
        if memory is None or STAY in self.typed.values:
            return
        for candidate, recipe in zip(hopeful, derived, strict=True):
            if candidate.streams and recipe.prediction.fits(self.target):
                block = LEAST_RESERVED * recipe.prediction.trace.streamed / self.derivation.depth
                room = int((memory - recipe.prediction.device_need) / block)
                most = (
                    self.derivation.depth - candidate.run.weights.slots - 1
                )  # with more, every block would have a place
                if (count := min(room, most)) > 0:
                    yield replace(candidate, option={**candidate.option, STAY: str(count)})

    def _confirmed(self, ranked: list[Recipe]) -> list[Recipe]:
        """Traces the derived recipes, best first, until one fits: a recipe is traced before it is recommended."""
        for number, recipe in enumerate(ranked):
            run = self.typed.config(as_mapping(recipe.overrides))
            exact = predict(run, self.target)
            ranked[number] = replace(recipe, prediction=exact, traced=True)
            if exact.fits(self.target):
                break
        return ranked

    def smallest_of_the_hopeless(self) -> list[Recipe]:
        """Returns the hopeless recipes with the smallest weights, gradients and state, for want of better ones."""
        if not self.hopeless:
            return []
        sizes = [self._least(candidate) for candidate in self.hopeless]
        smallest = [c for c, size in zip(self.hopeless, sizes, strict=True) if size == min(sizes)]
        self.hopeless = [c for c in self.hopeless if c not in smallest]
        return self._derived(smallest)

    def _is_hopeless(self, candidate: Candidate) -> bool:
        memory = self.target.device_memory
        return memory is not None and self._least(candidate) > memory

    def _least(self, candidate: Candidate) -> int:
        """Returns the least bytes of a card that any recipe with these weights, gradients and state needs."""
        parameters = self.derivation.of_parameters(candidate.option, candidate.run)
        return parameters.phases["step"].total + self.target.context_bytes

    def _derived(self, group: list[Candidate]) -> list[Recipe]:
        self._make_traces(need for c in group for need in self.derivation.needed(c.option, c.run))
        return [self._recipe(candidate) for candidate in group]

    def _recipe(self, candidate: Candidate) -> Recipe:
        option, run = candidate.option, candidate.run
        derived, seconds = self.derivation.derive(option, run)
        need = needs(derived, run, self.target, self.libraries)
        need = replace(need, estimate=self.derivation.estimate(option, run) or need.estimate)
        if link := self.derivation.machine.link:
            seconds += 2 * need.paged_on_host(self.target.device_memory) / link  # each of its pages comes and leaves
        overrides = tuple(as_lines({k: v for k, v in option.items() if not self.typed.says(k, v)}))
        return Recipe(overrides, need, seconds, candidate.training.changes)

    def _make_traces(self, needed: Iterable[Needed]) -> None:
        """Makes those of the needed traces that do not exist yet."""
        trace_all(self.typed.run, self.derivation, needed, self.helper)


def _rank(training: Training, may_change: Collection[str] | None) -> int:
    """Returns the rank of a training: rank 1 is tried first. A training close to the typed one shares it if
    `may_change` names any group."""
    return Tier.AS_TYPED if training.tier == Tier.CLOSE and may_change else training.tier


def _best_first(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Returns recipes, fastest first, but moves one of those as fast as the fastest to the front: the one with the
    fewest changes of the training, of several the one with the fewest overrides."""
    by_seconds = sorted(recipes, key=lambda r: r.seconds)
    as_fast = [r for r in by_seconds if r.seconds <= SAME * by_seconds[0].seconds]
    as_fast.sort(key=lambda r: (len(r.changes), len(r.overrides)))  # stable: of ties the fastest stays ahead
    return as_fast[:1] + [r for r in by_seconds if r is not as_fast[0]]


def depth_and_period(run: Run) -> tuple[int, int]:
    """Returns (number of blocks, number after which the kinds of blocks repeat)."""
    config, strategy = describe(run, plans=True).grown, run.technique("strategy")
    if strategy.overlaps_micro_batches:
        raise Refused(
            "strategy: a search extrapolates from traces of a few blocks, and this strategy shards a few blocks "
            "differently from the full model. To predict one run at a time, add search=false to python plan.py."
        )
    depth, kinds = getattr(config, "num_hidden_layers", None), getattr(config, "layer_types", None)
    turn = period(kinds) if kinds else 1
    if not depth or turn is None:
        raise Refused(
            f"model.name={run.model.name}: a search extrapolates from traces of a few blocks, so all blocks must be "
            "equal or their kinds must repeat in a fixed order; the blocks of this model do not. To predict one run "
            "at a time, add search=false to python plan.py."
        )
    if (run.freeze or run.adapter.arguments.get("target")) and not _trained_alike(run, config, turn):
        raise Refused(
            "freeze=, adapter.target=: a search extrapolates from traces of a few blocks, and here some blocks are "
            "frozen or adapted and others are not. To predict one run at a time, add search=false to python plan.py."
        )
    return depth, turn


def _trained_alike(run: Run, config: PretrainedConfig, turn: int) -> bool:
    """Returns whether all blocks of a kind have the same trainable parameters."""
    kinds = [{name for name, _ in trainable(block)} for block in stack_of(outlined(run, config))]
    return all(kind == kinds[number % turn] for number, kind in enumerate(kinds))


def largest_model(plan: Plan) -> str | None:
    """Returns the largest model of conf/model, with fewer parameters than the plan's own, that fits with the plan's
    smallest recipe; None: none does. It is asked of plans in which nothing fits."""
    recipe, compose = as_mapping(plan.recipes[0].overrides), plan.typed.compose
    parameters = plan.recipes[0].prediction.parameters
    sizes = {}
    for yaml in (CONF / "model").glob("*.yaml"):
        run = None if yaml.stem == "hf" else compose({"model": yaml.stem})
        with suppress(Refused):  # freeze= or adapter.target= name what only this model has
            if run is not None:
                sizes[yaml.stem] = outline(run, plan.target).parameters
    for name in sorted((name for name in sizes if sizes[name] < parameters), key=sizes.get, reverse=True):
        with suppress(Refused):  # its widths may not divide
            if predict(compose({**recipe, "model": name}), plan.target).fits(plan.target):
                return name
    return None
