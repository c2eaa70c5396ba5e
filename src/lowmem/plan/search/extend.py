"""Extrapolates traces of short models (a few blocks) to the full depth of a model. A search traces most recipes in this
way, because a trace of all blocks takes longer.

A model repeats its blocks. So the work of a pass, and the memory at each place in a pass (before the first block, in
the last block, at the loss, ...), are linear in the number of blocks:

    value(depth) = value(near) + steps * (value(far) - value(near))     for example near = 3, far = 4, steps = depth - 3

The short models have `near` and `far` blocks, and are traced with the micro-batch size of the recipe. A model may have
several kinds of blocks, such as blocks with sliding-window attention in Gemma, or dense blocks in a mixture of experts.
Then the blocks from `near` to `far` must contain each kind in the same proportion as the blocks from `near` to the full
depth.

A recipe is traced in full if its work and memory are not linear in depth (checkpointed segments of several blocks,
pipelines, weights.resident_blocks), or if no two short models are suitable (for example with fewer than five blocks, or
with kinds of blocks without a repeated pattern).

With weights.order=by_layer, a trace has all micro-batches of a window. From four micro-batches on, work and memory are
linear in the number of micro-batches, so windows of more than five are extrapolated from windows of four and five
micro-batches.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from lowmem.config.declarations import choice
from lowmem.config.settle import Run
from lowmem.memory.tracker import Point
from lowmem.model.blocks import stack_of
from lowmem.model.experts import inactive_parameters
from lowmem.model.loading import describe
from lowmem.model.trainable import parameters, trainable
from lowmem.plan.prediction import not_predicted
from lowmem.plan.tracing.recorder import of_phases
from lowmem.plan.tracing.trace import of_depth, quietly, trace
from lowmem.plan.tracing.traces import Trace
from lowmem.training import build

FEWEST = 3  # minimum number of blocks of a short model: a first, a middle and a last block
WINDOWS = (4, 5)  # by_layer: numbers of micro-batches from which longer windows are extrapolated
PLAIN = (int, float, bool, str, type(None))  # types of the module attributes that `kind_of` compares

T = TypeVar("T")


class Line(NamedTuple):
    """The extrapolation to the full depth: trace(near) + steps * (trace(far) - trace(near)). Args: near, far: numbers
    of blocks of the two short models."""

    near: int
    far: int
    steps: float


def extended(run: Run, on_card: bool, capability: float | None = None, rank: int = 0) -> Trace:
    """Returns the trace of a run, extrapolated from short models if memory and work are linear in depth.

    Args:
        run, on_card, capability, rank: see `trace`.

    Returns:
        The trace. An extrapolated trace has no `events`.

    Raises:
        NotPredicted: the model cannot be built.
        Refused, Exception: see `trace`.
    """
    line = line_of(run)
    if line is None:
        return trace(run, on_card, capability=capability, rank=rank)

    def at(micro_batches: int | None) -> Trace:
        short = run if micro_batches is None else _of_window(run, micro_batches)
        near, far = (trace(short, on_card, depth, capability, rank) for depth in (line.near, line.far))
        return beyond(near, far, line.steps)

    if run.by_layer and run.windows.largest > WINDOWS[1]:
        found = beyond(*map(at, WINDOWS), run.windows.largest - WINDOWS[0])
    else:
        found = at(None)
    return replace(found, phases=of_phases(found.places, on_card))


def _of_window(run: Run, micro_batches: int) -> Run:
    return run.replacing("accumulation", choice("accumulation", "fixed") | {"batches": micro_batches})


def beyond(near: T, far: T, steps: float) -> T:
    """Returns `near` + `steps` * (`far` - `near`) for each number in nested dataclasses, dictionaries and tuples; an
    int stays an int. Lists become empty. Booleans, strings and None are taken from `far`."""
    if isinstance(near, bool | str | type(None)):
        return far
    if isinstance(near, int | float):
        found = near + steps * (far - near)
        return round(found) if isinstance(near, int) else found
    if isinstance(near, dict):
        keys = dict.fromkeys([*near, *far])
        return type(near)({key: beyond(*_both(near, far, key), steps) for key in keys})
    if isinstance(near, list):  # lists of events have different lengths
        return []
    if is_dataclass(near):
        values = {
            field.name: beyond(getattr(near, field.name), getattr(far, field.name), steps) for field in fields(near)
        }
        return replace(near, **values)
    values = (beyond(one, other, steps) for one, other in zip(near, far, strict=True))
    return tuple(values) if type(near) is tuple else type(near)(*values)  # otherwise a named tuple


def _both(near: dict, far: dict, key: Hashable) -> tuple:
    """Returns the values of a key in both dictionaries. A missing value is replaced by 0, or by a `Point` with 0
    bytes."""
    return tuple(found[key] if key in found else _nothing(other[key]) for found, other in ((near, far), (far, near)))


def _nothing(value: float | Point) -> float | Point:
    if isinstance(value, Point):
        return Point(value.phase, dict.fromkeys(value.bytes, 0), dict.fromkeys(value.host_bytes, 0))
    return 0


def line_of(run: Run) -> Line | None:
    """Returns the extrapolation for a run. None: the run must be traced at full depth."""
    if run.checkpointing.joins_blocks or run.strategy_class.overlaps_micro_batches:
        return None
    if run.weights.arguments.get("resident_blocks"):
        return None
    config = describe(run, plans=True).grown
    kinds = network(run, config).kinds
    line = _line(kinds)
    if line is None or getattr(config, "num_hidden_layers", None) != len(kinds):
        return None
    return line if network(run, of_depth(config, line.far)).kinds == kinds[: line.far] else None


def _line(kinds: Sequence[Hashable]) -> Line | None:
    """Returns the extrapolation from the two shortest suitable models. Models of `near` and `far` blocks are suitable
    if two conditions hold:

    - The blocks from `near` to `far` contain each kind of block in the same proportion as the blocks from `near` to the
      full depth.
    - Both models end with the kind of block with which the full model ends.

    Args:
        kinds: the kind of each block of the full model.

    Returns:
        The extrapolation, or None if no two models are suitable.
    """
    for far in range(FEWEST + 1, len(kinds)):
        for near in range(FEWEST, far):
            steps = (len(kinds) - near) / (far - near)
            added, rest = Counter(kinds[near:far]), Counter(kinds[near:])
            alike = all(rest[kind] == steps * added[kind] for kind in rest)
            if alike and kinds[near - 1] == kinds[far - 1] == kinds[-1]:
                return Line(near, far, steps)
    return None


class Network(NamedTuple):
    """Parameter counts and kinds of blocks of a model."""

    kinds: list[Hashable]  # the result of `kind_of` for each block; blocks of one kind need equal work and memory
    parameters: int  # all parameters, with adapter parameters
    trained: int
    inactive: int  # parameters that a token does not use: experts that the router does not select
    in_blocks: int  # parameters of all blocks, without adapter parameters

    @property
    def active_in_blocks(self) -> float:
        """Returns the share of the blocks' parameters that a token uses."""
        return 1 - self.inactive / self.in_blocks


