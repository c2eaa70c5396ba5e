"""Lists the recipes that a plan compares: all keep the sequences per optimizer step, and what was typed."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from operator import itemgetter

from hydra.errors import ConfigCompositionException

from lowmem.config.accumulation import divisors
from lowmem.config.cards import Card
from lowmem.config.declarations import CHANGEABLE, COMPUTED, PLACED, SHARED, choice, techniques
from lowmem.config.refusals import refused
from lowmem.config.settle import Run
from lowmem.config.typed_lines import CONF, as_mapping, chosen_by, is_group
from lowmem.plan.search.changes import Change, Tier, changes
from lowmem.system.errors import Refused
from lowmem.techniques.weights.streamed import HOLDS

RESIDENT = "weights.resident_blocks"  # override: blocks that stay on the device while the others stream
ORDER = "weights.order"  # override: in which order micro-batches pass through blocks whose weights stream
DRIVE = "weights.drive"  # override: a folder for masters and optimizer state of blocks whose weights stream
DRIVE_HOLDS = "weights.drive_holds"  # override: what is there

WINDOW = {"batch_size", "accumulation", "accumulation.batches"}  # overrides: the micro-batches of a step

Compose = Callable[[Mapping[str, str]], Run]  # overrides -> the run, resolved
MicroBatches = tuple[int, Mapping[str, str]]  # batch_size, and overrides that keep the sequences of an optimizer step


@dataclass(frozen=True)
class Typed:
    """Holds the overrides that were typed, and which of them a recipe may change.

    Args:
        run: the resolved run of these lines.
        compose: returns the run in which overrides replace the lines with the same key.
        may_change: groups of CHANGEABLE that a recipe may change, typed or not; None: those that were not typed.
    """

    run: Run
    lines: Sequence[str]
    compose: Compose
    may_change: Collection[str] | None = None
    configs: dict[tuple, Run] = field(default_factory=dict, repr=False)  # composed so far

    @cached_property
    def named(self) -> dict[str, str]:
        """Returns group -> its technique."""
        return chosen_by(self.lines)

    @cached_property
    def values(self) -> dict[str, str]:
        """Returns key -> value."""
        return as_mapping(self.lines)

    def config(self, recipe: Mapping[str, str]) -> Run:
        """Composes the run of a recipe, once: it takes a tenth of a second. Groups that stand alone are composed
        separately and then inserted, and so is a window of a fixed number of micro-batches."""
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
        except ConfigCompositionException:  # loss.rows was typed, and this loss has none
            changed = {group for group, name in recipe.items() if self.named.get(group) != name}
            return self._strictly({**{key: None for key in self.values if key.split(".")[0] in changed}, **recipe})

    def _strictly(self, recipe: Mapping[str, str | None]) -> Run:
        key = tuple(sorted((k, v or "") for k, v in recipe.items() if self.named.get(k) != v))
        if key not in self.configs:
            self.configs[key] = self.compose(recipe)
        return self.configs[key]

    def takes(self, choice: Mapping[str, str]) -> bool:
        """Returns whether these techniques have all keys that were typed, such as optim.betas."""
        try:
            return bool(self._strictly(choice))
        except ConfigCompositionException:
            return False

    def keeps(self, group: str) -> bool:
        if group in CHANGEABLE and self.may_change is not None:
            return group not in self.may_change
        return group in self.values or (
            group not in CHANGEABLE and any(key.startswith(f"{group}.") for key in self.values)
        )

    def says(self, key: str, value: str) -> bool:
        """Returns whether the typed lines already give this value, so a recipe need not name it."""
        if key == "batch_size":
            return str(self.run.batch_size) == value
        return self.named.get(key, self.values.get(key)) == value


@dataclass(frozen=True)
class Training:
    """Pairs a precision with an optimizer. Args: chosen: group of CHANGEABLE -> its technique."""

    chosen: Mapping[str, str]
    changes: tuple[Change, ...]

    @property
    def tier(self) -> Tier:
        return max((change.tier for change in self.changes), default=Tier.AS_TYPED)


@dataclass(frozen=True)
class Route:
    """Holds a training and where its tensors are, with the choices that are still open.

    Args:
        option: override -> value.
        run: the run with this option.
        micro_batches: (batch_size, overrides that keep the sequences of an optimizer step), largest first.
        checkpointings, losses: the choices of `COMPUTED`, fastest first.
        sums: whether a step has several micro-batches, whose gradients are summed in fp32 if the host has them.
    """

    training: Training
    option: Mapping[str, str]
    run: Run
    micro_batches: Sequence[MicroBatches]
    checkpointings: Sequence[str]
    losses: Sequence[str]
    sums: bool = False

    @property
    def on_card(self) -> tuple:
        """Returns what routes share that need as much of the card as the first of them, or more: with masters neither
        the optimizer nor a drive is seen there, and micro-batches one after the other need least."""
        elsewhere = {DRIVE, DRIVE_HOLDS, ORDER}
        option = {key: value for key, value in self.option.items() if key not in elsewhere}
        if self.run.masters:
            option = {key: value for key, value in option.items() if key.split(".")[0] != "optim"}
        return "card", *option.items(), *self.checkpointings

    @property
    def on_host(self) -> tuple:
        """Returns what routes share that need as much of the host, besides inputs of blocks. Their order is seen only
        where masters step early: by layer a block's gradients are gone before the next block's come."""
        option = {key: value for key, value in self.option.items() if key != ORDER or self.run.early}
        return "host", *option.items(), self.sums

    def on_drive(self, folder: str, holds: str) -> "Route":
        """Returns the same with a drive. Args: folder: on it; holds: what it holds, see conf/weights."""
        run = self.run.knowing(weights={"drive": folder, "drive_holds": holds})
        option = {**self.option, DRIVE: folder} | ({DRIVE_HOLDS: holds} if holds != HOLDS[0] else {})
        return replace(self, option=option, run=run)


def trainings(typed: Typed, card: Card | None = None) -> list[Training]:
    """Returns the trainings that may be chosen, each once."""
    by_choice = {}
    optimizers = [optim for optim in _choices(typed, "optim") if typed.takes({"optim": optim})]
    for precision in _choices(typed, "precision", card):
        if not typed.takes({"precision": precision}):
            continue
        run = typed.config({"precision": precision})
        if card and not card.multiplies(run.multiplies_in):
            continue
        for optim in optimizers:
            optim = _where_it_steps(typed, run, optim)
            chosen = {"precision": precision, "optim": optim}
            by_choice[precision, optim] = Training(chosen, tuple(changes(typed.run, run, typed.named, chosen)))
    return list(by_choice.values())


def routes(typed: Typed, training: Training, names: Collection[str] = ("auto",)) -> Iterator[Route]:
    """Yields the places of a training's tensors, with all micro-batches that keep the sequences of an optimizer step.

    Gradients in host memory are summed in fp32, but gradients of a single micro-batch are not. So with masters it is a
    separate route, which needs less host memory than smaller micro-batches, and comes after them: they need less of the
    card. Weights stream in both orders. Steps in backward take a single micro-batch.

    Args: names: of strategies.
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
    """Returns the choices of a group, from the one that saves least to the one that saves most."""
    known = techniques(group)
    return sorted(_choices(typed, group), key=lambda name: -known[name].saves.get("activations", 1.0))


