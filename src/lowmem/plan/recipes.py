"""Which recipes there are, which of them fit, and which is the cheapest: the planner."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from threading import Thread

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from lowmem.accumulation import divisors
from lowmem.errors import Refused
from lowmem.gpus import Card
from lowmem.memory import process
from lowmem.model import architecture_of
from lowmem.overrides import CONF, as_mapping
from lowmem.plan.derive import Compose, Derivation, Needed
from lowmem.plan.helper import Helper
from lowmem.plan.machine import machine
from lowmem.plan.prediction import Prediction, needs, outline, predict
from lowmem.plan.trace import untraceable
from lowmem.refusals import refused
from lowmem.settings import Settings
from lowmem.techniques import techniques

TRIED = ("precision", "optim", "gradient_checkpointing", "loss")  # groups of which the planner chooses
SAME = 1.03  # recipes whose counted times differ by less than this factor are equally fast
WAIT = 2  # seconds; who waits longer is told
NO_BF16 = (
    "This precision multiplies in bf16, and the card has no units for it: torch emulates them, at half the pace of "
    "fp32. Type precision=16, 16-master or 32."
)
CONFIRMED = 2  # of the fastest derived recipes are traced themselves, until one fits


@dataclass(frozen=True)
class Recipe:
    """overrides: beside what was typed; seconds: of an optimizer step, estimated."""

    overrides: tuple[str, ...]
    prediction: Prediction
    seconds: float
    traced: bool = False  # itself, not derived

    def fits(self, gpu: int | None, ram: int | None) -> bool:
        return self.prediction.fits(gpu, ram)


@dataclass(frozen=True)
class Plan:
    """recipes: that fit, fastest first; then the others, smallest first."""

    recipes: list[Recipe]
    card: Card | None
    ram: int | None
    traces: int

    @property
    def gpu(self) -> int | None:
        return self.card and self.card.size

    @property
    def chosen(self) -> Recipe | None:
        return self.recipes[0] if self.recipes[0].fits(self.gpu, self.ram) else None


def search(
    cfg: DictConfig,
    typed: Sequence[str],
    compose: Compose,
    card: Card | None,
    ram: int | None,
    on_card: bool,
    devices: int = 1,
    helper: Helper | None = None,
) -> Plan:
    """Args: cfg: as typed, resolved; typed: the overrides, which no recipe touches; compose: overrides -> config; card:
    None: of a CPU only the host limits; helper: traces a part.

    Raises:
        Refused: a model that is not a stack of equal blocks: only single runs can be predicted.
    """
    libraries = process.rss_bytes()
    gpu, beside = (card.size, card.beside) if card else (None, 0)
    configs: dict[tuple, DictConfig] = {}

    def config_of(recipe: Mapping[str, str]) -> DictConfig:  # composed once: it takes a tenth of a second
        key = tuple(sorted(recipe.items()))
        configs[key] = configs.get(key) or compose(recipe)
        return configs[key]

    options = list(candidates(cfg, typed, card))
    depth = model_depth(cfg)
    sizes = [int(option["batch_size"]) for option in options]
    rates = machine(on_card, card, Settings(cfg).multiplies_in)
    derivation = Derivation(config_of, depth, (min(sizes), max(sizes)), on_card, rates)
    options = list(workable(options, typed, config_of, devices, card))
    if not options and card is not None and not card.has_bf16:
        raise Refused(NO_BF16)
    _trace_all(cfg, derivation, [need for option in options for need in derivation.needed(*option)], helper)
    derived = []
    for option, recipe_cfg in options:
        shapes, seconds = derivation.trace(option, recipe_cfg)
        overrides = tuple(f"{key}={value}" for key, value in option.items() if not _is_default(cfg, key, value, typed))
        need = needs(shapes, recipe_cfg, on_card, libraries, devices, beside)
        derived.append(Recipe(overrides, replace(need, estimate=derivation.estimate(option, recipe_cfg)), seconds))
    ranked = sorted((r for r in derived if r.fits(gpu, ram)), key=_cost)
    for number, recipe in enumerate(ranked[:CONFIRMED]):  # what was derived is traced before it is recommended
        exact = predict(compose(as_mapping(recipe.overrides)), on_card, devices, beside)
        ranked[number] = Recipe(recipe.overrides, exact, recipe.seconds, traced=True)
        if exact.fits(gpu, ram):
            break
    fitting = [r for r in ranked if r.fits(gpu, ram)]
    others = [r for r in (*derived, *ranked) if not r.fits(gpu, ram)]
    others.sort(key=lambda r: r.prediction.device_need)
    return Plan(fitting + others, card, ram, derivation.traces)


def workable(
    options: Iterable[dict[str, str]],
    typed: Sequence[str],
    config_of: Compose,
    devices: int,
    card: Card | None = None,
) -> Iterator[tuple[dict[str, str], DictConfig]]:
    """(candidate, config of its precision and optimizer) of those that are not refused."""
    for option in options:
        recipe_cfg = config_of({key: option[key] for key in ("precision", "optim")})
        run = Settings(recipe_cfg)
        if run.masters and run.optim.on_host and "optim" not in as_mapping(typed):
            option = {**option, "optim": run.optim.on_host}
            recipe_cfg = config_of({key: option[key] for key in ("precision", "optim")})
        if emulates(card, recipe_cfg) or (devices > 1 and run.masters):  # masters are of a whole model
            continue
        if not any(refused(recipe_cfg)):
            yield option, recipe_cfg


def emulates(card: Card | None, cfg: DictConfig) -> bool:
    """Whether the card has no products of this config's kind."""
    return card is not None and not card.has_bf16 and Settings(cfg).multiplies_in == "bfloat16"


