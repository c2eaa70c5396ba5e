"""Searches recipes that fit, and sorts them by estimated time. A recipe is a set of overrides for a run.

    for each level of training (`changes.py`)        as typed; close to the typed training; another training
        for each set of routes (`candidates.py`)     not streamed; block inputs offloaded; weights streamed; drive
            for each route                           fastest settings that fit (`climb.py`)
                each recipe                          traced with a few blocks and extrapolated (`extend.py`)
            the best recipe that fits                traced at full depth; the search stops if it still fits

A level or set is tried only if no recipe of the earlier levels and sets fits. The code calls a level a rank.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter

import torch

from lowmem.config.declarations import SHARED, techniques
from lowmem.config.refusals import refused
from lowmem.config.settle import Run
from lowmem.config.typed_lines import CONF, as_lines, as_mapping
from lowmem.plan.cost.machine import Machine, machine
from lowmem.plan.cost.step_time import of_trace
from lowmem.plan.host_bytes import CUDA_ON_HOST
from lowmem.plan.prediction import LEAST_RESERVED, NotPredicted, Prediction, not_predicted, predict
from lowmem.plan.search.candidates import (
    DRIVE,
    ORDER,
    RESIDENT,
    PrecisionAndOptimizer,
    Route,
    Typed,
    routes,
    strategies,
    trainings,
)
from lowmem.plan.search.changes import Change, Tier
from lowmem.plan.search.climb import Climb, Settings
from lowmem.plan.search.extend import extended, network
from lowmem.plan.target import Target
from lowmem.plan.tracing.stand_in import state_bytes_per_parameter
from lowmem.plan.tracing.trace import trace
from lowmem.plan.tracing.traces import Trace
from lowmem.system import process
from lowmem.system.errors import Refused
from lowmem.system.without_gc import undisturbed
from lowmem.techniques.weights.streamed import HOLDS
from lowmem.training import build

SAME = 1.03  # recipes that take at most 1.03 times the time of the fastest recipe count as equally fast
NO_BF16 = (
    "precision: this card has no bf16 units, so torch emulates bf16 products at half the speed of fp32. Type "
    "precision=16, 16-master or 32."
)


@dataclass(frozen=True)
class Recipe:
    """Overrides for a run, and the predicted memory and time of this run.

    Args:
        overrides: the overrides to add to the typed overrides. They replace typed overrides with equal keys.
        prediction: the predicted memory.
        seconds: estimated seconds of an optimizer step.
        changes: how the training differs from the typed training.
    """

    overrides: tuple[str, ...]
    prediction: Prediction
    seconds: float
    changes: tuple[Change, ...] = ()

    @property
    def traced(self) -> bool:
        """Returns True if the model was traced at full depth. False: the trace was extrapolated from a few blocks."""
        return not self.prediction.extended

    @property
    def says(self) -> str:
        return ", ".join(change.says for change in self.changes) or "as typed"


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    Args:
        typed: the typed overrides.
        recipes: the recipes that were tried: first those that fit, best first, and then the recipes that do not fit,
            smallest first. Never empty.
        target: the device, host and drive.
        too_large: number of skipped routes. A route is skipped if a lower bound of its memory exceeds the target, or if
            another route, which is known to need no more memory, does not fit.
        machine: the rates with which times are estimated.
    """

    typed: Typed
    recipes: list[Recipe]
    target: Target
    too_large: int = 0
    machine: Machine | None = None

    def fits(self, recipe: Recipe) -> bool:
        return recipe.prediction.fits(self.target)

    @property
    def fitting(self) -> list[Recipe]:
        return [*filter(self.fits, self.recipes)]

    @property
    def seconds(self) -> float:
        """Returns the unit of relative times: the seconds per step of the fastest recipe that fits, or of the fastest
        recipe if none fits."""
        return min(recipe.seconds for recipe in self.fitting or self.recipes)

    @property
    def chosen(self) -> Recipe | None:
        return self.recipes[0] if self.fits(self.recipes[0]) else None


