"""Lists the routes that a search compares. A route is a set of recipes that share precision, optimizer, strategy and
the place of the weights; `recipes.py` searches the recipes of each route. All recipes keep the effective batch size and
the typed overrides; only with may_change= may a recipe replace a typed precision or optimizer.

    Typed                    the typed overrides, and the groups that a recipe may change
    PrecisionAndOptimizer    a precision with an optimizer
    Route                    a PrecisionAndOptimizer with a strategy and a place for the weights (resident or streamed)

`climb.py` chooses the micro-batch size, the checkpointing and the loss of a route.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from operator import itemgetter

from hydra.errors import ConfigCompositionException

from lowmem.config.accumulation import divisors
from lowmem.config.cards import Card
from lowmem.config.declarations import CHANGEABLE, COMPUTED, PLACED, SHARED, choice, class_of, techniques
from lowmem.config.refusals import refused
from lowmem.config.settle import Run
from lowmem.config.typed_lines import CONF, as_mapping, chosen_by, is_group
from lowmem.plan.search.changes import Change, Tier, changes
from lowmem.system.errors import Refused
from lowmem.techniques.weights.streamed import HOLDS

RESIDENT = "weights.resident_blocks"  # key: number of blocks whose weights are not streamed
ORDER = "weights.order"  # key: order in which micro-batches pass through streamed blocks
DRIVE = "weights.drive"  # key: folder for masters and optimizer state of streamed weights
DRIVE_HOLDS = "weights.drive_holds"  # key: whether the folder also stores the 16-bit weights of the blocks

WINDOW = {"batch_size", "accumulation", "accumulation.batches"}  # keys of the overrides in `MicroBatches`

Compose = Callable[[Mapping[str, str]], Run]  # overrides -> the resolved run with these overrides
MicroBatches = tuple[int, Mapping[str, str]]  # batch_size, and overrides that keep the effective batch size


@dataclass(frozen=True)
class Typed:
    """The typed overrides, and the groups that a recipe may change.

    Args:
        run: the resolved run of the typed overrides.
        lines: the typed overrides.
        compose: composes the run in which the given overrides replace typed overrides with equal keys.
        may_change: the groups of CHANGEABLE that a recipe may change, whether they were typed or not; empty: no group.
            None: a recipe may change the groups of CHANGEABLE that were not typed.
        configs: a cache of composed runs.
    """

    run: Run
    lines: Sequence[str]
    compose: Compose
    may_change: Collection[str] | None = None
    configs: dict[tuple, Run] = field(default_factory=dict, repr=False)  # overrides -> run

    @cached_property
    def named(self) -> dict[str, str]:
        """Returns the technique of each group, whether typed or default."""
        return chosen_by(self.lines)

    @cached_property
    def values(self) -> dict[str, str]:
        """Returns the values of the typed overrides, by key."""
        return as_mapping(self.lines)

    def config(self, recipe: Mapping[str, str]) -> Run:
        """Returns the run of a recipe. Hydra takes 0.1 s to compose a run, so composed runs are cached. Fixed
        accumulation, and techniques that are independent (`stands_alone`), are inserted into a cached run without
        composing it again."""
        if recipe.get("accumulation") == "fixed" and recipe.keys() >= WINDOW:
            run = self.config({key: value for key, value in recipe.items() if key not in WINDOW})
            batches = choice("accumulation", "fixed") | {"batches": int(recipe["accumulation.batches"])}
            return run.knowing(batch_size=int(recipe["batch_size"])).replacing("accumulation", batches)
        within = {key.split(".")[0] for key in recipe if "." in key}
        groups = {
            group: recipe[group] for group in recipe if group not in within and stands_alone(group, recipe[group])
        }
        rest = {key: value for key, value in recipe.items() if key not in groups}
        run = self._composed(rest)
        for group, name in groups.items():
            run = run.replacing(group, self._composed({group: name}).as_dict()[group])
        return run

    def _composed(self, recipe: Mapping[str, str]) -> Run:
        try:
            return self._strictly(recipe)
        except ConfigCompositionException:  # for example: loss.rows was typed, and the recipe's loss lacks this key
            changed = {group for group, name in recipe.items() if self.named.get(group) != name}
            return self._strictly({**{key: None for key in self.values if key.split(".")[0] in changed}, **recipe})

    def _strictly(self, recipe: Mapping[str, str | None]) -> Run:
        key = tuple(sorted((k, v or "") for k, v in recipe.items() if self.named.get(k) != v))
        if key not in self.configs:
            self.configs[key] = self.compose(recipe)
        return self.configs[key]

    def takes(self, choice: Mapping[str, str]) -> bool:
        """Returns True if a run can be composed with the given techniques. It cannot if one of them lacks a typed key
        of its group, such as optim.betas. Args: choice: group -> technique."""
        try:
            return bool(self._strictly(choice))
        except ConfigCompositionException:
            return False

    def keeps(self, group: str) -> bool:
        """Returns True if all recipes must have the typed run's technique of a group. This holds for:

        - a group of CHANGEABLE, if `may_change` is given and does not name the group
        - a group of CHANGEABLE, if `may_change` is None and the group's technique was typed
        - any other group, if its technique or one of its keys, such as loss.rows, was typed
        """
        if group in CHANGEABLE and self.may_change is not None:
            return group not in self.may_change
        return group in self.values or (
            group not in CHANGEABLE and any(key.startswith(f"{group}.") for key in self.values)
        )

    def says(self, key: str, value: str) -> bool:
        """Returns True if the typed run already has this value for a key, so that a recipe does not need the
        override."""
        if key == "batch_size":
            return str(self.run.batch_size) == value
        return self.named.get(key, self.values.get(key)) == value


@dataclass(frozen=True)
class PrecisionAndOptimizer:
    """A precision with an optimizer. This package calls the pair a training. Args: chosen: group -> technique, for the
    groups precision and optim; changes: the differences from the typed training."""

    chosen: Mapping[str, str]
    changes: tuple[Change, ...]

    @property
    def tier(self) -> Tier:
        return max((change.tier for change in self.changes), default=Tier.AS_TYPED)


@dataclass(frozen=True)
class Route:
    """A precision and an optimizer with a strategy and a place for the weights. `climb.py` chooses from the route's
    `micro_batches`, `checkpointings` and `losses`.

    Args:
        training: precision and optimizer.
        option: the overrides of the route: key -> value.
        run: the run with the route's techniques, without some overrides of `option`, such as weights.order.
        micro_batches: pairs of batch_size and the overrides that keep the effective batch size, largest batch_size
            first.
        checkpointings, losses: techniques of the groups in `COMPUTED`, fastest first.
        sums: True if the run has host masters and each step has several micro-batches. The gradients of the
            micro-batches are then summed in fp32 in host memory.
    """

    training: PrecisionAndOptimizer
    option: Mapping[str, str]
    run: Run
    micro_batches: Sequence[MicroBatches]
    checkpointings: Sequence[str]
    losses: Sequence[str]
    sums: bool = False

    @property
    def on_card(self) -> tuple:
        """Returns a key for comparing device memory. The first of the routes with equal keys needs the least device
        memory: if it does not fit on the card, no later one fits. (Routes with several micro-batches come before routes
        with a single micro-batch, and weights.order=by_micro_batch comes before by_layer.) The key does not contain
        weights.order, nor overrides that do not change device memory: the drive, and the optimizer of host masters."""
        elsewhere = {DRIVE, DRIVE_HOLDS, ORDER}
        option = {key: value for key, value in self.option.items() if key not in elsewhere}
        if self.run.masters:
            option = {key: value for key, value in option.items() if key.split(".")[0] != "optim"}
        return "card", *option.items(), *self.checkpointings

    @property
    def on_host(self) -> tuple:
        """Returns a key for comparing host memory. Routes with equal keys need equal host memory, apart from offloaded
        block inputs. The key contains weights.order only if updates are early: then by_layer needs less host memory
        than by_micro_batch, because a block's gradients are freed before the gradients of the next block arrive."""
        option = {key: value for key, value in self.option.items() if key != ORDER or self.run.early}
        return "host", *option.items(), self.sums

    def on_drive(self, folder: str, holds: str) -> "Route":
        """Returns a copy of the route that uses a drive. Args: folder: value of weights.drive; holds: value of
        weights.drive_holds."""
        run = self.run.knowing(weights={"drive": folder, "drive_holds": holds})
        option = {**self.option, DRIVE: folder} | ({DRIVE_HOLDS: holds} if holds != HOLDS[0] else {})
        return replace(self, option=option, run=run)


