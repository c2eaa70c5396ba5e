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

import yaml

from lowmem.config.typed_lines import CONF
from lowmem.memory import cap
from lowmem.system.errors import Refused
from lowmem.system.units import GIB, MIB

KEPT = 0.02  # of a bare size
CONTEXT = GIB // 2  # assumed for a card without a name, LATER included; the few that have more are the largest
COMMUNICATOR = 512 * MIB  # of NCCL, for each group of ranks that exchange: 0.5 to 1 GiB were seen (nccl#864, nccl#1685)
LATER = 128 * MIB  # kernels that load when they are first called, 20 to 70 MiB, and cuBLAS's workspace, 16 to 64
REACHED = 0.85  # of the bandwidth of a data sheet
OVERHEAD = 5e-6  # seconds per operator
# The first compute capability whose cards multiply in a dtype. One without tensorfloat32 computes it in fp32.
MULTIPLIES = {"float32": 0.0, "tensorfloat32": 0.0, "float16": 0.0, "bfloat16": 8.0}
REFERENCE = "rtx3060"  # whose rates are those of a card without a name that is not here


@dataclass(frozen=True)
class Card:
    """A card that a plan is made for.

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
                f"Which cards multiply in {dtype} is not known: MULTIPLIES in lowmem/config/cards.py lacks it."
            )
        return self.capability is None or self.capability >= MULTIPLIES[dtype]


def card(asked: str | int | None, key: str = "gpu") -> Card | None:
    """Returns the card for 'rtx3060' or '12GiB'; None, if none was typed, stands for the card in this machine.

    Raises:
        Refused: neither a size nor a name of conf/gpu.yaml.
    """
    if asked is None:
        return None
    if str(asked).lower() in cards():
        return named(str(asked).lower())
    size, says = cap.parse_bytes(asked, key, plain=False), f"{asked}, {KEPT:.0%} of it kept free"
    return Card(round((1 - KEPT) * size), f"{says}, with the times of an {REFERENCE} if none is here", CONTEXT)


def here() -> Card:
    """Returns this process's CUDA device with the memory that others leave free.

    Raises:
        Refused: there is no CUDA device.
    """
    import torch  # not above: sizes are read before it is needed

    if not torch.cuda.is_available():
        raise Refused("device=cuda: no card is here that could say what is free. Type gpu=12GiB for one in mind.")
    major, minor = torch.cuda.get_device_capability()
    says = "what is free of the one that is here, CUDA's context taken off"
    return Card(torch.cuda.mem_get_info()[0], says, LATER, capability=major + minor / 10)


def named(name: str) -> Card:
    said = cards()[name]
    rates = {
        "flops": {kind: 1e12 * rate for kind, rate in said["tflops"].items()},
        "bandwidth": REACHED * 1e9 * said["bandwidth"],
        "overhead": OVERHEAD,
        "link": 1e9 * said["link"],
        "against": said["against"],
        "peer": 1e9 * said["peer"],
        "network": 1e9 * said["network"],
    }
    context_bytes = said["context_mib"] * MIB + LATER
    says = f"{name}, as torch reports it"
    return Card(round(said["total_gib"] * GIB), says, context_bytes, rates, said["capability"], name)


def nearest(word: object) -> list[str]:
    """Returns all names: first those that begin with `word`, then those with a similar spelling."""
    word = str(word).lower()
    return sorted(get_close_matches(word, cards(), len(cards()), 0), key=lambda name: not name.startswith(word))


@cache
def cards() -> Mapping[str, Mapping]:
    """Returns the sections of conf/gpu.yaml by name."""
    return yaml.safe_load((CONF / "gpu.yaml").read_text(encoding="utf-8"))
