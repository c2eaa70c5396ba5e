"""Tests memory.png: it is drawn from any measurements, in one unit, with consistent colours, and its texts do not
overlap."""

from itertools import combinations
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from lowmem.memory.tracker import Point
from lowmem.report import colours, picture
from lowmem.system.units import CATEGORIES, GIB, MIB

TITLE = (
    "model=tiny data=stdlib precision=16-master optim=paged_adamw8bit scheduler=cosine accumulation=effective_batch "
)
TITLE += "gradient_checkpointing=selective loss=chunked"
TYPED = " ".join(f"data.path=/a/folder/with/a/long/name/{i}" for i in range(20))


@pytest.fixture
def no_picture():
    """Overrides the fixture of conftest.py that replaces every picture by a pixel."""


def points(size: int = MIB) -> list[Point]:
    levels = [("forward", 1), ("forward", 3), ("backward", 5), ("backward", 2), ("step", 2)]
    return [Point(phase, dict.fromkeys(CATEGORIES, level * size), {}) for phase, level in levels]


def rows(size: int = MIB, cuda: bool = False) -> list[dict]:
    """Returns two rows of memory.csv for each of the steps 0 to 20: a row of the phase backward, with sampled live
    tensors in every fifth step, and a row of the phase evaluation."""
    found = []
    for step in range(21):
        row = {"step": step, "phase": "backward", "rss_peak_bytes": 800 * MIB + step, "held_bytes": 9 * size}
        if cuda:
            row |= {"allocated_peak_bytes": 26 * size, "reserved_peak_bytes": 30 * size}
        if step % 5 == 0:
            row |= {"live_peak_bytes": 25 * size} | {f"{category}_bytes": 5 * size for category in CATEGORIES}
        found += [row, {"step": step, "phase": "evaluation", "rss_peak_bytes": 1, "live_peak_bytes": 1}]
    return found


ON_DRIVE = {"read_gb_per_second": 12.345, "written_gb_per_second": None}


def with_drive(found: list[dict]) -> list[dict]:
    moved = {"drive_bytes": 40 * MIB, "drive_read_bytes": 30 * MIB, "drive_written_bytes": 35 * MIB}
    return [row | moved if row["phase"] == "backward" else row for row in found]


@pytest.fixture
def draw():
    """Yields a function that takes the arguments of `picture.drawn`, and returns a namespace with `figure` and each of
    its axes, under the label of the axes."""
    figures = []

    def make(*what, title: str = TITLE, **more):
        figures.append(picture.drawn(*what, title, **more))
        return SimpleNamespace(figure=figures[-1], **{one.get_label(): one for one in figures[-1].axes})

    yield make
    for figure in figures:
        picture.plt.close(figure)


def overlaps(figure) -> list[tuple[str, str]]:
    """Returns (text, text) for overlapping texts, and (text, "the edge") for texts that exceed the picture. Texts of
    legends and axes are included."""
    figure.canvas.draw()
    beyond = {
        label  # matplotlib creates ticks beyond the ends of an axis, but does not draw them
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not axis.get_view_interval()[0] <= tick.get_loc() <= axis.get_view_interval()[1]
        for label in (tick.label1, tick.label2)
    }
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in beyond]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts]
    width, height = figure.canvas.get_width_height()
    leaving = [(said, "the edge") for said, b in boxes if b.x0 < 0 or b.x1 > width or b.y0 < 0 or b.y1 > height]
    return leaving + [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]


@pytest.mark.parametrize("timeline", [points(), []], ids=["sampled", "not sampled"])
@pytest.mark.parametrize("measured", [rows(), [], rows()[:1]], ids=["measured", "nothing", "one row"])
def test_memory_picture_is_written_as_png_with_many_few_or_no_measurements(tmp_path, timeline, measured):
    picture.memory_picture(tmp_path / "memory.png", measured, timeline, "a run")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("size", "name", "peak"), [(MIB, "MiB", "25.0 MiB"), (GIB, "GiB", "25.000 GiB")])
def test_memory_picture_uses_the_unit_of_the_device_peak(draw, size, name, peak):
    shown = draw(rows(size), points(size))
    assert {axes.get_ylabel() for axes in shown.figure.axes} == {name}
    assert any(f"peak {peak} in backward" in text.get_text() for text in shown.inside.texts)
    assert {text.get_text().strip() for text in shown.inside.texts} >= {"forward", "backward", "step"}
    (resident,) = shown.process.lines
    assert max(resident.get_ydata()) == pytest.approx(800 * MIB / size, rel=1e-3)


