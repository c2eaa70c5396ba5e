"""memory.png is drawn from whatever was measured."""

import pytest

from lowmem.memory.tracker import Point
from lowmem.report import picture
from lowmem.units import CATEGORIES


def points():
    levels = [("forward", 1), ("forward", 3), ("backward", 5), ("backward", 2), ("step", 2)]
    return [Point(phase, dict.fromkeys(CATEGORIES, level << 20)) for phase, level in levels]


@pytest.mark.parametrize("timeline", [points(), []], ids=["sampled", "not sampled"])
def test_it_is_a_picture(tmp_path, timeline):
    rows = [{"step": s, "phase": "step", "rss_peak_bytes": 2**30 + s, "live_peak_bytes": 2**20} for s in range(5)]
    picture.memory_picture(tmp_path / "memory.png", rows, timeline, "a run")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_it_marks_the_peak_and_its_phase(tmp_path):
    figure, axes = picture.plt.subplots()
    picture._inside_one_step(axes, points())
    said = [text.get_text() for text in axes.texts]
    assert any("peak 0.024 GiB in backward" in s for s in said)
    assert {s.strip() for s in said} >= {"forward", "backward", "step"}
    picture.plt.close(figure)


@pytest.mark.parametrize(("limit", "line"), [(0.03, True), (0.3, False)])
def test_the_limit_is_a_line_where_it_is_near_and_a_word_where_it_would_flatten_the_rest(limit, line):
    figure, axes = picture.plt.subplots()
    picture._inside_one_step(axes, points())
    high = axes.get_ylim()[1]
    picture._mark_limit(axes, limit)
    assert axes.get_ylim()[1] <= 1.5 * high
    assert any(drawn.get_ydata()[0] == limit for drawn in axes.lines) == line
    (said,) = [text.get_text() for text in axes.texts if "limit" in text.get_text()]
    assert f"{limit:.2f} GiB" in said and ("far above" in said) != line
    picture.plt.close(figure)
