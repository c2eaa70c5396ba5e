"""Counts the bytes that a device receives from other devices in collectives, sends and receives: over the links inside
its node, and over the links between nodes.

The count is a lower bound, which does not depend on the algorithm of the communication library. For a full tensor of
S bytes and n ranks, the bytes per rank are:

    all-gather, reduce-scatter    S (n - 1) / n
    all-reduce                    2 S (n - 1) / n    (a reduce-scatter, then an all-gather)
    send, receive                 S                  (the sending rank counts S, too)

A node receives each byte from other nodes once (twice in an all-reduce), and its ranks receive equal shares of these
bytes. Source: Patarasu and Yuan 2009.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lowmem.system.torch_private import OpOverload, group_of, schema, tree_leaves

EARLIER = "earlier "  # prefix of a phase: work of the micro-batches before the last one of their window
NODE = 8  # default number of devices per node
# Namespaces of collectives. Strategies call `c10d` asynchronously. A DTensor calls `_c10d_functional` and waits.
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


class Collective(NamedTuple):
    """The properties of a collective, a send or a receive, apart from the size of its tensor.

    Args:
        kind: "gather", "reduce" (reduce-scatter), "both" (all-reduce), "send" or "receive".
        ranks: the participating ranks.
        waits: whether the device waits for the result.
    """

    kind: str
    ranks: tuple[int, ...]
    waits: bool


class Traffic(NamedTuple):
    """Bytes that a device receives: from devices of its node (`inside`), and from other nodes (`between`)."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def times(self, factor: float) -> "Traffic":
        return Traffic(self.inside * factor, self.between * factor)


NOTHING = Traffic()


def sent(func: OpOverload, args: Sequence, out: object) -> tuple[Collective, int] | None:
    """Returns the properties of a collective, a send or a receive, and the bytes of its full tensor. None: the operator
    is not one of KINDS. Args: func, args, out: an operator, its arguments and its result."""
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
    return Collective(kind, ranks, func.namespace != "c10d"), full


def traffic(call: Collective, full: float, node: int) -> Traffic:
    """Returns the bytes that one device receives in a collective or a receive, or the bytes that it sends in a send.
    Args: full: bytes of the full tensor; node: devices per node (consecutive ranks share a node)."""
    size, nodes = len(call.ranks), Counter(rank // node for rank in call.ranks)
    if call.kind in ENDS:
        return Traffic(full, 0.0) if len(nodes) == 1 else Traffic(0.0, full)
    between = full * (1 - 1 / len(nodes)) / max(nodes.values())
    once = Traffic(full * (size - 1) / size - between, between)
    return once.times(2) if call.kind == BOTH else once


def by_phase(calls: Mapping[tuple[str, Collective], float], node: int) -> dict[tuple[str, bool], Traffic]:
    """Sums the traffic of each phase. Args: calls: (phase, collective) -> bytes of the full tensors; node: devices per
    node. Returns: (phase, whether the device waits) -> traffic."""
    received: dict[tuple[str, bool], Traffic] = {}
    for (phase, call), full in calls.items():
        key = phase, call.waits
        received[key] = received.get(key, NOTHING) + traffic(call, full, node)
    return received


def of_window(calls: Mapping[tuple[str, Collective], float], micro_batches: int, node: int) -> Traffic:
    """Returns the bytes that a device receives during an optimizer step. Args: calls, node: see `by_phase`;
    micro_batches: number of micro-batches in the window."""
    phases = by_phase(calls, node).items()
    return sum((received.times(how_often(phase, micro_batches)) for (phase, _), received in phases), start=NOTHING)


def how_often(phase: str, micro_batches: int) -> int:
    """Returns the number of times that a phase occurs in a window."""
    return micro_batches - 1 if phase.startswith(EARLIER) else 1
