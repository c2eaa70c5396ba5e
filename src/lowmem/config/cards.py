"""Cards: how much of their memory a run can use, and how fast they are.

A run can use less than a card's name says: firmware reserves some of its memory, and CUDA's context takes some more.
conf/gpu.yaml lists cards by name, with the memory that torch reports and the bytes of the context. For a bare size such
as 12GiB a share stays free and the context is assumed. For a card in this machine CUDA reports the free memory, from
which the context is already subtracted, so that it is counted once. This module imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

import yaml

from lowmem.config.typed_lines import CONF
from lowmem.memory import cap
from lowmem.system.errors import Refused
from lowmem.system.units import GIB, MIB

SPARE = 0.02  # share of a bare size that stays free
CONTEXT = GIB // 2  # assumed for a card without a name, LATER included; the few that have more are the largest
COMMUNICATOR = 512 * MIB  # of NCCL, for each group of ranks that exchange: 0.5 to 1 GiB were seen (nccl#864, nccl#1685)
LATER = 160 * MIB  # for kernels that load at their first call: 20 to 70 MiB were published, an H200 took 158
# The first compute capability whose cards multiply in a dtype. One without tensorfloat32 computes it in fp32.
MULTIPLIES = {"float32": 0.0, "tensorfloat32": 0.0, "float16": 0.0, "bfloat16": 8.0}
# Bytes of cuBLAS's workspace, which torch's allocator holds once for each thread that has multiplied matrices:
# getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp, measured on an H200
WORKSPACE, LARGE_WORKSPACE = 2 * 4 * MIB + 8 * MIB // 64, 32 * MIB
WITH_LARGE = (9, 10, 12)  # the major compute capabilities with a large one
REFERENCE = "rtx3060"  # its rates are assumed for a bare size if no card is here


class Link(NamedTuple):
    """The link between host and card. Args: up, down: bytes per second to the card and from it, one direction alone;
    duplex: share of `up` that is left while other bytes come down at their full rate."""

    up: float
    down: float
    duplex: float


@dataclass(frozen=True)
class Card:
    """Describes a card that a plan is made for.

    Args: size: bytes that a run may need; says: a name for these bytes; context_bytes: bytes that torch cannot reserve;
    rates: arguments of `lowmem.plan.cost.machine.Machine`, with `tensorfloat32` among its flops; None: as measured on
    the card of this machine, or those of REFERENCE; name: the card whose rates they are.
    """

    size: int
    says: str
    context_bytes: int = 0
    rates: Mapping[str, object] | None = None
    capability: float | None = None
    name: str | None = None

    def multiplies(self, dtype: str) -> bool:
        """Returns whether the card multiplies in this dtype itself. Others emulate it: torch reports bf16 as supported
        on them, and takes twice the time of fp32."""
        if dtype not in MULTIPLIES:
            raise Refused(
                f"It is not known which cards have matrix products in {dtype}. Add {dtype} to MULTIPLIES in "
                "lowmem/config/cards.py."
            )
        return self.capability is None or self.capability >= MULTIPLIES[dtype]


def card(name_or_size: str | int | None, key: str = "gpu") -> Card | None:
    """Returns the card for 'rtx3060' or '12GiB'; None, if none was typed, stands for the card in this machine.

    Raises:
        Refused: neither a size nor a name of conf/gpu.yaml.
    """
    if name_or_size is None:
        return None
    if str(name_or_size).lower() in cards():
        return named(str(name_or_size).lower())
    size, says = cap.parse_bytes(name_or_size, key, plain=False), f"{name_or_size}, {SPARE:.0%} of it kept free"
    return Card(round((1 - SPARE) * size), f"{says}, with the times of an {REFERENCE} if none is here", CONTEXT)


def here() -> Card:
    """Returns this process's CUDA device with the memory that others leave free.

    Raises:
        Refused: there is no CUDA device.
    """
    import torch  # not above: a command reads sizes before it needs torch

    if not torch.cuda.is_available():
        raise Refused(
            "device=cuda: this machine has no CUDA card whose free memory could be read. Type gpu=12GiB to plan "
            "for a card of that size."
        )
    major, minor = torch.cuda.get_device_capability()
    says = "what is free on the card of this machine, without CUDA's context"
    return Card(torch.cuda.mem_get_info()[0], says, LATER, capability=major + minor / 10)


def named(name: str) -> Card:
    section = cards()[name]
    rates = {
        "flops": {dtype: 1e12 * rate for dtype, rate in section["tflops"].items()},
        "bandwidth": 1e9 * section["bandwidth"],
        "link": Link(1e9 * section["link"], 1e9 * section["link"], section["duplex"]),
        "peer": 1e9 * section["peer"],
        "network": 1e9 * section["network"],
    }
    context_bytes = section["context_mib"] * MIB + LATER
    says = f"{name}, as torch reports it"
    return Card(round(section["total_gib"] * GIB), says, context_bytes, rates, section["capability"], name)


def workspace(capability: float, deterministic: bool) -> int:
    """Returns the bytes of cuBLAS's workspace. Args: deterministic: see `lowmem.system.deterministic`."""
    return LARGE_WORKSPACE if deterministic or int(capability) in WITH_LARGE else WORKSPACE


def nearest(word: object) -> list[str]:
    """Returns all names: first those that begin with `word`, then those with a similar spelling."""
    word = str(word).lower()
    return sorted(get_close_matches(word, cards(), len(cards()), 0), key=lambda name: not name.startswith(word))


@cache
def cards() -> Mapping[str, Mapping]:
    """Returns the sections of conf/gpu.yaml by name."""
    return yaml.safe_load((CONF / "gpu.yaml").read_text(encoding="utf-8"))