def network(run: Run, config: PretrainedConfig | None = None) -> Network:
    """Builds a run's model on the meta device, and returns its parameter counts and kinds of blocks (cached).

    Args:
        run: the settings.
        config: the model's config; None: the config of `run`.

    Raises:
        NotPredicted: the model cannot be built.
        Refused: for example, adapter= or freeze= does not match the model.
    """
    with not_predicted():
        return _network(_Model(run, config or describe(run, plans=True).grown))


class _Model:
    """A cache key of a model: its config, its dtype, and the settings that decide which parameters are trained."""

    def __init__(self, run: Run, config: PretrainedConfig) -> None:
        self.run, self.config = run, config
        self.name = (config.to_json_string(), str(run.adapter.plain()), str(run.freeze), run.loaded_in)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@cache
def _network(model: _Model) -> Network:
    with quietly(), torch.device("meta"):
        of_run = {"dtype": getattr(torch, model.run.loaded_in), "trust_remote_code": model.run.model.trust_remote_code}
        built = AutoModelForCausalLM.from_config(model.config, **of_run)
        inactive = inactive_parameters(built)
        in_blocks = sum(p.numel() for block in stack_of(built) for p in block.parameters())
        build.choose_trained(model.run, built)
    kinds = [kind_of(block) for block in stack_of(built)]
    trained = sum(p.numel() for _, p in trainable(built))
    return Network(kinds, parameters(built), trained, inactive, in_blocks)


def kind_of(block: nn.Module) -> Hashable:
    """Returns the kind of a block. The kind consists of the names and classes of the block's modules, their attributes
    of PLAIN types (such as the length of a sliding window, but no indices), and for each parameter its name, its shape
    and whether it is trained."""
    modules = tuple(
        (name, type(module).__name__, tuple((key, value) for key, value in vars(module).items() if _tells(key, value)))
        for name, module in block.named_modules()
    )
    return modules, tuple((name, p.shape, p.requires_grad) for name, p in block.named_parameters())


def _tells(key: str, value: object) -> bool:
    return isinstance(value, PLAIN) and not key.endswith(("idx", "index"))  # equal blocks have different indices