def trainings(typed: Typed, card: Card | None = None) -> list[PrecisionAndOptimizer]:
    """Returns the pairs of precision and optimizer to try, without duplicates. Args: card: the card, which must have
    hardware for matrix products in the precision's dtype; None: every dtype is allowed."""
    by_choice = {}
    optimizers = [optim for optim in _choices(typed, "optim") if typed.takes({"optim": optim})]
    for precision in _precisions(typed, card):
        if not typed.takes({"precision": precision}):
            continue
        run = typed.config({"precision": precision})
        if card and not card.multiplies(run.multiplies_in):
            continue
        for optim in optimizers:
            optim = _where_it_steps(typed, run, optim)
            chosen = {"precision": precision, "optim": optim}
            by_choice[precision, optim] = PrecisionAndOptimizer(
                chosen, tuple(changes(typed.run, run, typed.named, chosen))
            )
    return list(by_choice.values())


def routes(typed: Typed, training: PrecisionAndOptimizer, names: Collection[str] = ("auto",)) -> Iterator[Route]:
    """Yields the routes of a precision with an optimizer, for each combination of a strategy and a place for the
    weights. See `micro_batches` for their micro-batch sizes.

    With host masters, one route has several micro-batches per step, and another route has a single micro-batch: several
    micro-batches need fp32 sums of gradients in host memory, and a single micro-batch needs more device memory. If
    weights are streamed and weights.order was not typed, there are two routes with several micro-batches, one for each
    order.

    Without host masters, a further route has optim.in_backward=true and a single micro-batch per step. This route is
    left out if no batch_size gives a single micro-batch, if optim.in_backward was typed, or if the run would be
    refused.

    Args:
        typed: the typed overrides.
        training: the precision and the optimizer.
        names: the strategies to try.
    """
    computed = [_fastest_first(typed, group) for group in COMPUTED]
    for strategy, weights in product(names, _choices(typed, PLACED)):
        chosen = {**training.chosen, SHARED: strategy, PLACED: weights}
        chosen["optim"] = _where_it_steps(typed, typed.config(chosen), chosen["optim"])
        run = typed.config(chosen)
        option = {**chosen, **_same_update(typed, run, chosen["optim"])}
        sizes = sorted(micro_batches(typed, run), key=itemgetter(0), reverse=True)
        whole = [size for size in sizes if _window(run, {**option, **size[1]}, size[0]) == 1]
        several = [] if run.in_backward else [size for size in sizes if size not in whole]
        if run.masters:
            both = run.streams and ORDER not in typed.values
            orders = ({ORDER: "by_micro_batch"}, {ORDER: "by_layer"}) if both else ({},)
            found = [Route(training, option | order, run, several, *computed, sums=True) for order in orders]
            found.append(Route(training, option, run, whole, *computed))
        else:
            found = [Route(training, option, run, [*whole, *several], *computed)]
        yield from (route for route in found if route.micro_batches)
        if whole and (in_backward := _in_backward(typed, run)):
            yield Route(training, {**option, "optim.in_backward": "true"}, in_backward, whole, *computed)