@undisturbed()  # garbage collections scan all imported modules, and traces leave little garbage
def search(typed: Typed, target: Target) -> Plan:
    """Searches level by level until a recipe fits: first the typed training, then trainings that are close to it, then
    all others that the search may try.

    Raises:
        Refused: the model cannot be traced; every recipe is refused (for example because the speed of its matrix
            products is not known); or the card has no bf16 matmuls, and no precision without bf16 may be tried.
    """
    state = _Search(typed, target)
    for rank in sorted(state.by_rank):
        if state.fits_in(rank):
            break
    else:
        state.trace_the_smallest()
    if not state.tried:
        raise Refused(next(state.refused()))
    tried = state.tried.values()
    fitting = [recipe for recipe in tried if recipe.prediction.fits(target)]
    others = [recipe for recipe in tried if recipe not in fitting]
    others.sort(key=lambda r: (r.prediction.device.total, r.prediction.host.total))
    return Plan(typed, _best_first(fitting) + others, target, len(state.too_large), state.machine)


class _Search:
    """A search, and its state: the recipes that were traced, and the routes that cannot fit. Args: see `search`."""

    def __init__(self, typed: Typed, target: Target) -> None:
        self.typed, self.target = typed, target
        self.libraries = process.rss_bytes()
        self.trainings = trainings(typed, target.card)
        if not self.trainings and target.card and not target.card.multiplies("bfloat16"):
            raise Refused(NO_BF16)
        self.by_rank: dict[int, list[PrecisionAndOptimizer]] = {}
        for training in self.trainings:
            self.by_rank.setdefault(_rank(training, typed.may_change), []).append(training)
        self.machine = machine(target.on_card, target.card, typed.run.multiplies_in)
        self.reasons: dict[str | tuple[str, ...], str] = {}  # strategy or a recipe's overrides -> why it is refused
        names = strategies(typed)
        self.strategies = [name for name in names if len(names) == 1 or self._works(name)]
        self.tried: dict[tuple[str, ...], Recipe] = {}  # overrides -> recipe
        self.too_large: dict[tuple, Route] = {}  # (option, sums) -> route that was skipped, because it cannot fit
        # Keys of routes that do not fit with any settings (`Route.on_card`, `Route.on_host`). For each recipe that does
        # not fit on the card, there is also a key of its route that includes the settings (see `_climb`).
        self.hopeless: set[tuple] = set()

    def _works(self, strategy: str) -> bool:
        """Traces one block to find out whether a strategy works with this model. A strategy may be refused, for example
        because a width is not divisible by the number of devices; then the reason is stored in `reasons`. Returns:
        False if the strategy is refused, or if the model cannot be traced with it."""
        short = self.typed.config({SHARED: strategy}).knowing(batch_size=1, seq_len=1)
        try:
            with not_predicted():
                trace(short, self.target.on_card, 1, self.target.capability)
        except Refused as error:  # also NotPredicted: another strategy may be traceable
            self.reasons[strategy] = str(error)
        return strategy not in self.reasons

    def refused(self) -> Iterator[str]:
        """Yields at least one reason why no recipe could be tried. The first reason becomes the error message."""
        yield from self.reasons.values()
        for training, strategy in product(self.trainings, self.strategies):
            run = self.typed.config({**training.chosen, SHARED: strategy})
            yield from refused(run)
            try:
                _ = run.windows
            except Refused as error:
                yield str(error)
        yield "No recipe can be tried with what was typed. Type search=false to see what this run needs."

    def fits_in(self, rank: int) -> bool:
        """Tries the recipes of a level. Returns: True if a recipe fits.

        First come recipes without streamed weights and with block inputs on the card, then recipes without streamed
        weights and with offloaded block inputs, then recipes with streamed weights, and last recipes with streamed
        weights and a drive. Each kind of recipe is tried only if no recipe of the earlier kinds fits. The reason for
        this order is that copies between host and card may slow down the training, that a drive may be even slower, and
        that writing wears out a drive.
        """
        of_rank = self.by_rank[rank]
        every = [route for training in of_rank for route in routes(self.typed, training, self.strategies)]
        resident = [route for route in every if not route.run.streams]
        streamed = [route for route in every if route.run.streams]
        return (
            self._any_fits(_recomputing(resident, on_host=False))
            or self._any_fits(_recomputing(resident, on_host=True))
            or self._any_fits(streamed)
            or any(self._any_fits(on_drive) for on_drive in self._on_drive(streamed))
        )

    def _on_drive(self, streamed: Sequence[Route]) -> Iterator[list[Route]]:
        typed = DRIVE in self.typed.values or self.typed.run.drive_folder is not None
        if self.target.drive is not None and not typed:
            for holds in HOLDS:
                yield [route.on_drive(self.target.drive.folder, holds) for route in streamed]

    def _any_fits(self, ways: Iterable[Route]) -> bool:
        """Searches the routes until the best recipe also fits when it is traced at full depth, because only such a
        recipe may be recommended. Returns: True if such a recipe was found."""
        hopeful = self._hopeful(list(ways))
        while (best := self._fastest(hopeful)) is not None:
            if best.prediction.trace.streamed:
                self._add_resident_blocks(best)
                best = self._best()
            if self._fits_in_full(best):
                return True
        return False

    def _hopeful(self, ways: Sequence[Route]) -> list[Route]:
        """Returns the routes that fit with the settings that need the least memory, sorted by the time per step with
        these settings. A route whose lower bound exceeds the target, or whose key is in `hopeless`, is not traced, and
        is stored in `too_large`."""
        hopeful = []
        for route in ways:
            if self._share(route) > 1 or not self.hopeless.isdisjoint((route.on_card, route.on_host)):
                self.too_large.setdefault((*route.option.items(), route.sums), route)
            elif (smallest := self._smallest_that_fits(route)) is not None:
                hopeful.append((smallest.seconds, route))
        return [route for _, route in sorted(hopeful, key=itemgetter(0))]

    def _smallest_that_fits(self, route: Route) -> Recipe | None:
        """Returns a route's recipe with the settings that need the least memory, if this recipe fits. None: no tried
        recipe fits.

        First tries block inputs in host memory, because these settings need the least device memory. If this recipe is
        refused, or if for example only its block inputs exceed the host memory, also tries block inputs on the card.
        Tries no other recipe after one that exceeds the card's memory, or that exceeds the host memory even without
        block inputs. In `hopeless`, stores the route's key `on_card` if the first tried recipe exceeds the card's
        memory, and the route's key `on_host` if a recipe exceeds the host memory even without block inputs.
        """
        fits_on_card = False  # with block inputs in host memory
        for way in (*_recomputing([route], on_host=True), *_recomputing([route], on_host=False)):
            recipe = self._climb(way).of_least_memory()
            if recipe is None:
                continue
            if self._fits(recipe):
                return recipe
            if self._overfills_card(recipe):
                if not fits_on_card:  # otherwise the route may fit with a drive, or with a smaller optimizer state
                    self.hopeless.add(route.on_card)
                return None
            fits_on_card = True
            need, host = recipe.prediction.host, self.target.host_memory
            if host is not None and need.total - need.activations > host:  # too large even without block inputs
                self.hopeless.add(route.on_host)
                return None
        return None

    def _fastest(self, ways: Iterable[Route]) -> Recipe | None:
        """Searches the settings of the given routes. Args: ways: the routes, fastest first. Returns: the best of all
        recipes that were tried so far and fit; None if no recipe fits."""
        for route in ways:
            best = self._best()
            self._climb(route).fastest(best.seconds if best else math.inf)
        return self._best()

    def _best(self) -> Recipe | None:
        fitting = [*filter(self._fits, self.tried.values())]
        return _best_first(fitting)[0] if fitting else None

    def _fits(self, recipe: Recipe) -> bool:
        return recipe.prediction.fits(self.target)

    def _overfills_card(self, recipe: Recipe) -> bool:
        card = self.target.device_memory
        return card is not None and recipe.prediction.device.total > card

    def _climb(self, route: Route) -> Climb:
        # with equal settings, routes with equal keys need equal device memory
        alike = (*route.on_card, route.option.get(ORDER), route.sums)

        def look(settings: Settings) -> Recipe | None:
            if (*alike, settings) in self.hopeless:
                return None
            recipe = self._recipe(route, settings)
            if recipe is not None and self._overfills_card(recipe):
                self.hopeless.add((*alike, settings))
            return recipe

        smallest = len(route.micro_batches) - 1
        return Climb(route.checkpointings, route.losses, smallest, look, self._fits)

    def _recipe(self, route: Route, settings: Settings) -> Recipe | None:
        """Traces the recipe of a route with the given settings, and extrapolates if possible (cached). None: the recipe
        is refused."""
        batch_size, accumulation = route.micro_batches[settings.size]
        chosen = {"gradient_checkpointing": settings.checkpointing, "loss": settings.loss}
        option = {**route.option, **chosen, "batch_size": str(batch_size), **accumulation}
        without_order = {key: value for key, value in option.items() if key != ORDER}
        otherwise = self.typed.config(without_order)
        if option.get(ORDER) == otherwise.order or otherwise.windows.largest == 1:
            option = without_order
        overrides = tuple(as_lines({k: v for k, v in option.items() if not self.typed.says(k, v)}))
        return self._tried(overrides, self.typed.config(option), route.training.changes, extended)

    def _tried(
        self, overrides: tuple[str, ...], run: Run, changed: tuple[Change, ...], tracer: Callable[..., Trace] = trace
    ) -> Recipe | None:
        """Traces the recipe of some overrides (cached). Returns None if it is refused; the reason is then in `reasons`.
        Raises: NotPredicted: the model cannot be traced."""
        if overrides not in self.tried and overrides not in self.reasons:
            try:
                for reason in refused(run):
                    raise Refused(reason)
                need = predict(run, self.target, tracer, self.libraries)
                self.tried[overrides] = Recipe(overrides, need, self._seconds(run, need), changed)
            except NotPredicted:
                raise
            except Refused as error:
                self.reasons[overrides] = str(error)
        return self.tried.get(overrides)

    def _seconds(self, run: Run, need: Prediction) -> float:
        seconds = of_trace(self.machine, run, need.trace, self.target.node).seconds
        if link := self.machine.link:  # paged state that does not fit on the card is copied in both directions
            seconds += need.paged_on_host * (1 / link.up + 1 / link.down)
        return seconds

    def _add_resident_blocks(self, recipe: Recipe) -> None:
        """Traces a variant of a recipe with streamed weights, in which the blocks that fit into the free memory of the
        card are resident. A no-op if the device memory is unlimited, if weights.resident_blocks was typed, or if not
        even one block fits."""
        memory, run = self.target.device_memory, self.typed.config(as_mapping(recipe.overrides))
        if memory is None or RESIDENT in self.typed.values:
            return
        depth, _ = recipe.prediction.trace.blocks
        block = LEAST_RESERVED * recipe.prediction.trace.streamed / depth
        most = depth - run.weights.arguments["slots"] - 1  # with one more block, all blocks would be on the card
        count = min(int((memory - recipe.prediction.device.total) / block), most)
        overrides = (*recipe.overrides, f"{RESIDENT}={count}")
        if count > 0:
            self._tried(overrides, self.typed.config(as_mapping(overrides)), recipe.changes)

    def _fits_in_full(self, recipe: Recipe) -> bool:
        """Traces a recipe at full depth if its trace was extrapolated. Returns: True if the recipe fits."""
        if not recipe.traced:
            run = self.typed.config(as_mapping(recipe.overrides))
            exact = predict(run, self.target, libraries=self.libraries)
            self.tried[recipe.overrides] = recipe = replace(recipe, prediction=exact)
        return self._fits(recipe)

    def trace_the_smallest(self) -> None:
        """If no recipe was traced, traces the smallest recipe of the skipped route with the smallest lower bound, so
        that the plan can report the memory of this recipe. If recipes fit according to extrapolated traces, traces the
        best of them at full depth, until one still fits or none is left."""
        for route in sorted(self.too_large.values(), key=self._share):
            if not self.tried:  # the recipes of the smallest route may be refused
                self._climb(route).of_least_memory()
        while (best := self._best()) is not None and not self._fits_in_full(best):
            pass

    def _share(self, route: Route) -> float:
        """Returns a lower bound of a route's memory (weights, gradients, optimizer state) divided by the target's
        memory. There is one ratio for the card and one for the host; the larger is returned. Above 1, the route cannot
        fit."""
        needs = (self._least_of_card(route), self._least_of_host(route))
        sizes = (self.target.device_memory, self.target.host_memory)
        return max(need / size if size is not None else 0.0 for need, size in zip(needs, sizes, strict=True))

    def _least_of_card(self, route: Route) -> int:
        run, count = route.run, network(route.run).trained
        weights = 0 if run.streams or run.offloads else count * run.product_bytes
        state = 0.0
        if not (run.masters or run.offloads):
            rate, pageable = state_bytes_per_parameter(build.optimizer(run))
            state = count * (rate - pageable * self.target.on_card + (0 if run.in_backward else run.product_bytes))
        return round((weights + state) / (run.devices if run.saves_parts else 1)) + self.target.context_bytes

    def _least_of_host(self, route: Route) -> int:
        run, each = route.run, 0.0  # bytes per parameter
        if run.streams and not run.reads_weights:
            each = run.product_bytes
        if run.masters and run.drive_folder is None:
            each = max(each, getattr(torch, run.weights_dtype).itemsize)
            each += state_bytes_per_parameter(build.optimizer(run))[0]
        if run.masters and not run.early:
            each += torch.float32.itemsize if route.sums else run.product_bytes
        base = self.libraries + (CUDA_ON_HOST if self.target.on_card else 0)
        return round(network(run).trained * each / (run.devices if run.saves_parts else 1)) + base


