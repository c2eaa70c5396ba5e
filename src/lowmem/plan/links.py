"""What a device exchanges with others, counted from the calls of its engine: bytes over the links inside a node, and
over those between nodes.

Not how a library does it is counted but what must arrive, the least that any can do. Of a whole of S bytes that n ranks
hold in parts, each must receive S (n - 1) / n; what is not in its node comes once, over the links of all who are in it.
A sum that each holds in part and then has whole is twice that (Patarasu and Yuan 2009): it is added in parts, and those
are gathered.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lowmem.internals import OpOverload, group_of, schema, tree_leaves

EARLIER = "earlier "  # in front of a phase: of a micro-batch that is not its window's last
NODE = 8  # devices of a node
# torch's names, by what they do; `c10d` is what engines call, which go on, `_c10d_functional` what a DTensor waits for
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
    """A kind of call. Args: ranks: that take part; waits: whether the device that calls it does."""

    kind: str
    ranks: tuple[int, ...]
    waits: bool


class Traffic(NamedTuple):
    """Bytes that a device receives, or seconds: over the links of its node; over those of its node to others."""

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.inside + other.inside, self.between + other.between)

    def times(self, factor: float) -> "Traffic":
        return Traffic(self.inside * factor, self.between * factor)


NOTHING = Traffic()


def sent(func: OpOverload, args: Sequence, out: object) -> tuple[Sent, int] | None:
    """(what an operator exchanges, bytes of the whole that is gathered, added or sent); None: nothing."""
    if func.namespace not in SPACES:
        return None
    name = schema(func).name.split("::")[1].strip("_")
    kind = next((kind for said, kind in KINDS.items() if name.startswith(said)), None)
    if kind is None:
        return None
    given = {argument.name: value for argument, value in zip(schema(func).arguments, args, strict=False)}
    ranks = tuple(dist.get_process_group_ranks(group_of(given.get("process_group", given.get("group_name")))))
    if kind in ENDS:
        ranks = (dist.get_rank(), ranks[given.get("dst", given.get("src"))])
    whole = max(sum(t.nbytes for t in tree_leaves(part) if isinstance(t, Tensor)) for part in (*args, out))
    return Sent(kind, ranks, func.namespace != "c10d"), whole


def traffic(one: Sent, whole: float, node: int) -> Traffic:
    """Args: node: devices of one node; ranks that follow each other share it."""
    size, nodes = len(one.ranks), Counter(rank // node for rank in one.ranks)
    if one.kind in ENDS:
        return Traffic(whole, 0.0) if len(nodes) == 1 else Traffic(0.0, whole)
    between = whole * (1 - 1 / len(nodes)) / max(nodes.values())
    once = Traffic(whole * (size - 1) / size - between, between)
    return once.times(2) if one.kind == BOTH else once


def by_phase(calls: Mapping[tuple[str, Sent], float], node: int) -> dict[tuple[str, bool], Traffic]:
    """(phase, whether the device waits) -> what it exchanges. Args: calls: -> bytes of the whole."""
    found: dict[tuple[str, bool], Traffic] = {}
    for (phase, one), whole in calls.items():
        key = phase, one.waits
        found[key] = found.get(key, NOTHING) + traffic(one, whole, node)
    return found


def of_window(calls: Mapping[tuple[str, Sent], float], micro_batches: int, node: int) -> Traffic:
    """What a device exchanges in an optimizer step."""
    parts = by_phase(calls, node).items()
    return sum((part.times(how_often(phase, micro_batches)) for (phase, _), part in parts), start=NOTHING)


def how_often(phase: str, micro_batches: int) -> int:
    """How often it is gone through in a window."""
    return micro_batches - 1 if phase.startswith(EARLIER) else 1
