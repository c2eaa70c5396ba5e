"""Counts what a device exchanges with others, from the calls of its engine: bytes over the links inside a node, and
over the links between nodes.

The bytes that must arrive are counted, the least that any library can do, not how a library moves them. In an
all-gather of S bytes over n ranks each rank must receive S (n - 1) / n. Bytes from other nodes enter a node once, over
the links of all its ranks. An all-reduce needs twice as much (Patarasu and Yuan 2009): a reduce-scatter and then an
all-gather.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lowmem.system.torch_private import OpOverload, group_of, schema, tree_leaves

EARLIER = "earlier "  # prefix of a phase: the micro-batch is not its window's last
NODE = 8  # devices per node
# torch's namespaces: engines call `c10d` and go on without waiting; a DTensor calls `_c10d_functional` and waits
SPACES = ("c10d", "_c10d_functional")
GATHERS, ADDS, BOTH, ENDS = "gather", "reduce", "both", ("send", "receive")
KINDS = {
    "allgather": GATHERS,
    "all_gather": GATHERS,
    "reduce_scatter": ADDS,
    "allreduce": BOTH,
    "all_reduce": BOTH,
    "send": "send",
    "recv": "receive",
}


class Sent(NamedTuple):
    """Identifies a kind of call. Args: ranks: those that take part; waits: whether the calling device waits."""

    kind: str
    ranks: tuple[int, ...]
    waits: bool


class Traffic(NamedTuple):
    """Holds the bytes that a device receives over the links inside its node, and over those from other nodes."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def times(self, factor: float) -> "Traffic":
        return Traffic(self.inside * factor, self.between * factor)


NOTHING = Traffic()


def sent(func: OpOverload, args: Sequence, out: object) -> tuple[Sent, int] | None:
    """Returns (kind of call, bytes of the full tensor that is gathered, added or sent); None: nothing is exchanged."""
    if func.namespace not in SPACES:
        return None
    name = schema(func).name.split("::")[1].strip("_")
    kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
    if kind is None:
        return None
    arguments = {argument.name: value for argument, value in zip(schema(func).arguments, args, strict=False)}
    ranks = tuple(dist.get_process_group_ranks(group_of(arguments.get("process_group", arguments.get("group_name")))))
    if kind in ENDS:
        ranks = (dist.get_rank(), ranks[arguments.get("dst", arguments.get("src"))])
    full = max(sum(t.nbytes for t in tree_leaves(value) if isinstance(t, Tensor)) for value in (*args, out))
    return Sent(kind, ranks, func.namespace != "c10d"), full


def traffic(call: Sent, full: float, node: int) -> Traffic:
    """Returns what one device receives in a call. Args: node: devices per node; consecutive ranks share a node."""
    size, nodes = len(call.ranks), Counter(rank // node for rank in call.ranks)
    if call.kind in ENDS:
        return Traffic(full, 0.0) if len(nodes) == 1 else Traffic(0.0, full)
    between = full * (1 - 1 / len(nodes)) / max(nodes.values())
    once = Traffic(full * (size - 1) / size - between, between)
    return once.times(2) if call.kind == BOTH else once


def by_phase(calls: Mapping[tuple[str, Sent], float], node: int) -> dict[tuple[str, bool], Traffic]:
    """Returns (phase, whether the device waits) -> traffic. Args: calls: (phase, kind of call) -> full bytes."""
    received: dict[tuple[str, bool], Traffic] = {}
    for (phase, call), full in calls.items():
        key = phase, call.waits
        received[key] = received.get(key, NOTHING) + traffic(call, full, node)
    return received


def of_window(calls: Mapping[tuple[str, Sent], float], micro_batches: int, node: int) -> Traffic:
    """Returns what a device exchanges in an optimizer step."""
    phases = by_phase(calls, node).items()
    return sum((received.times(how_often(phase, micro_batches)) for (phase, _), received in phases), start=NOTHING)


def how_often(phase: str, micro_batches: int) -> int:
    """Returns how often a phase occurs in a window."""
    return micro_batches - 1 if phase.startswith(EARLIER) else 1