def _trace_all(cfg: DictConfig, derivation: Derivation, needed: Sequence[Needed], helper: Helper | None = None) -> None:
    """The part of a search that takes long: how long is said after the first trace.

    Raises:
        Refused: a model that cannot be traced.
    """
    todo = deque({str(need): need for need in needed}.values())
    tqdm.write(f"Tracing {len(todo)} ways to compute by shape ...", file=sys.stderr)
    with tqdm(total=len(todo), desc="tracing", unit="way", delay=WAIT, disable=None, leave=False) as bar:
        with _helped(derivation, todo, helper, bar.update):
            _trace(cfg, derivation, todo, 2 if helper else 1, bar.update)
        _trace(cfg, derivation, todo, 1, bar.update)  # what the helper was not able to


def _trace(
    cfg: DictConfig, derivation: Derivation, todo: deque[Needed], processes: int, done: Callable[[], object]
) -> None:
    said = False
    while need := _taken(todo.popleft):
        start = time.perf_counter()
        try:
            derivation.traced(*need)
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                f"model.name={cfg.model.name}: recipes are derived from traces, and {untraceable(error)} Type "
                "search=false to plan.py for an estimate of one run."
            ) from None
        done()
        if not said and (seconds := (time.perf_counter() - start) * len(todo) / processes) > WAIT:
            tqdm.write(f"... which takes about {seconds:.0f} s.", file=sys.stderr)
        said = True


@contextmanager
def _helped(
    derivation: Derivation, todo: deque[Needed], helper: Helper | None, done: Callable[[], object]
) -> Iterator[None]:
    """The helper takes what is to do from the end, and gives back what it cannot trace."""
    if helper is None:
        yield
        return
    for need in todo:
        derivation.corners(*need)  # composed here: Hydra is for one thread

    def take() -> None:
        while need := _taken(todo.pop):
            corners = derivation.corners(*need)
            jobs = [(OmegaConf.to_container(cfg), derivation.on_card, depth) for depth, _, cfg in corners]
            if (traces := helper.traces(jobs)) is None:
                todo.append(need)
                return
            derivation.take(*need, traces)
            done()

    thread = Thread(target=take, daemon=True)
    thread.start()
    yield
    thread.join()


def _taken(take: Callable[[], Needed]) -> Needed | None:
    """None: nothing is left."""
    try:
        return take()
    except IndexError:
        return None


def _cost(recipe: Recipe) -> tuple[int, int]:
    """Seconds, in steps of SAME: among equally fast recipes the one that needs less of the card."""
    return round(math.log(recipe.seconds) / math.log(SAME)), recipe.prediction.device_need


def candidates(cfg: DictConfig, typed: Sequence[str], card: Card | None = None) -> Iterator[dict[str, str]]:
    """Overrides that leave the sequences of an optimizer step as they are, and what was typed untouched."""
    fixed = as_mapping(typed)
    has_bf16 = card is None or card.has_bf16
    groups = [(fixed[group],) if group in fixed else _tried(group, has_bf16) for group in TRIED]
    for choices in product(*groups):
        recipe = dict(zip(TRIED, choices, strict=True))
        for batch_size, accumulation in micro_batches(cfg, fixed):
            yield {**recipe, "batch_size": str(batch_size), **accumulation}


def _tried(group: str, has_bf16: bool) -> list[str]:
    found = techniques(group).items()
    return [name for name, one in found if one.tried or (one.tried_without_bf16 and not has_bf16)]


def micro_batches(cfg: DictConfig, fixed: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(batch_size, overrides that keep the update's size)."""
    typed = {key for key in fixed if key.split(".")[0] == "accumulation"}
    size = cfg.accumulation.get("size")
    if ("batch_size" in fixed and cfg.batch_size != "auto") or (typed and size is None):
        yield cfg.batch_size, {}
        return
    if size is not None:
        for batch_size in divisors(size // cfg.accumulation.devices):
            if cfg.batch_size == "auto" or batch_size <= cfg.batch_size:
                yield batch_size, {}
        return
    for batch_size in divisors(cfg.batch_size):
        batches = cfg.batch_size // batch_size
        accumulation = {"accumulation": "fixed", "accumulation.batches": str(batches)}
        yield batch_size, accumulation if batches > 1 else {}


def model_depth(cfg: DictConfig) -> int:
    config = architecture_of(cfg)
    kinds = getattr(config, "layer_types", None)
    if not getattr(config, "num_hidden_layers", None) or (kinds and len(set(kinds)) > 1):
        raise Refused(
            f"model.name={cfg.model.name}: recipes are derived from a stack of equal blocks, and this model is not "
            "one. Type search=false to predict one run at a time."
        )
    return config.num_hidden_layers


def largest_model(plan: Plan, parameters: int, compose: Compose, on_card: bool) -> str | None:
    """Of conf/model, below `parameters`: the largest with which the smallest recipe of a plan fits."""
    recipe = as_mapping(plan.recipes[0].overrides)
    sizes = {}
    for yaml in (CONF / "model").glob("*.yaml"):
        cfg = None if yaml.stem == "hf" else compose({"model": yaml.stem})
        if cfg is not None:
            sizes[yaml.stem] = outline(cfg).parameters
    for name in sorted((name for name in sizes if sizes[name] < parameters), key=sizes.get, reverse=True):
        beside = plan.card.beside if plan.card else 0
        if predict(compose({**recipe, "model": name}), on_card, beside=beside).fits(plan.gpu, plan.ram):
            return name
    return None


def _is_default(cfg: DictConfig, key: str, value: str, typed: Sequence[str]) -> bool:
    """Whether a recipe need not say it: it was typed."""
    return key in as_mapping(typed) or (key == "batch_size" and str(cfg.batch_size) == value)