def _fastest_first(typed: Typed, group: str) -> list[str]:
    """Returns the techniques of a group that may be tried, fastest first. A technique that needs more activation memory
    is assumed to be faster. (In the yaml files, a value of `saves` is the share of memory that remains.)"""
    known = techniques(group)
    return sorted(_choices(typed, group), key=lambda name: -known[name].saves.get("activations", 1.0))


def strategies(typed: Typed) -> list[str]:
    """Returns the strategies to try. For one device, or if a strategy was typed, this is only the strategy of the typed
    run. In all other cases, returns every strategy that declares `tried` and can use this number of devices
    (`_makes_up`)."""
    if typed.run.devices == 1 or typed.keeps(SHARED):
        return [typed.named[SHARED]]
    return [name for name, technique in techniques(SHARED).items() if technique.tried and _makes_up(typed, name)]


def _makes_up(typed: Typed, strategy: str) -> bool:
    """Returns True if the number of devices is a multiple of the size of the strategy's groups."""
    with suppress(Refused):
        return bool(typed.config({SHARED: strategy}).data_ranks)
    return False


def _where_it_steps(typed: Typed, run: Run, optim: str) -> str:
    """Returns the optimizer to use. With host masters, this is the variant that the yaml of `optim` declares as
    `on_host`. It is `optim` itself without host masters, if the yaml declares no variant, or if the search must keep
    the optimizer (`Typed.keeps`)."""
    on_host = run.masters and not typed.keeps("optim") and techniques("optim")[optim].on_host
    return on_host or optim


def _precisions(typed: Typed, card: Card | None) -> list[str]:
    """Returns the precisions to try, the precision of the typed run first. Any other precision with a loss scale (fp16)
    is left out, unless the card has no bf16 matmuls. Args: card: None: bf16 matmuls are assumed."""
    first, *others = _choices(typed, "precision")
    with_bf16 = card is None or card.multiplies("bfloat16")
    return [first, *(name for name in others if not (with_bf16 and class_of("precision", name).scales_loss))]