def test_memory_picture_uses_category_colours_for_areas_only(draw):
    shown = draw(rows(cuda=True), points())
    for axes in (shown.inside, shown.device):
        assert [to_hex(area.get_facecolor()[0]) for area in axes.collections] == [*colours.OF_CATEGORY.values()]
    legend = [text.get_text() for text in shown.inside.get_legend().get_texts()]
    assert legend == ["weights", "gradients", "optimizer state", "activations", "temporaries"]
    lines = {to_hex(line.get_color()) for axes in (shown.device, shown.process) for line in axes.lines}
    assert lines == {colours.INK} and not lines & set(colours.OF_CATEGORY.values())
    # the second colour of matplotlib's default cycle would look like "gradients"
    assert colours.INK not in picture.plt.rcParams["axes.prop_cycle"].by_key()["color"]


def test_memory_picture_shows_sampled_steps_without_evaluation(draw):
    shown = draw(rows(), points())
    (sampled,) = shown.device.lines
    assert list(sampled.get_xdata()) == [0, 5, 10, 15, 20] and set(sampled.get_ydata()) == {25.0}
    unsampled = [{k: v for k, v in row.items() if "live" not in k} for row in rows()]
    (held,) = draw(unsampled, []).device.lines  # compiled code: live tensors are not sampled
    assert set(held.get_ydata()) == {9.0}


def test_memory_picture_has_a_drive_panel_only_with_a_drive(draw):
    shown = draw(with_drive(rows()), points(), on_drive=ON_DRIVE)
    stored, read, written = (line.get_ydata() for line in shown.drive.lines)
    assert (set(stored), set(read), set(written)) == ({40.0}, {30.0}, {35.0})
    assert {to_hex(line.get_color()) for line in shown.drive.lines} == {colours.INK}
    assert [line.get_label() for line in shown.drive.lines] == ["stored", "read, 12.35 GB/s", "written, - GB/s"]
    without = draw(rows(), points())
    assert [axes.get_label() for axes in without.figure.axes] == ["inside", "device", "process"]
    assert tuple(without.figure.get_size_inches()) == (13, 6)


@pytest.mark.parametrize("limit", [None, 30 * MIB, 300 * MIB])
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("on_drive", [None, ON_DRIVE], ids=["memory", "drive"])
def test_texts_of_the_memory_picture_do_not_overlap(draw, limit, cuda, on_drive):
    shown = draw(with_drive(rows(cuda=cuda)), points(), typed=TYPED, limit=limit, on_drive=on_drive)
    assert overlaps(shown.figure) == []


@pytest.mark.wrong
@pytest.mark.rows("phase")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda figure: figure.suptitle(TITLE + TITLE),  # not wrapped
        lambda figure: figure.legend(figure.axes[0].get_legend().get_patches(), CATEGORIES, loc="upper center"),
        lambda figure: figure.axes[0].text(0.01, 0.97, "the device's limit", transform=figure.axes[0].transAxes),
    ],
    ids=["title", "legend", "phase"],
)
def test_check_of_the_memory_picture_finds_overlapping_texts(draw, spoil):
    figure = draw(rows(), points(), typed=TYPED).figure
    spoil(figure)
    assert overlaps(figure)


@pytest.mark.parametrize(("limit", "line"), [(30 * MIB, True), (300 * MIB, False)])
def test_near_memory_limit_is_drawn_as_a_line_and_a_distant_one_as_text(draw, limit, line):
    high = draw(rows(), points()).inside.get_ylim()[1]
    shown = draw(rows(), points(), limit=limit)
    for axes in (shown.inside, shown.device):
        assert axes.get_ylim()[1] <= 1.5 * high
        assert any(drawn.get_ydata()[0] == limit / MIB for drawn in axes.lines) == line
        (said,) = [text.get_text() for text in axes.texts if "limit" in text.get_text()]
        assert f"{limit / MIB:.0f} MiB" in said and ("far above" in said) != line


def test_memory_picture_of_a_long_run_keeps_the_highest_steps():
    steps = 20_000
    every = [
        {"step": step, "phase": phase, "held_bytes": step % 997, "rss_peak_bytes": (7 * step + size) % 1009}
        for step in range(steps)
        for phase, size in (("forward", 1), ("backward", 2))
    ]
    kept = picture.thinned(iter(every), steps - 1)
    assert len(kept) <= 2 * len(picture.COLUMNS) * picture.STRETCHES
    for column in ("held_bytes", "rss_peak_bytes"):
        assert max(row[column] for row in kept) == max(row[column] for row in every)
    assert [row for row in every[: 2 * 60] if row in kept] == [row for row in kept if row["step"] < 60]
    assert picture.thinned(iter(every[:100]), 49) == every[:100]  # a short run keeps all rows
