"""Tests that memory_step.csv and memory.png have a bounded number of points, among them the peak of the step."""

import csv

import pytest

from lowmem.memory import tracker
from lowmem.memory.tracker import Point
from lowmem.system.units import CATEGORIES


@pytest.mark.parametrize("count", [0, 1, 1999, 2000, 2001, 12345])
def test_thinned_memory_timeline_keeps_the_peak_of_each_phase(count):
    levels = [(7919 * i) % 1009 for i in range(count)]
    phases = ["forward" if i < count // 2 else "step" for i in range(count)]  # both phases have high points
    timeline = [Point(phase, dict.fromkeys(CATEGORIES, size), {}) for phase, size in zip(phases, levels, strict=True)]
    kept = list(tracker.thinned(iter(timeline), count))
    assert len(kept) <= tracker.MOST + 1 and (count > tracker.MOST or kept == timeline)
    assert tracker.highest(kept) == tracker.highest(timeline)


def test_memory_timeline_of_a_long_window_is_bounded_and_keeps_its_peak(fit, monkeypatch):
    """Each point takes 300 bytes of host memory, and time when the picture is drawn."""
    drawn = []
    monkeypatch.setattr(tracker, "MOST", 50)
    monkeypatch.setattr("lowmem.report.picture.memory_picture", lambda _, rows, timeline, *more: drawn.append(timeline))
    summary, _ = fit("max_steps=1", "batch_size=1", "accumulation=fixed", "accumulation.batches=4")
    (timeline,) = drawn
    assert len(timeline) <= 50 + 2 * 4 + 1  # each micro-batch begins two phases
    assert max(point.total for point in timeline) == summary["peak_bytes"]["device"]


def test_memory_step_csv_has_the_peak_and_phases_of_a_step(fit):
    summary, folder = fit("gradient_checkpointing=every_layer")
    with (folder / "memory_step.csv").open() as file:
        rows = list(csv.DictReader(file))
    totals = [sum(int(row[f"{category}_bytes"]) for category in CATEGORIES) for row in rows]
    assert max(totals) == summary["peak_bytes"]["device"]
    assert list(dict.fromkeys(row["phase"] for row in rows)) == ["forward", "backward", "step"]