def strategies(typed: Typed) -> list[str]:
    """Returns the strategies to try for several devices: the typed one, or else all that declare `tried`."""
    if typed.run.devices == 1 or typed.keeps(SHARED):
        return [typed.named[SHARED]]
    return [name for name, technique in techniques(SHARED).items() if technique.tried and _makes_up(typed, name)]


def _makes_up(typed: Typed, strategy: str) -> bool:
    """Returns whether the run's number of devices fills the strategy's groups."""
    with suppress(Refused):
        return bool(typed.config({SHARED: strategy}).data_ranks)
    return False


def _where_it_steps(typed: Typed, run: Run, optim: str) -> str:
    """Returns the optimizer for the place of the step: masters on the host take the one that is made for them."""
    on_host = run.masters and not typed.keeps("optim") and techniques("optim")[optim].on_host
    return on_host or optim


def _choices(typed: Typed, group: str, card: Card | None = None) -> list[str]:
    kept = typed.keeps(group) or (group == "loss" and typed.run.loss_class.of_pairs)
    return list(dict.fromkeys([typed.named[group], *(() if kept else _tried(group, card))]))


def _tried(group: str, card: Card | None) -> list[str]:
    without_bf16 = card is not None and not card.multiplies("bfloat16")
    known = techniques(group).items()
    return [name for name, technique in known if technique.tried or (technique.tried_without_bf16 and without_bf16)]


