"""Describes the card, and measures the rates that the planner uses: products, memory, and the link in both directions.

`lowmem.plan` measures them itself and stores them for a week, so that a plan on this machine uses them.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.card.case import Here

BYTES = 1 << 30  # that are copied over the link at once


def rates(here: Here) -> Iterator[dict]:
    """Yields one row with the measured rates in `found`."""
    from lowmem.plan.cost.machine import machine

    this = machine(on_card=here.on_card)
    known = asdict(this) | {"host": None}
    found = {f"{dtype} TFLOPS": rate / 1e12 for dtype, rate in this.flops.items()}
    found |= {"memory GB/s": this.bandwidth / 1e9, "microseconds per operator": 1e6 * this.overhead}
    if this.link:
        found |= {"link GB/s": this.link / 1e9, "share of it against the other direction": this.against}
    yield {"run": "rates", "by": "lowmem", "found": found, "rates": json.loads(json.dumps(known))}
