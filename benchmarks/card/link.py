"""Measures the rates that the planner uses: of matmuls, of memory, and of the link in each direction.

The rates are stored for a week, and plans on this machine use them. The planner can measure these rates itself, except
for the rate of copies to the card while other copies run from the card. It assumes that this rate is a fixed share of
the link's rate.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from benchmarks.card.case import Here
from lowmem.plan.cost.machine import measured, store

FLOATS = 1 << 25  # fp32 numbers per copy over the link
OTHER_WAY = 4  # number of copies from the card during one copy to the card; together they take longer than that copy


def rates(here: Here) -> Iterator[dict]:
    """Yields a row with the measured rates."""
    this = measured(here.on_card)
    found = {f"{dtype} TFLOPS": rate / 1e12 for dtype, rate in this.flops.items()}
    found["memory GB/s"] = this.bandwidth / 1e9
    if this.link:
        duplex = min(1.0, 4 * FLOATS / this.link.up / seconds_both_ways())
        this = replace(this, link=this.link._replace(duplex=duplex))
        store(this, here.on_card)
        found |= {"link GB/s up": this.link.up / 1e9, "link GB/s down": this.link.down / 1e9}
        found["share of the link up while copies come down"] = duplex
    yield {"run": "rates", "by": "lowmem", "found": found, "rates": asdict(this)}


def seconds_both_ways() -> float:
    """Times copies to a card while other copies run from the card on a second stream. Only the copy to the card is
    timed, as in nvbandwidth (its issues 11, 15 and 53 explain why). Returns the seconds of the fastest of five copies
    after a warm-up copy."""
    down, up, taken = torch.cuda.Stream(), torch.cuda.Stream(), []
    pinned, received = (torch.empty(FLOATS, pin_memory=True) for _ in range(2))
    sent, to = (torch.empty(FLOATS, device="cuda") for _ in range(2))
    for _ in range(6):
        torch.cuda.synchronize()
        with torch.cuda.stream(down):
            for _ in range(OTHER_WAY):
                received.copy_(sent, non_blocking=True)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(up):
            start.record()
            to.copy_(pinned, non_blocking=True)
            end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    return min(taken[1:])