def _choices(typed: Typed, group: str) -> list[str]:
    kept = typed.keeps(group) or (group == "loss" and typed.run.loss_class.of_pairs)
    tried = (name for name, technique in techniques(group).items() if technique.tried)
    return list(dict.fromkeys([typed.named[group], *(() if kept else tried)]))


def _window(run: Run, option: Mapping[str, str], batch_size: int) -> int:
    """Returns the number of micro-batches in the largest window of a run with these overrides and this batch_size."""
    if "accumulation.batches" in option:
        return int(option["accumulation.batches"])
    if "size" in run.accumulation.arguments:
        return run.accumulation.size // (batch_size * _reading(run))
    return run.windows.largest


def _reading(run: Run) -> int:
    """Returns the number of devices over which the sequences of accumulation.size are divided."""
    devices = run.accumulation.devices
    return run.data_ranks if devices == 1 else devices


def micro_batches(typed: Typed, run: Run) -> Iterator[MicroBatches]:
    """Yields pairs of a batch_size and the overrides that keep the typed run's effective batch size.

    If batch_size was typed as a number, if an accumulation without `size` was typed, or if the number of micro-batches
    changes during the run, yields only the typed batch_size. If the strategy then divides the data among fewer ranks
    than the typed run, more micro-batches keep the effective batch size. Yields nothing if this is impossible.

    Args:
        typed: the typed overrides.
        run: a run with the strategy to try, which may differ from the typed strategy.
    """
    size = typed.run.accumulation.arguments.get("size")
    windows = {} if size is not None else typed.run.windows.sizes
    is_typed = any(key.split(".")[0] == "accumulation" for key in typed.values)
    keeps_size = "batch_size" in typed.values and typed.run.batch_size != "auto"
    if keeps_size or (is_typed and size is None) or len(windows) > 1:
        if size is not None or run.data_ranks == typed.run.data_ranks:
            yield typed.run.batch_size, {}
        elif len(windows) == 1 and typed.run.data_ranks % run.data_ranks == 0:
            yield typed.run.batch_size, _fixed(windows[0] * typed.run.data_ranks // run.data_ranks)
        return
    if size is not None:
        for batch_size in divisors(size // _reading(run)):
            if typed.run.batch_size == "auto" or batch_size <= typed.run.batch_size:
                yield batch_size, {}
        return
    # The number of sequences per optimizer step, summed over all ranks, is the same as in the typed run. `sequences` is
    # the number that each rank (or group of ranks with the same data) reads.
    sequences = typed.run.batch_size * windows[0] * typed.run.data_ranks // run.data_ranks
    for batch_size in divisors(sequences):
        batches = sequences // batch_size
        if batch_size <= typed.run.batch_size:
            yield batch_size, _fixed(batches) if batches > 1 else {}


def _fixed(batches: int) -> dict[str, str]:
    return {"accumulation": "fixed", "accumulation.batches": str(batches)}


def _same_update(typed: Typed, run: Run, name: str) -> dict[str, str]:
    """Returns the overrides with which the optimizer `name` has the optimizer arguments of the typed run. Arguments
    that already have equal values are left out. Returns no overrides if the two optimizers compute different updates.
    (AdamW with 32-bit state and AdamW with 8-bit state compute the same update.)"""
    typed_name, optimizers = typed.named["optim"], techniques("optim")
    if name == typed_name or (optimizers[typed_name].update_of or typed_name) != (optimizers[name].update_of or name):
        return {}
    return {
        f"optim.{argument}": str(value)
        for argument, value in typed.run.optim.arguments.items()
        if run.optim.arguments.get(argument, value) != value
    }


def _in_backward(typed: Typed, run: Run) -> Run | None:
    """Returns the run with optim.in_backward=true. None: the key was typed, or the run would be refused."""
    if "optim.in_backward" in typed.values:
        return None
    in_backward = run.knowing(optim={"in_backward": True})
    return None if any(refused(in_backward)) else in_backward


@cache
def stands_alone(group: str, name: str) -> bool:
    """Returns True if the yaml of a technique is independent: it neither reads nor sets other parts of the config, and
    no yaml in conf/ reads the group of the technique."""
    if not is_group(group):
        return False
    text = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    reads = any(f"${{{group}." in yaml.read_text(encoding="utf-8") for yaml in CONF.rglob("*.yaml"))
    return not reads and "${" not in text and "@package" not in text and "defaults:" not in text