def _window(run: Run, option: Mapping[str, str], batch_size: int) -> int:
    """Returns the number of micro-batches of an optimizer step."""
    if "accumulation.batches" in option:
        return int(option["accumulation.batches"])
    if "size" in run.accumulation.arguments:
        return run.accumulation.size // (batch_size * _reading(run))
    return run.windows.largest


def _reading(run: Run) -> int:
    """Returns how many devices share the sequences of accumulation.size."""
    devices = run.accumulation.devices
    return run.data_ranks if devices == 1 else devices


def micro_batches(typed: Typed, run: Run) -> Iterator[MicroBatches]:
    """Yields (batch_size, overrides that keep the update's size). Args: run: with a strategy, which may differ from the
    strategy that the update's size was typed for."""
    size = typed.run.accumulation.arguments.get("size")
    is_typed = any(key.split(".")[0] == "accumulation" for key in typed.values)
    if ("batch_size" in typed.values and typed.run.batch_size != "auto") or (is_typed and size is None):
        yield typed.run.batch_size, {}
        return
    if size is not None:
        for batch_size in divisors(size // _reading(run)):
            if typed.run.batch_size == "auto" or batch_size <= typed.run.batch_size:
                yield batch_size, {}
        return
    # The total stays the same; each rank that reads its own data gets an equal share.
    sequences = typed.run.batch_size * typed.run.data_ranks // run.data_ranks
    for batch_size in divisors(sequences):
        batches = sequences // batch_size
        accumulation = {"accumulation": "fixed", "accumulation.batches": str(batches)}
        if batch_size <= typed.run.batch_size:
            yield batch_size, accumulation if batches > 1 else {}


def _same_update(typed: Typed, run: Run, name: str) -> dict[str, str]:
    """Returns the typed optimizer's arguments if `name` makes the same update with other state: its defaults may
    differ."""
    typed_name, optimizers = typed.named["optim"], techniques("optim")
    if name == typed_name or (optimizers[typed_name].update_of or typed_name) != (optimizers[name].update_of or name):
        return {}
    return {
        f"optim.{argument}": str(value)
        for argument, value in typed.run.optim.arguments.items()
        if run.optim.arguments.get(argument, value) != value
    }


def _in_backward(typed: Typed, run: Run) -> Run | None:
    """Returns the run in which each gradient steps its parameter at once; None: it was typed, or is refused."""
    if "optim.in_backward" in typed.values:
        return None
    in_backward = run.knowing(optim={"in_backward": True})
    return None if any(refused(in_backward)) else in_backward


@cache
def stands_alone(group: str, name: str) -> bool:
    """Returns whether a group's yaml reads no other node of a config, sets none, and no yaml reads it."""
    if not is_group(group):
        return False
    text = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    reads = any(f"${{{group}." in yaml.read_text(encoding="utf-8") for yaml in CONF.rglob("*.yaml"))
    return not reads and "${" not in text and "@package" not in text and "defaults:" not in text
