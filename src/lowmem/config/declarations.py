"""Reads what techniques declare: properties that checks, the planner and advice need to know, and no name of a
technique.

Each conf/<group>/<name>.yaml is a technique and has its properties under `declares`. Precisions, losses, adapters and
strategies are classes of ours: what their code decides is an attribute of the class, which `Run` offers
(`run.loss_class.head_in_tiles`).

Each kind of class has a base class, whose docstrings say who calls which method, with which shapes and dtypes. Methods
that a class leaves out have a default there, so that nobody asks with `hasattr`:

    an optimizer       torch's; `OnePass` or `InPieces` of `step/one_weight.py` if it steps 16 bits itself
    a precision        `BasePrecision` of `techniques/precision/contract.py`, `SixteenBitWeights` beside it
    a loss             `Loss` of `techniques/loss/cross_entropy.py`
    an adapter         `Adapter` of `techniques/adapter/contract.py`
    a strategy         `OneDevice` of `techniques/strategy/contract.py`
    a data set         `StoredSource` of `data/opening.py`; `Openable` if it keeps no tokens on disk
    a kind of record   `Encoder` of `data/sources/source.py`
    a way to make rows `Rows` of `data/loader.py`
    a layer of fewer bits `Packed` of `model/trainable.py`
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import yaml
from hydra.utils import get_object
from pydantic import BaseModel

from lowmem.config.typed_lines import CONF
from lowmem.system.errors import Refused

# Groups that the planner may change. It leaves all other groups as they were typed.
CHANGEABLE = ("precision", "optim")  # groups that change what a training computes, not only how
COMPUTED = ("gradient_checkpointing", "loss")  # groups whose choices compute the same in other ways
PLACED = "weights"  # the group that says where weights wait; what a step does depends on it
SHARED = "strategy"  # the group that says how several devices share one training


@dataclass(frozen=True)
class Technique:
    """Holds the declared properties of a technique. All have a default, and most concern one group.

    Any group:
        saves: category of bytes -> the largest share of the shipped run's bytes that is left; empty if it saves
        nothing. tried: the planner may choose it unasked: it needs no other lr and keeps the update's quality. advised:
        it is the first of its group to try when memory runs out. generates_code: it generates code while it runs, with
        a C++ compiler on a CPU and with Triton on a card. compiles_blocks: it compiles blocks, whose allocations cannot
        be traced.
    precision:
        tried_without_bf16: the planner may choose it for a card without bf16 products.
    optim:
        update_of: the optimizer whose update it makes with another state; None: the update is its own.
        state_bits: bits of an element of its state.
        on_host: the optimizer with the same state that steps masters in host memory.
        pages: its state moves to host memory by itself.
        steps_on_shapes: its step consists of torch operators, which compute shapes too.
        needs_whole: its step on some rows of a matrix differs from its step on the full matrix.
        cpu_factor: how many times longer than its bytes at the bandwidth of memory its update takes on a CPU.
    gradient_checkpointing:
        keeps_all: it stores every activation, and nothing is computed again.
        joins_blocks: several blocks are computed again at once.
        inputs_on_host: the inputs of blocks wait in host memory.
        sees_operators: it decides for each operator of a block whether its result is stored.
    loss:
        of_rated: its answers were rated one by one, so that rows are single answers and not pairs.
    strategy:
        one_process: it starts no ranks.
    """

    saves: Mapping[str, float] = field(default_factory=dict)
    tried: bool = False
    tried_without_bf16: bool = False
    advised: bool = False
    update_of: str | None = None
    state_bits: int = 32
    on_host: str | None = None
    pages: bool = False
    steps_on_shapes: bool = False
    cpu_factor: float = 1.0
    generates_code: bool = False
    keeps_all: bool = False
    joins_blocks: bool = False
    inputs_on_host: bool = False
    sees_operators: bool = False
    compiles_blocks: bool = False
    of_rated: bool = False
    one_process: bool = False
    needs_whole: bool = False


@cache
def groups() -> tuple[str, ...]:
    """Returns the groups with a technique that declares something, in the order of conf/config.yaml."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    names = [key for line in defaults if isinstance(line, dict) for key in line]
    return tuple(group for group in names if any(map(_declares, (CONF / group).glob("*.yaml"))))


def _declares(file: Path) -> bool:
    return re.search(r"^ *declares:", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def technique_of(node: BaseModel | None, group: str) -> Technique:
    """Returns what a group's node declares. Args: node: None if the run has no such group.

    Raises:
        Refused: a key that no technique declares.
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
    """Returns the properties of every yaml of a group, by name.

    Raises:
        Refused: a key that no technique declares.
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
