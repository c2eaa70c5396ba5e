"""Reads the properties that techniques declare. The checks, the planner and the advice to users rely on these
properties, so that no code depends on the name of a technique.

Each technique has a file conf/<group>/<name>.yaml, which may list properties under `declares`. Further properties of
precisions, weights, losses, adapters and strategies follow from the code of their classes. These properties are class
attributes, and are read through `Run`, as in `run.loss_class.head_in_tiles`.

The docstrings of a base class say who calls which method, with which shapes and dtypes. A base class has defaults for
optional methods, so that callers need no `hasattr`. The base classes of techniques, data and layers:

    an optimizer       torch's `Optimizer`; `OnePass` or `InPieces` of `step/one_weight.py` if the optimizer updates
                       16-bit weights itself
    a precision        `BasePrecision` of `techniques/precision/contract.py`, or its `SixteenBitWeights`
    a loss             `Loss` of `techniques/loss/cross_entropy.py`
    an adapter         `Adapter` of `techniques/adapter/contract.py`
    a strategy         `OneDevice` of `techniques/strategy/contract.py`
    weights            `WeightsOnDevice` of `offload/on_device.py`
    a data set         `StoredSource` of `data/opening.py`; `Openable` if it stores no tokens on disk
    a kind of record   `Encoder` of `data/sources/source.py`
    rows of tokens     `Rows` of `data/loader.py`
    a quantized layer  `Packed` of `model/trainable.py`
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Literal

import yaml
from hydra.utils import get_object
from pydantic import BaseModel

from lowmem.config.typed_lines import CONF
from lowmem.system.errors import Refused

# Groups in which the planner tries several choices, unless `Typed.keeps` (`plan/search/candidates.py`) tells it to keep
# the choice of the typed run.
CHANGEABLE = ("precision", "optim")  # groups whose choices change the result of training; see may_change=
COMPUTED = ("gradient_checkpointing", "loss")  # groups whose choices compute equal results up to rounding
PLACED = "weights"  # the group that decides where weights are stored while they are not used
SHARED = "strategy"  # the group that decides how several devices share one run


@dataclass(frozen=True)
class Technique:
    """The declared properties of a technique. All properties have defaults, and most properties apply to only one
    group.

    Any group:
        saves: category of bytes on the device -> upper bound on the share of the default run's bytes that remains;
            empty if the technique saves nothing.
        tried: the planner may choose the technique without being asked, because the technique works with the typed lr
            and keeps the quality of updates.
        advised: the technique of its group that error messages recommend when memory runs out.
        generates_code: the technique generates code at run time, with a C++ compiler on a CPU and with Triton on a
            card. Allocations in generated code cannot be traced.
    optim:
        update_of: name of the optimizer that computes the same update but stores its state in a different format; None:
            there is no such optimizer.
        state_bits: bits per element of the optimizer state.
        on_host: name of the optimizer that the planner chooses in place of this one to update masters in host memory;
            both have the same kind of state. None: the planner keeps this optimizer.
        pages: a paged optimizer, whose state moves to host memory automatically when the card is full.
        steps_by: "element": each element is updated independently of other elements. "matrix": the update of an
            element depends on its full matrix, so a shard of the matrix would get a different update. In both cases the
            step consists of torch operators, which also run on tensors without memory. None: the step uses custom
            kernels, which cannot be traced.
        cpu_factor: time of the update on a CPU, divided by its time if only memory bandwidth limited it.
    gradient_checkpointing:
        joins_blocks: several blocks are recomputed together.
        inputs_on_host: the inputs of blocks are offloaded to host memory.
        sees_operators: for each operator of a block, the technique decides whether to store the result.
    loss:
        of_rated: the loss uses ratings of single answers, so a row has one answer and not a pair.
    strategy:
        one_process: the strategy runs in a single process, without ranks.
    """

    saves: Mapping[str, float] = field(default_factory=dict)
    tried: bool = False
    advised: bool = False
    update_of: str | None = None
    state_bits: int = 32
    on_host: str | None = None
    pages: bool = False
    steps_by: Literal["element", "matrix"] | None = None
    cpu_factor: float = 1.0
    generates_code: bool = False
    joins_blocks: bool = False
    inputs_on_host: bool = False
    sees_operators: bool = False
    of_rated: bool = False
    one_process: bool = False


@cache
def groups() -> tuple[str, ...]:
    """Returns the groups in which at least one technique declares a property, in the order of conf/config.yaml."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    names = [key for line in defaults if isinstance(line, dict) for key in line]
    return tuple(group for group in names if any(map(_declares, (CONF / group).glob("*.yaml"))))


def _declares(file: Path) -> bool:
    return re.search(r"^ *declares:", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def technique_of(node: BaseModel | None, group: str) -> Technique:
    """Returns the declared properties of the technique that a run has chosen in a group. If `node` is None, the run has
    no node for this group, and all properties have their defaults. Raises Refused if a declared key does not exist.
    """
    return _technique(getattr(node, "declares", None) or {}, group)  # theirs: the node is any model of the schema


def choice(group: str, name: str) -> dict:
    """Returns the keys of conf/<group>/<name>.yaml."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))


def class_of(group: str, name: str) -> type:
    """Returns the class that conf/<group>/<name>.yaml names."""
    return get_object(choice(group, name)["_target_"])


@cache
def techniques(group: str) -> dict[str, Technique]:
    """Returns a dict that maps the name of each yaml of a group to its declared properties. Raises Refused if a
    declared key does not exist."""
    properties = {}
    for file in sorted((CONF / group).glob("*.yaml")):
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        properties[file.stem] = _technique(values.get("declares") or {}, f"conf/{group}/{file.name}")
    return properties


def _technique(declared: Mapping, where: str) -> Technique:
    known = [property_.name for property_ in fields(Technique)]
    if unknown := [key for key in declared if key not in known]:
        raise Refused(
            f"{where}: declares.{unknown[0]} is not a property of a technique. Declare one of {', '.join(known)}."
        )
    return Technique(**declared)
