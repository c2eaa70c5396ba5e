"""Describes cards for the planner: how much of a card's memory a run can use, and how fast the card is.

A run can use less memory than a card's nominal size, because firmware reserves a part and the CUDA context takes
another part. The remaining memory is computed in one of three ways:

- conf/gpu.yaml lists cards by name, with the memory that torch reports and the size of the context.
- For a bare size such as 12GiB, the share SPARE is kept free, and the size of the context is assumed.
- For a card in this machine, CUDA reports the free memory. The free memory already excludes the context, so only the
  memory of kernels that are loaded later (LATER) is subtracted.

This module imports nothing heavy at its top.
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

SPARE = 0.02  # share of a bare size, such as 12GiB, that is kept free
# For a bare size, the context and LATER together are assumed to take this many bytes. Large cards need more: on an
# H200, 775 MiB in all.
CONTEXT = GIB // 2
COMMUNICATOR = 512 * MIB  # buffers of NCCL per process group: 0.5 to 1 GiB were reported (nccl#864, nccl#1685)
# bytes for kernels that are loaded at their first call: 20 to 70 MiB were published; 158 MiB were measured on an H200
LATER = 160 * MIB
# dtype -> the lowest compute capability with hardware for matmuls in this dtype. Cards without tensorfloat32 compute in
# fp32 instead, so every card accepts tensorfloat32.
MULTIPLIES = {"float32": 0.0, "tensorfloat32": 0.0, "float16": 0.0, "bfloat16": 8.0}
# Bytes of a cuBLAS workspace. torch's allocator keeps one workspace for each thread (and stream) that has run a matmul.
# The sizes are from getChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp, and were confirmed on an H200.
WORKSPACE, LARGE_WORKSPACE = 2 * 4 * MIB + 8 * MIB // 64, 32 * MIB
WITH_LARGE = (9, 10, 12)  # the major compute capabilities with a large workspace
REFERENCE = "rtx3060"  # the speeds of this card are assumed for a bare size if this machine has no card


class LinkBandwidth(NamedTuple):
    """The bandwidth of the bus between host and card.

    Args:
        up, down: bytes per second from host to card, and from card to host, while no bytes are copied in the other
            direction.
        duplex: share of `up` that remains while `down` runs at its full rate.
    """

    up: float
    down: float
    duplex: float


@dataclass(frozen=True)
class Card:
    """A card that a plan is made for.

    Args:
        size: bytes that a run may use, including `context_bytes`.
        says: description of the card and its size, for messages.
        context_bytes: bytes of `size` that torch's allocator cannot reserve, because CUDA uses them for its context and
            kernels.
        rates: keyword arguments for `lowmem.plan.cost.machine.Machine`, including the flops of `tensorfloat32`; None:
            use the rates measured on the card of this machine, or without a card the rates of REFERENCE.
        capability: CUDA compute capability, such as 8.6; None: unknown.
        name: name of the card in conf/gpu.yaml; None for other cards.
    """

    size: int
    says: str
    context_bytes: int = 0
    rates: Mapping[str, object] | None = None
    capability: float | None = None
    name: str | None = None

    def multiplies(self, dtype: str) -> bool:
        """Returns whether the card computes matmuls in this dtype without emulation (see MULTIPLIES); True if the
        card's compute capability is unknown. Emulated bf16 is slow: torch reports bf16 as supported, but a bf16 matmul
        takes twice as long as an fp32 matmul.

        Raises:
            Refused: MULTIPLIES does not list the dtype.
        """
        if dtype not in MULTIPLIES:
            raise Refused(
                f"It is not known which cards have matrix products in {dtype}. Add {dtype} to MULTIPLIES in "
                "lowmem/config/cards.py."
            )
        return self.capability is None or self.capability >= MULTIPLIES[dtype]


def card(name_or_size: str | int | None, key: str = "gpu") -> Card | None:
    """Returns the card for a name such as 'rtx3060' or a size such as '12GiB'. If `name_or_size` is None, returns None,
    which stands for the card in this machine. Error messages name `key`, the typed key.

    Raises:
        Refused: the value is neither a size nor a name of conf/gpu.yaml.
    """
    if name_or_size is None:
        return None
    if str(name_or_size).lower() in cards():
        return named(str(name_or_size).lower())
    usable = round((1 - SPARE) * cap.parse_bytes(name_or_size, key, plain=False))
    says = f"{name_or_size} ({usable / GIB:.2f} GiB usable, {SPARE:.0%} kept free), with the speed of an {REFERENCE}"
    return Card(usable, f"{says} unless this machine has a card", CONTEXT)


def here() -> Card:
    """Returns this process's CUDA device as a card. The card's size is the memory that is free now.

    Raises:
        Refused: this machine has no CUDA device.
    """
    import torch  # imported here, because commands use this module before they need torch

    if not torch.cuda.is_available():
        raise Refused(
            "device=cuda: this machine has no CUDA card whose free memory could be read. Type gpu=12GiB to plan "
            "for a card of that size."
        )
    major, minor = torch.cuda.get_device_capability()
    free, _ = torch.cuda.mem_get_info()
    says = f"that of this machine ({free / GIB:.2f} GiB are free, CUDA context excluded)"
    return Card(free, says, LATER, capability=major + minor / 10)


def named(name: str) -> Card:
    section = cards()[name]
    rates = {
        "flops": {dtype: 1e12 * rate for dtype, rate in section["tflops"].items()},
        "bandwidth": 1e9 * section["bandwidth"],
        "link": LinkBandwidth(1e9 * section["link"], 1e9 * section["link"], section["duplex"]),
        "peer": 1e9 * section["peer"],
        "network": 1e9 * section["network"],
    }
    context_bytes = section["context_mib"] * MIB + LATER
    says = f"{name} ({section['total_gib']:.2f} GiB, as torch reports it)"
    return Card(round(section["total_gib"] * GIB), says, context_bytes, rates, section["capability"], name)


def workspace(capability: float, deterministic: bool) -> int:
    """Returns the bytes of one cuBLAS workspace on a card of this CUDA compute capability. `deterministic` says whether
    the settings of `lowmem.system.deterministic` are in force, with which every card has the large workspace."""
    return LARGE_WORKSPACE if deterministic or int(capability) in WITH_LARGE else WORKSPACE


def nearest(word: object) -> list[str]:
    """Returns all names of cards: first the names that begin with `word`, then the other names. Both groups are sorted
    by similarity to `word`."""
    word = str(word).lower()
    return sorted(get_close_matches(word, cards(), len(cards()), 0), key=lambda name: not name.startswith(word))


@cache
def cards() -> Mapping[str, Mapping]:
    """Returns the sections of conf/gpu.yaml by name."""
    return yaml.safe_load((CONF / "gpu.yaml").read_text(encoding="utf-8"))
