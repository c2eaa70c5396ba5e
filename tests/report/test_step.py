"""memory_step.csv has every peak of a step, in at most so many rows."""

import csv

import pytest

from lowmem.memory.tracker import Point
from lowmem.report import step
from lowmem.system.units import CATEGORIES


@pytest.mark.parametrize("count", [0, 1, 1999, 2000, 2001, 12345])
def test_no_peak_is_lost(count):
    levels = [(7919 * i) % 1009 for i in range(count)]
    timeline = [Point("forward", dict.fromkeys(CATEGORIES, level)) for level in levels]
    kept = [point.bytes["weights"] for point in step.thinned(timeline)]
    assert len(kept) <= 2000 and (count > 2000 or kept == levels)
    assert max(kept, default=0) == max(levels, default=0)


@pytest.mark.wrong
def test_a_run_leaves_the_step_that_its_picture_shows(fit):
    summary, folder = fit("gradient_checkpointing=every_layer")
    with (folder / "memory_step.csv").open() as file:
        rows = list(csv.DictReader(file))
    totals = [sum(int(row[f"{category}_bytes"]) for category in CATEGORIES) for row in rows]
    assert max(totals) == summary["peak_bytes"]["device"]
    assert list(dict.fromkeys(row["phase"] for row in rows)) == ["forward", "backward", "step"]
