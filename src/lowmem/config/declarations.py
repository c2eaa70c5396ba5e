"""Reads the properties that techniques declare for checks, the planner and advice, so that no code compares the name of
a technique.

Each conf/<group>/<name>.yaml is a technique, and has its properties under `declares`. Precisions, losses, adapters and
strategies are lowmem's own classes: properties that their code decides are class attributes, which `Run` offers
(`run.loss_class.head_in_tiles`).

Each kind of class has a base class, whose docstrings say who calls which method, with which shapes and dtypes. Optional
methods have a default there, so that no caller needs `hasattr`:

    an optimizer       torch's; `OnePass` or `InPieces` of `step/one_weight.py` if it steps 16 bits itself
    a precision        `BasePrecision` of `techniques/precision/contract.py`, or its `SixteenBitWeights`
    a loss             `Loss` of `techniques/loss/cross_entropy.py`
    an adapter         `Adapter` of `techniques/adapter/contract.py`
    a strategy         `OneDevice` of `techniques/strategy/contract.py`
    a data set         `StoredSource` of `data/opening.py`; `Openable` if it stores no tokens on disk
    a kind of record   `Encoder` of `data/sources/source.py`
    a way to make rows `Rows` of `data/loader.py`
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

# Groups that the planner may change. It keeps the typed choice of every other group.
CHANGEABLE = ("precision", "optim")  # groups that change the result of training, and not only how it is computed
COMPUTED = ("gradient_checkpointing", "loss")  # groups whose choices compute the same result in different ways
PLACED = "weights"  # the group that decides where idle weights are stored, on which the kind of step depends
SHARED = "strategy"  # the group that decides how devices share one training


@dataclass(frozen=True)
class Technique:
    """The declared properties of a technique. All have defaults, and most concern one group.

    Any group:
        saves: category of bytes -> the largest share that remains of the default run's bytes; empty if it saves
            nothing.
        tried: the planner may choose it although it was not typed: it works with the typed lr, and keeps the quality
            of updates.
        advised: the first of its group to recommend when memory runs out.
        generates_code: it generates code at run time, with a C++ compiler on a CPU and with Triton on a card. The
            allocations of generated code cannot be traced.
    optim:
        update_of: name of the optimizer whose update this optimizer computes with another state; None: its own.
        state_bits: bits per element of its state.
        on_host: the optimizer with the same state that steps masters in host memory.
        pages: its state moves to host memory by itself.
        steps_by: "element" or "matrix" if its step consists of torch operators, which also run on tensors without
            memory. "matrix": a step on some rows of a matrix gives another result. None: it has its own kernels.
        cpu_factor: time of its update on a CPU, relative to the time that memory bandwidth alone would need.
    gradient_checkpointing:
        joins_blocks: it recomputes several blocks together.
        inputs_on_host: the inputs of blocks are offloaded to host memory.
        sees_operators: it decides for each operator of a block whether its result is stored.
    loss:
        of_rated: answers are rated one by one, so rows are single answers and not pairs.
    strategy:
        one_process: it starts no ranks.
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
    """Returns the groups in which a technique declares a property, in the order of conf/config.yaml."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    names = [key for line in defaults if isinstance(line, dict) for key in line]
    return tuple(group for group in names if any(map(_declares, (CONF / group).glob("*.yaml"))))


def _declares(file: Path) -> bool:
    return re.search(r"^ *declares:", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def technique_of(node: BaseModel | None, group: str) -> Technique:
    """Returns the declared properties of a group's node. Args: node: None if the run does not have the group.

    Raises:
        Refused: a declared key that does not exist.
    """
    return _technique(getattr(node, "declares", None) or {}, group)  # theirs: any model of the schema


def choice(group: str, name: str) -> dict:
    """Returns the keys of conf/<group>/<name>.yaml."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))


def class_of(group: str, name: str) -> type:
    """Returns the class that conf/<group>/<name>.yaml names."""
    return get_object(choice(group, name)["_target_"])


@cache
def techniques(group: str) -> dict[str, Technique]:
    """Returns name -> declared properties, for every yaml of a group.

    Raises:
        Refused: a declared key that does not exist.
    """
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
