"""Derives every recipe of a table from a dozen small traces; the result is exact if every block adds the same.

The memory at one place of a pass (before the first block, inside the last one, at the loss, ...) is linear in the
number of blocks and in the sequences of a micro-batch. So each way to compute (dtype, checkpointing, loss) is traced
with 3 and with 4 blocks, at the smallest and at the largest micro-batch, and a line through them leads to the model's
own depth. (If kinds of blocks take turns, as in Gemma 2, the two depths differ by one full turn.)
Weights, gradients and optimizer state are added to that: they come from traces with hardly a token, one for each
precision and optimizer. A trace at a third depth, once for each checkpointing, shows whether every block does add the
same; if it does not, the derivation is called an estimate. If weights stream, a trace with one block that stays on the
device shows how much such a block adds. If all micro-batches of a window pass through a block together, windows of
four and of five are traced, and a line through them leads to the window's own size.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from math import isqrt

from lowmem.config.declarations import CHANGEABLE, COMPUTED, PLACED, SHARED, techniques
from lowmem.config.settle import Run
from lowmem.memory.tracker import Point
from lowmem.offload.drive import Sizes
from lowmem.plan.cost.machine import Machine
from lowmem.plan.cost.step_time import PASSES, STEP, TRAVEL, seconds, window
from lowmem.plan.target import Target
from lowmem.plan.tracing.as_card import workspaces
from lowmem.plan.tracing.recorder import Place
from lowmem.plan.tracing.trace import Trace, trace
from lowmem.plan.tracing.traffic import EARLIER
from lowmem.system.units import CATEGORIES

FEWEST = 3  # blocks: the fewest that have one between the first and the last
THIRD = 7  # blocks: the least third depth, see `third`
BENT = 0.01  # error at the third depth, as a share of the highest place, above which a derivation is an estimate
OF_THE_STEP = (*CHANGEABLE, "optim.in_backward")  # overrides for traces of the parameters alone
SHORT = 8  # tokens of a sequence in such a trace
STAY = "weights.resident_blocks"  # override: blocks that stay on the device while the weights of the others stream
ORDER = "weights.order"  # override: in which order micro-batches pass through blocks whose weights stream
DRIVE_HOLDS = "weights.drive_holds"  # override: what is there
DRIVE = "weights.drive"  # override: a folder for masters and optimizer state of blocks whose weights stream
# Micro-batches of the windows that are traced if all of them pass through a block together. From four on each place is
# linear in them; with two, for example, the second gradient completes a sum, which leaves at once.
OVERLAPPING = (4, 5)

Compose = Callable[[Mapping[str, str]], Run]  # overrides -> the run, resolved
Needed = tuple[Mapping[str, str], tuple[int, int]]  # traces to make: overrides, (smallest, largest) micro-batch


@dataclass
class Derivation:
    """Derives the trace and the time of a recipe, and stores the traces that recipes share.

    Args: compose: returns a recipe's run; depth: blocks of the model; batches: smallest and largest micro-batch.
    """

    compose: Compose
    depth: int
    batches: tuple[int, int]
    target: Target
    machine: Machine
    traces: int = 0  # how many were made
    period: int = 1  # blocks after which their kinds begin again

    @property
    def depths(self) -> tuple[int, int]:
        """Returns the two smallest depths that define a line and end with the same kind of block as the model."""
        fewest = FEWEST + (self.depth - FEWEST) % self.period
        return fewest, fewest + self.period

    @property
    def third(self) -> int:
        """Returns a third depth: no square, and no multiple of 3 or 4 unless the model's own depth is one."""

        def tells(n: int) -> bool:
            return n >= THIRD and isqrt(n) ** 2 != n and all(n % k or not self.depth % k for k in (3, 4))

        return next(filter(tells, count(self.depths[1] + self.period, self.period)))

    def __post_init__(self) -> None:
        self._corners: dict[tuple, list[tuple[int, int, Trace]]] = {}
        self._counted: dict[int, Mapping[str, float]] = {}  # id of a trace -> seconds by phase
        self._errors: dict[str, float] = {}  # checkpointing -> error at the third depth
        self._streaming: dict[str, str] = {}  # precision that others compute as -> the precision traced for all of them
        self._staying: dict[tuple, Trace] = {}  # traces with one block that stays, at the smaller depth

    def derive(self, recipe: Mapping[str, str], run: Run) -> tuple[Trace, float]:
        """Derives a recipe's trace and its time.

        Args: recipe: override -> value, including the groups and batch_size; run: with its precision and optim.

        Returns:
            The trace, without the allocator's events; the seconds of an optimizer step.
        """
        batches = micro_batches(run, recipe)
        needed = self.needed(recipe, run)
        passes = self._of_window(needed[0::2], batches, int(recipe["batch_size"]))
        parameters = self._parameters(recipe, run)
        overlaps = run.by_layer and batches > 1
        of_passes = {"advice": passes.any.advice, "estimate": passes.any.estimate}
        of_passes["pinned"] = _pinned(passes)
        of_passes["leaves"] = passes.bytes(lambda t: t.leaves)
        of_passes["sent"] = _sent(passes)
        derived = replace(self.of_parameters(recipe, run), **of_passes)
        leave = run.masters or run.in_backward or derived.waits_on_host
        # A window whose micro-batches overlap was traced with all of its gradients, as a single micro-batch is.
        how = (False, 1) if overlaps else (leave, batches)
        derived.phases |= {
            "forward": _pass("forward", passes, parameters, derived, *how),
            "backward": _pass("backward", passes, parameters, derived, *how),
            "step": _step(passes, derived),
            "evaluation": _evaluation(passes, parameters, derived),
        }
        taken = {phase: passes.at(lambda t, phase=phase: self._seconds(t)[phase]) for phase in PASSES}
        taken |= {phase: parameters.at(lambda t, phase=phase: self._seconds(t)[phase]) for phase in STEP}
        if derived.streamed:
            share = derived.streamed / parameters.streamed  # the share of the blocks that streams
            taken[TRAVEL] = share * passes.at(lambda t: self._seconds(t).get(TRAVEL, 0.0))
        if not leave:  # each later micro-batch adds its gradients to the earlier ones
            taken["backward"] += (1 - 1 / batches) * 3 * derived.gradients / self.machine.bandwidth
        return derived, window(self.machine, run, derived, taken, batches, self.target.node).seconds

    def _seconds(self, traced: Trace) -> Mapping[str, float]:
        """Counts once for all recipes that share a trace; `_corners` keeps the trace alive, so its id stays valid."""
        if id(traced) not in self._counted:
            self._counted[id(traced)] = seconds(self.machine, traced)
        return self._counted[id(traced)]

    def of_parameters(self, recipe: Mapping[str, str], run: Run) -> Trace:
        """Derives the weights, gradients and state of a recipe alone; its only phase, the step, has no activations."""
        parameters = self._parameters(recipe, run)
        by_category = {category: parameters.bytes(_category_bytes("step", category)) for category in CATEGORIES}
        return Trace(
            parameters=parameters.bytes(lambda t: t.parameters),
            largest=parameters.any.largest,
            trained_parameters=parameters.bytes(lambda t: t.trained_parameters),
            trained_in_blocks=parameters.bytes(lambda t: t.trained_in_blocks),
            largest_trained=parameters.any.largest_trained,
            weights=parameters.bytes(_category_bytes("evaluation", "weights")),
            gradients=parameters.bytes(lambda t: t.gradients),
            steps_on_host=parameters.any.steps_on_host,
            waits_on_host=parameters.any.waits_on_host,
            unseen=parameters.any.unseen,
            generated=parameters.any.generated,
            workspace=sum(workspaces(run, self.target.capability)) if self.target.on_card else 0,
            paged=parameters.bytes(lambda t: t.paged),
            blocks=(self.depth, parameters.any.blocks[1]),
            host_bytes=parameters.bytes(lambda t: t.host_bytes),
            streamed=parameters.bytes(lambda t: t.streamed),
            outside=parameters.any.outside,
            ahead=parameters.any.ahead,
            head=parameters.any.head,
            drive=Sizes(
                parameters.bytes(lambda t: t.drive.tensors),
                parameters.bytes(lambda t: t.drive.files),
                parameters.any.drive.room,  # that of the largest block, or of a weight outside the blocks
                parameters.bytes(lambda t: t.drive.stepped),
            ),
            phases={"step": Point("step", by_category | {"activations": 0}, parameters.bytes(_host("step")))},
        )

    def _parameters(self, recipe: Mapping[str, str], run: Run) -> "Corners":
        needed = self.needed(recipe, run)[1::2]
        parameters = self._of_window(needed, micro_batches(run, recipe), batch=1)
        count = int(recipe.get(STAY, run.weights.arguments.get("resident_blocks", 0)))
        if not count:
            return parameters
        key = _key(*needed[0])
        if key not in self._staying:
            short = self.compose(needed[0][0] | {STAY: "1"}).knowing(batch_size=1)
            self._staying[key] = trace(short, self.target.on_card, min(self.depths), self.target.capability)
            self.traces += 1
        return replace(parameters, staying=count, one_stays=self._staying[key])

    def _of_window(self, needed: Sequence[Needed], micro_batches: int, batch: int) -> "Corners":
        """Returns the traces of a window. Args: needed: one set, or two for the sizes in OVERLAPPING."""
        own, *larger = (Corners(self.traced(*need), self.depth, batch) for need in needed)
        return replace(own, larger=larger[0], beyond=micro_batches - OVERLAPPING[0]) if larger else own

    def needed(self, recipe: Mapping[str, str], run: Run) -> tuple[Needed, ...]:
        """Returns the traces that a recipe needs: one set for its passes and one for its parameters; both for two
        sizes of a window if its micro-batches pass through blocks together.

        The passes are traced with an optimizer without state, so recipes with other optimizers share them. The
        parameters are traced with hardly an activation.
        """
        passes = {key: recipe[key] for key in COMPUTED} | {"optim": "sgd", "clip": "null"}
        same = not run.any("stays_wide") and run.technique("precision").computes_as
        passes["precision"] = same or recipe["precision"]
        parameters = {key: recipe[key] for key in OF_THE_STEP if key in recipe}
        if run.streams:  # the precision that it computes as does not stream: the first that does stands for all
            passes["precision"] = self._streaming.setdefault(passes["precision"], recipe["precision"])
            placed = {key: recipe[key] for key in (PLACED, DRIVE_HOLDS) if key in recipe} | {
                STAY: "0",
                ORDER: run.order,
            }
            passes, parameters = passes | placed, parameters | placed
            if techniques("loss")[recipe["loss"]].head_in_tiles:  # the head's weight is then on the host
                parameters["loss"] = recipe["loss"]
        loss = recipe["loss"] if techniques("loss")[recipe["loss"]].of_pairs else "full"
        parameters = {"loss": loss, "seq_len": str(SHORT)} | parameters
        several = (size := micro_batches(run, recipe)) > 1
        # If each device has a full copy of the model, only the last micro-batch of a window sends gradients.
        once = run.several and not run.any("divides")
        passes["accumulation"] = "fixed" if several and once else "none"
        # With masters and several micro-batches the host sums gradients in fp32.
        parameters["accumulation"] = "fixed" if several and run.masters else "none"
        if run.several:
            placed = {SHARED: recipe[SHARED]}
            passes, parameters = passes | placed, parameters | placed
        sets = (passes, self.batches), (parameters, (1, 1))
        if not (run.by_layer and several):
            return sets
        sizes = OVERLAPPING if size > OVERLAPPING[0] else (size,)
        windows = [{"accumulation": "fixed", "accumulation.batches": str(size)} for size in sizes]
        return tuple((overrides | window, batches) for window in windows for overrides, batches in sets)

    def estimate(self, recipe: Mapping[str, str], run: Run) -> str | None:
        """Returns why the derived trace is only an estimate; None: it is exact. Args: as for `trace`."""
        checkpointing = recipe["gradient_checkpointing"]
        if checkpointing not in self._errors:
            self._errors[checkpointing] = self._error_at_third(*self.needed(recipe, run)[0])
        error = self._errors[checkpointing]
        if error <= BENT:
            return None
        return (
            f"with gradient_checkpointing={checkpointing} not every block adds the same; derived from {self.depths} "
            f"blocks, {self.third} are {error:.0%} off. Type search=false for this run alone, traced."
        )

    def _error_at_third(self, passes: Mapping[str, str], batches: tuple[int, int]) -> float:
        """Returns the largest error at the third depth of any place, as a share of the highest place."""
        if self.depth <= max(self.depths):
            return 0.0
        small = min(batches)
        by_depth = {depth: t for depth, batch, t in self.traced(passes, batches) if batch == small}
        run = self.compose(passes).knowing(batch_size=small)
        third = trace(run, self.target.on_card, self.third, self.target.capability)
        self.traces += 1
        exact = {place: third.places[place].with_all_gradients for place in third.places if place.startswith(PASSES)}

        def derived(place: str) -> float:
            bytes_at = _at_place(place, "with_all_gradients")
            return _line({depth: bytes_at(t) for depth, t in by_depth.items()}, self.third)

        return max(abs(derived(place) - size) for place, size in exact.items()) / max(exact.values())

    def has(self, recipe: Mapping[str, str], batches: tuple[int, int]) -> bool:
        """Returns whether these traces exist already."""
        return _key(recipe, batches) in self._corners

    def traced(self, recipe: Mapping[str, str], batches: tuple[int, int]) -> list[tuple[int, int, Trace]]:
        """Returns (depth, batch, trace) at each depth and at micro-batches from the smallest to the largest."""
        if not self.has(recipe, batches):
            corners = self.corners(recipe, batches)
            traces = [trace(run, self.target.on_card, depth, self.target.capability) for depth, _, run in corners]
            self.take(recipe, batches, corners, traces)
        return self._corners[_key(recipe, batches)]

    def corners(self, recipe: Mapping[str, str], batches: tuple[int, int]) -> list[tuple[int, int, Run]]:
        """Returns (depth, batch, config) of each trace that `traced` makes."""
        run = self.compose(recipe)
        # Up to this micro-batch the loss is a single chunk that grows with it; beyond, several chunks of equal size.
        knee = -(-run.loss.arguments.get("rows", 1) // run.seq_len)
        return [
            (depth, batch, run.knowing(batch_size=batch))
            for depth in self.depths
            for batch in sorted({*batches, min(max(knee, batches[0]), batches[1])})
        ]

    def take(
        self, recipe: Mapping[str, str], batches: tuple[int, int], corners: Sequence[tuple], traces: Sequence[Trace]
    ) -> None:
        """Stores the traces of `corners`, made in this process or by the helper."""
        entries = [(depth, batch, t) for (depth, batch, _), t in zip(corners, traces, strict=True)]
        self._corners[_key(recipe, batches)] = entries
        self.traces += len(entries)


def _key(recipe: Mapping[str, str], batches: tuple[int, int]) -> tuple:
    return (*sorted(recipe.items()), *batches)


def micro_batches(run: Run, recipe: Mapping[str, str]) -> int:
    """Returns the number of micro-batches in the recipe's accumulation window."""
    if "accumulation.batches" in recipe:
        return int(recipe["accumulation.batches"])
    if "size" in run.accumulation.arguments:
        return run.accumulation.size // (int(recipe["batch_size"]) * reading(run))
    return run.windows.largest


def reading(run: Run) -> int:
    """Returns how many devices share the sequences of accumulation.size."""
    devices = run.accumulation.devices
    return run.data_ranks if devices == 1 else devices


@dataclass(frozen=True)
class Corners:
    """Holds traces at two depths and one or more batches, and the depth and batch to derive."""

    traces: list[tuple[int, int, Trace]]
    depth: int
    batch: int
    staying: int = 0  # blocks whose weights stay on the device while the others stream
    one_stays: Trace | None = None  # same run as traces[0], except that one block stays
    larger: "Corners | None" = None  # the same in a window of one micro-batch more
    beyond: int = 0  # micro-batches that the window to derive has beyond those of `traces`

    @property
    def any(self) -> Trace:
        return self.traces[0][2]

    @property
    def streamed(self) -> float:
        """Returns the bytes of weights that would stream if no block stayed on the device."""
        return replace(self, staying=0).at(lambda t: t.streamed)

    def at(self, value: Callable[[Trace], float]) -> float:
        value_at = bilinear([(depth, batch, value(t)) for depth, batch, t in self.traces], self.depth, self.batch)
        if self.larger is not None:
            value_at += self.beyond * (self.larger.at(value) - value_at)
        return value_at + self.staying * (value(self.one_stays) - value(self.any)) if self.staying else value_at

    def bytes(self, value: Callable[[Trace], int]) -> int:
        return round(self.at(value))


def _category_bytes(phase: str, category: str) -> Callable[[Trace], int]:
    return lambda t: t.phases[phase].bytes[category]


def _host(phase: str) -> Callable[[Trace], int]:
    return lambda t: t.phases[phase].host


def _at_place(place: str, field: str) -> Callable[[Trace], int]:
    return lambda t: getattr(t.places.get(place, Place()), field)


def _pass(phase: str, passes: Corners, parameters: Corners, derived: Trace, leave: bool, batches: int) -> Point:
    """Returns the highest place of forward or backward. Args: leave: whether each gradient leaves as soon as backward
    computes it; batches: micro-batches of a window."""
    places = [place for place in passes.any.places if place.startswith(phase)]
    tops = [Place(*(passes.bytes(_at_place(place, field)) for field in Place._fields)) for place in places]
    if leave or batches > 1:
        top = max(tops, key=lambda place: place.with_newest_gradient)
        gradients = 0 if leave else derived.gradients
    else:
        top = max(tops, key=lambda place: place.with_all_gradients)
        gradients = top.with_all_gradients - top.with_newest_gradient
    state = parameters.bytes(_category_bytes("evaluation", "optimizer"))
    # Host bytes of the optimizer, plus offloaded boundaries. If weights wait on the host, the traced host bytes of the
    # passes include those weights, so the boundaries are counted by themselves.
    offloaded = sum(derived.pinned) if derived.streamed or derived.waits_on_host else passes.bytes(_host(phase))
    host = parameters.bytes(_host(phase)) + offloaded
    return _point(phase, derived.weights, gradients, state, top.with_newest_gradient, host)


def _step(passes: Corners, derived: Trace) -> Point:
    """Takes the peak from a trace of the step instead of a sum: if each gradient is freed after use, the peak holds
    only some of them."""
    alone = derived.phases["step"]
    batch = passes.bytes(_category_bytes("step", "activations"))  # the tensors of the micro-batch
    return alone._replace(bytes=alone.bytes | {"activations": batch})


def _evaluation(passes: Corners, parameters: Corners, derived: Trace) -> Point:
    state = parameters.bytes(_category_bytes("evaluation", "optimizer"))
    activations = passes.bytes(_category_bytes("evaluation", "activations"))
    return _point("evaluation", derived.weights, 0, state, activations, parameters.bytes(_host("evaluation")))


def bilinear(corners: list[tuple[int, int, float]], depth: int, batch: int) -> float:
    """Interpolates between batches and extrapolates to `depth`.

    Args: corners: (depth, batch, value) at two depths and one or more batches, from the smallest to the largest.
    """
    by_batch: dict[int, dict[int, float]] = {}
    for d, b, value in corners:
        by_batch.setdefault(b, {})[d] = value
    at_depth = {b: _line(by_depth, depth) for b, by_depth in by_batch.items()}
    below, above = max(b for b in at_depth if b <= batch), min(b for b in at_depth if b >= batch)
    return at_depth[below] if below == above else _line({b: at_depth[b] for b in (below, above)}, batch)


def _line(points: Mapping[int, float], x: int) -> float:
    (x0, y0), (x1, y1) = sorted(points.items())
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _point(phase: str, weights: int, gradients: int, state: int, rest: int, host: int) -> Point:
    by_category = {"weights": weights, "gradients": gradients, "optimizer": state, "activations": rest}
    return Point(phase, dict.fromkeys(CATEGORIES, 0) | by_category, host)


def _sent(passes: Corners) -> Counter:
    """Returns bytes per call. If a single micro-batch was traced, the earlier ones are taken to send the same."""
    sent = Counter({call: passes.bytes(lambda t, call=call: t.sent[call]) for call in passes.any.sent})
    if any(phase.startswith(EARLIER) for phase, _ in sent):
        return sent
    return sent + Counter({(EARLIER + phase, kind): size for (phase, kind), size in sent.items() if phase in PASSES})


def _pinned(passes: Corners) -> list[int]:
    """Returns the bytes of each activation in host memory: those of a turn of blocks, over and over. A block may have
    several, and some of them (the state of a random generator) do not grow with the micro-batch."""
    lengths = {depth: len(t.pinned) for depth, _, t in passes.traces}
    turn, deeper = max(lengths.values()) - min(lengths.values()), replace(passes, depth=max(lengths), larger=None)
    sizes = [deeper.bytes(lambda t, at=at: (t.pinned + [0] * turn)[at]) for at in range(turn)]
    return list(islice(cycle(sizes), passes.bytes(lambda t: len(t.pinned))))