def _recomputing(ways: Iterable[Route], on_host: bool) -> Iterator[Route]:
    """Yields copies of the routes with some of their checkpointings: the checkpointings that offload block inputs to
    host memory if `on_host` is True, otherwise the checkpointings that do not. A route without any such checkpointing
    is left out."""
    known = techniques("gradient_checkpointing")
    for route in ways:
        names = [name for name in route.checkpointings if known[name].inputs_on_host == on_host]
        if names:
            yield replace(route, checkpointings=names)


def _rank(training: PrecisionAndOptimizer, may_change: Collection[str] | None) -> int:
    """Returns the level of a training; level 1 is tried first. If `may_change` names a group, trainings that are close
    to the typed training also have level 1."""
    return Tier.AS_TYPED if training.tier == Tier.CLOSE and may_change else training.tier


def _best_first(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Returns the recipes, best first. The candidates for the best recipe are all recipes that are about as fast as the
    fastest (SAME). The best candidate has the fewest changes to the training; ties are decided by the number of
    overrides, and then by the time. All other recipes are sorted by time."""
    by_seconds = sorted(recipes, key=lambda r: r.seconds)
    as_fast = [r for r in by_seconds if r.seconds <= SAME * by_seconds[0].seconds]
    as_fast.sort(key=lambda r: (len(r.changes), len(r.overrides)))  # a stable sort: ties stay sorted by time
    return as_fast[:1] + [r for r in by_seconds if r not in as_fast[:1]]


def largest_model(plan: Plan) -> str | None:
    """Returns the name of the largest model of conf/model (except hf) that is smaller than the plan's model and fits
    with the plan's smallest recipe. None: no such model fits. Args: plan: a plan in which no recipe fits."""
    recipe, compose = as_mapping(plan.recipes[0].overrides), plan.typed.compose
    sizes = {}
    for yaml in (CONF / "model").glob("*.yaml"):
        run = None if yaml.stem == "hf" else compose({"model": yaml.stem})
        with suppress(Refused):  # for example, freeze= or adapter.target= does not match this model
            if run is not None:
                sizes[yaml.stem] = network(run).parameters
    smaller = [name for name in sizes if sizes[name] < plan.recipes[0].prediction.parameters]
    for name in sorted(smaller, key=sizes.get, reverse=True):
        with suppress(Refused):  # for example, a width is not divisible by the number of devices
            if predict(compose({**recipe, "model": name}), plan.target).fits(plan.target):
                return name
    return None
