"""From a dozen small traces to every recipe of a table, exactly where every block adds the same.

What a run holds at one place of a pass (before the first block, inside the last one, at the loss, ...) is linear in the
number of blocks and in the sequences of a micro-batch. So each way to compute (dtype, checkpointing, loss) is traced
with 3 and with 4 blocks, and at the smallest and the largest micro-batch; the rest of the recipe is a sum: weights,
gradients (kept, summed over a window, or gone to the host), the optimizer's state. Its own bytes and those of its step
come from traces of the parameters alone, for each precision and optimizer. Whether every block does add the same is
looked at with a third number of blocks, once for each checkpointing; where not, the derivation is an estimate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from lowmem.memory.tracker import Point
from lowmem.plan.machine import Machine
from lowmem.plan.recorder import Place
from lowmem.plan.trace import Trace, trace
from lowmem.settings import Settings
from lowmem.units import CATEGORIES

DEPTHS = (3, 4)  # the fewest with a first, a last and something between
THIRD = 7  # a number of blocks that is neither a square nor even: segments of several blocks do not divide it
BENT = 0.01  # of the highest place: a line through DEPTHS that is further off at THIRD is no line
SHORT = 8  # tokens of a trace of the parameters alone

Compose = Callable[[Mapping[str, str]], DictConfig]  # overrides -> the resolved config
Needed = tuple[Mapping[str, str], tuple[int, int]]  # overrides, smallest and largest micro-batch


@dataclass
class Derivation:
    """Args: compose: a recipe's config; depth: blocks of the model; batches: smallest and largest micro-batch."""

    compose: Compose
    depth: int
    batches: tuple[int, int]
    on_card: bool
    machine: Machine
    traces: int = 0  # that were needed

    def __post_init__(self) -> None:
        self._corners: dict[tuple, list[tuple[int, int, Trace]]] = {}
        self._off: dict[str, float] = {}  # by checkpointing

    def trace(self, recipe: Mapping[str, str], cfg: DictConfig) -> tuple[Trace, float]:
        """Args: recipe: override -> value, the groups and batch_size among them; cfg: of its precision and optim.

        Returns:
            What `trace` would, but for the allocator's events; seconds of an optimizer step.
        """
        micro_batches, batch = windows(cfg, recipe), int(recipe["batch_size"])
        way, owns = self.needed(recipe, cfg)
        passes = Corners(self.traced(*way), self.depth, batch)
        own = Corners(self.traced(*owns), self.depth, 1)
        found = Trace(
            parameters=own.bytes(lambda t: t.parameters),
            largest=own.any.largest,
            weights=own.bytes(_held("evaluation", "weights")),
            gradients=own.bytes(lambda t: t.gradients),
            steps_on_host=own.any.steps_on_host,
            unseen=own.any.unseen,
            generated=own.any.generated,
            blocks=(self.depth, own.any.blocks[1]),
            pinned=_pinned(passes),
        )
        gone = Settings(cfg).masters or Settings(cfg).in_backward
        found.phases |= {
            "forward": _pass("forward", passes, own, found, gone, micro_batches),
            "backward": _pass("backward", passes, own, found, gone, micro_batches),
            "step": _step(passes, own),
            "evaluation": _evaluation(passes, own, found),
        }
        pass_seconds = passes.at(lambda t: self.machine.seconds(t.work, ("forward", "backward")))
        return found, self.machine.window(cfg, found, pass_seconds, micro_batches)

    def needed(self, recipe: Mapping[str, str], cfg: DictConfig) -> tuple[Needed, Needed]:
        """What must be traced for a recipe: its passes, whatever is stepped, and its parameters alone."""
        way = {key: recipe[key] for key in ("gradient_checkpointing", "loss")} | {"optim": "sgd", "clip": "null"}
        way["precision"] = Settings(cfg).precision.computes_as or recipe["precision"]
        owns = {key: recipe[key] for key in ("precision", "optim")} | {"loss": "full", "seq_len": str(SHORT)}
        if Settings(cfg).masters and windows(cfg, recipe) > 1:  # which are summed
            owns["accumulation"] = "fixed"
        return (way, self.batches), (owns, (1, 1))

    def estimate(self, recipe: Mapping[str, str], cfg: DictConfig) -> str | None:
        """Why what is derived for a recipe is an estimate; None: it is exact. Args: those of `trace`."""
        checkpointing = recipe["gradient_checkpointing"]
        if checkpointing not in self._off:
            self._off[checkpointing] = self._off_at_third(*self.needed(recipe, cfg)[0])
        if self._off[checkpointing] <= BENT:
            return None
        return (
            f"with gradient_checkpointing={checkpointing} not every block adds the same; derived from {DEPTHS} blocks, "
            f"{THIRD} are {self._off[checkpointing]:.0%} off. Type search=false for this run alone, traced."
        )

    def _off_at_third(self, way: Mapping[str, str], batches: tuple[int, int]) -> float:
        if self.depth <= max(DEPTHS):
            return 0.0
        small = min(batches)
        at = {depth: found for depth, batch, found in self.traced(way, batches) if batch == small}
        third = trace(OmegaConf.merge(self.compose(way), {"batch_size": small}), self.on_card, THIRD)
        self.traces += 1
        off = [
            abs(_line({depth: _of(place, "kept")(found) for depth, found in at.items()}, THIRD) - held.kept)
            for place, held in third.places.items()
        ]
        return max(off) / max(held.kept for held in third.places.values())

    def traced(self, recipe: Mapping[str, str], batches: tuple[int, int]) -> list[tuple[int, int, Trace]]:
        """(depth, batch, trace) of overrides, at each depth and at some micro-batches from the first to the last."""
        key = (*sorted(recipe.items()), *batches)
        if key not in self._corners:
            cfg = self.compose(recipe)
            # up to here a micro-batch is one chunk of the loss, and from here on several of the same size
            knee = -(-cfg.loss.get("rows", 1) // cfg.seq_len)
            self._corners[key] = [
                (depth, batch, trace(OmegaConf.merge(cfg, {"batch_size": batch}), self.on_card, depth))
                for depth in DEPTHS
                for batch in sorted({*batches, min(max(knee, batches[0]), batches[1])})
            ]
            self.traces += len(self._corners[key])
        return self._corners[key]


def windows(cfg: DictConfig, recipe: Mapping[str, str]) -> int:
    """Micro-batches of the recipe's accumulation window."""
    if "accumulation.batches" in recipe:
        return int(recipe["accumulation.batches"])
    if "size" in cfg.accumulation:
        return cfg.accumulation.size // (int(recipe["batch_size"]) * cfg.accumulation.devices)
    return Settings(cfg).windows.largest


@dataclass(frozen=True)
class Corners:
    """Traces at two depths and one or more batches, and the depth and batch that is asked for."""

    traces: list[tuple[int, int, Trace]]
    depth: int
    batch: int

    @property
    def any(self) -> Trace:
        return self.traces[0][2]

    def at(self, value: Callable[[Trace], float]) -> float:
        return bilinear([(depth, batch, value(found)) for depth, batch, found in self.traces], self.depth, self.batch)

    def bytes(self, value: Callable[[Trace], int]) -> int:
        return round(self.at(value))


def _held(phase: str, category: str) -> Callable[[Trace], int]:
    return lambda t: t.phases[phase].bytes[category]


def _host(phase: str) -> Callable[[Trace], int]:
    return lambda t: t.phases[phase].host


def _of(place: str, part: str) -> Callable[[Trace], int]:
    return lambda t: getattr(t.places.get(place, Place()), part)


def _pass(phase: str, passes: Corners, own: Corners, found: Trace, gone: bool, micro_batches: int) -> Point:
    """The highest place of forward or backward. Args: gone: gradients leave as they are made."""
    places = [place for place in passes.any.places if place.startswith(phase)]
    tops = [Place(*(passes.bytes(_of(place, part)) for part in Place._fields)) for place in places]
    if gone or micro_batches > 1:
        top = max(tops, key=lambda place: place.gone)
        gradients = 0 if gone else found.gradients
    else:
        top = max(tops, key=lambda place: place.kept)
        gradients = top.kept - top.gone
    host = own.bytes(_host(phase)) + passes.bytes(_host(phase))  # the optimizer's side, and offloaded boundaries
    return _point(phase, found.weights, gradients, own.bytes(_held("evaluation", "optimizer")), top.gone, host)


def _step(passes: Corners, own: Corners) -> Point:
    """Traced as it is: an update that uses its gradients up one by one is highest where few are left."""
    held = {category: own.bytes(_held("step", category)) for category in CATEGORIES}
    held["activations"] = passes.bytes(_held("step", "activations"))  # the micro-batch itself
    return Point("step", held, own.bytes(_host("step")))


def _evaluation(passes: Corners, own: Corners, found: Trace) -> Point:
    state, activations = own.bytes(_held("evaluation", "optimizer")), passes.bytes(_held("evaluation", "activations"))
    return _point("evaluation", found.weights, 0, state, activations, own.bytes(_host("evaluation")))


def bilinear(corners: list[tuple[int, int, float]], depth: int, batch: int) -> float:
    """Args: corners: (depth, batch, value) at two depths and one or more batches, from the smallest to the largest."""
    by_batch: dict[int, dict[int, float]] = {}
    for d, b, value in corners:
        by_batch.setdefault(b, {})[d] = value
    here = {b: _line(at, depth) for b, at in by_batch.items()}
    below, above = max(b for b in here if b <= batch), min(b for b in here if b >= batch)
    return here[below] if below == above else _line({below: here[below], above: here[above]}, batch)


def _line(points: Mapping[int, float], x: int) -> float:
    (x0, y0), (x1, y1) = sorted(points.items())
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _point(phase: str, weights: int, gradients: int, state: int, rest: int, host: int) -> Point:
    held = {"weights": weights, "gradients": gradients, "optimizer": state, "activations": rest}
    return Point(phase, dict.fromkeys(CATEGORIES, 0) | held, host)


def _pinned(passes: Corners) -> list[int]:
    """Offloaded boundaries: as many as blocks, each as large as its micro-batch."""
    _, batch, found = passes.traces[0]
    return [found.pinned[0] * passes.batch // batch] * passes.depth if found.pinned else []
