"""What a technique says of itself, in its yaml under `declares` and nowhere else: checks, planner and advice ask here.

conf/<group>/<name>.yaml is a technique; one that is `@package _global_` declares under <group>.declares.

A class of each kind has a base class, whose docstrings say who calls what, with which shapes and dtypes. What the class
leaves out has a default there, so that nobody asks with `hasattr`:

    an optimizer            torch's; `OnePass` or `InPieces` of `optim/contract.py` if it steps 16 bits itself
    a precision             `BasePrecision` of `precision/base.py`, `SixteenBitWeights` of `precision/sixteen.py`
    a loss                  `Loss` of `loss.py`
    a strategy              `OneDevice` of `strategy/one_device.py`
    a data set              `StoredSource` of `data/opened.py`; `Openable` if it keeps no tokens on disk
    a kind of record        `Encoder` of `data/source.py`
    a way to make rows      `Rows` of `data/loader.py`
    a layer of fewer bits   `Packed` of `trainable.py`
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel

from lowmem.errors import Refused
from lowmem.overrides import CONF

# What the planner does with a group's techniques. One that it does not know, it leaves as it was typed.
CHANGEABLE = ("precision", "optim")  # groups that change what a training computes, not only how
COMPUTED = ("gradient_checkpointing", "loss")  # groups of ways to compute the same
PLACED = "weights"  # a group of places where they wait, which what a step does depends on
SHARED = "strategy"  # a group of ways for several devices to share one training


@dataclass(frozen=True)
class Technique:
    """Args:
    saves: category of bytes -> what is left of the shipped run's, at most; empty: it saves nothing.
    tried: the planner may take it where nothing was typed: it needs no other lr and keeps the update's quality.
    tried_without_bf16: of a precision: the planner may take it for a card that has no bf16 products.
    advised: the first of its group to try when memory runs out.
    update_of: of an optimizer: the one whose update it makes, with other state; empty: its own.
    state_bits: of an optimizer: of an element of its state.
    on_host: of an optimizer: the one with the same state that is made for masters in host memory.
    pages: of an optimizer: its state moves to host memory by itself.
    steps_on_shapes: of an optimizer: its step is torch operators alone, which know what they do to a shape.
    generates_code: while it runs: with a C++ compiler on a CPU, by Triton on a card.
    keeps_all: of a gradient_checkpointing: nothing is computed again.
    compiles_blocks: so that what they allocate is seen by nobody.
    computes_as: of a precision: one that computes in the same dtypes, with its gradients on the device.
    head_in_tiles: of a loss: it reads the head's weight in tiles of the vocabulary, which may come from anywhere.
    counts_sequences: of an accumulation: it makes up for a smaller micro-batch by itself.
    stays_wide: of an adapter: it computes in fp32 where the weights have 16 bits, unless there are masters.
    freezes_base: of an adapter: none of the model's own weights is trained.
    one_process: of a strategy: there are no ranks to start.
    divides: of a strategy: parameters are held in parts, each on another device.
    overlaps_micro_batches: of a strategy: a window's micro-batches are under way at the same time.
    adds_in_blocks: of a strategy: devices exchange what a block computes while it computes.
    package: of a strategy: what its engine is in, which is not installed with everything else.
    steps_wide: of a strategy: its engine holds fp32 weights to be stepped, whatever the precision holds.
    gathers_in_hooks: of a strategy: a weight is there while the module that holds it is called.
    offloads: of a strategy: what a device holds of the model waits and is stepped in host memory.
    needs_whole: of an optimizer: its step on a part of a matrix is another one than on the whole.
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
    generates_code: bool = False
    keeps_all: bool = False
    compiles_blocks: bool = False
    computes_as: str | None = None
    head_in_tiles: bool = False
    counts_sequences: bool = False
    stays_wide: bool = False
    freezes_base: bool = False
    one_process: bool = False
    divides: bool = False
    overlaps_micro_batches: bool = False
    offloads: bool = False
    adds_in_blocks: bool = False
    package: str | None = None
    steps_wide: bool = False
    gathers_in_hooks: bool = False
    needs_whole: bool = False


@cache
def groups() -> tuple[str, ...]:
    """The folders of conf/ in which a technique declares something, as conf/config.yaml names them."""
    defaults = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    named = [key for line in defaults if isinstance(line, dict) for key in line]
    return tuple(group for group in named if any(map(_declares, (CONF / group).glob("*.yaml"))))


def _declares(file: Path) -> bool:
    return re.search(r"^ *declares:", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def technique_of(node: BaseModel | None, group: str) -> Technique:
    """What the node of a group declares; None: it has none.

    Raises:
        Refused: a key that no technique declares.
    """
    return _technique(getattr(node, "declares", None) or {}, group)


@cache
def techniques(group: str) -> dict[str, Technique]:
    """name -> what it declares, of every yaml of the group.

    Raises:
        Refused: a key that no technique declares.
    """
    found = {}
    for file in sorted((CONF / group).glob("*.yaml")):
        said = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        found[file.stem] = _technique(said.get(group, said).get("declares") or {}, f"conf/{group}/{file.name}")
    return found


def _technique(said: Mapping, where: str) -> Technique:
    known = [one.name for one in fields(Technique)]
    if unknown := [key for key in said if key not in known]:
        raise Refused(f"{where}: declares.{unknown[0]} means nothing here. Declare one of {', '.join(known)}.")
    return Technique(**said)
