"""Tests the comparison page: it is legible with fifty runs of long names, on a desktop and on a phone. Tests that need
Chromium are skipped if it is not installed."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

import browser
from lowmem.report import colours, folders
from lowmem.report.compare import charts, compare
from lowmem.report.compare.figures import front, read
from lowmem.report.compare.labels import labels
from lowmem.system.units import CATEGORIES, GIB, MIB, unit
from made_runs import finished


def written(folder) -> str:
    compare.main([str(folder)])
    return (folder / "comparison.html").read_text()


# --- without a browser -------------------------------------------------------------------------------------------


def test_comparison_page_is_self_contained_and_escapes_error_messages(sweep):
    own = written(sweep).replace(get_plotlyjs(), "")
    assert not re.search(r"""(src|href)=["']|https?://""", own)
    assert own.count("</script>") == own.count("<script") and "ZeroDivisionError: &lt;/script&gt;&lt;b&gt;" in own


def test_script_tag_in_a_run_label_is_escaped_on_the_comparison_page(sweep):
    summary = json.loads((sweep / "0" / "summary.json").read_text())
    summary["overrides"][0] = "data.path=</script><img src=x>"
    (sweep / "0" / "summary.json").write_text(json.dumps(summary))
    own = written(sweep).replace(get_plotlyjs(), "")
    assert own.count("</script>") == own.count("<script") and "<img" not in own


def test_comparison_page_uses_one_unit_of_memory(sweep, fifty):
    for folder, name, other in ((sweep, "MiB", "GiB"), (fifty, "GiB", "MiB")):
        own = written(folder).replace(get_plotlyjs(), "")
        assert name in own and other not in own
    assert unit(GIB - 1)[:2] == (MIB, "MiB") and unit(GIB)[:2] == (GIB, "GiB")


def drawn(folder, count: int):
    """Yields (name, figure) of each chart of the first `count` runs."""
    runs = folders.runs_below(folder)[:count]
    names = [str(i) for i in range(count)]
    every = [*map(read, runs, names, labels(runs, names))]
    best, size = front(every), unit(GIB)
    charts.paint(every, best)
    yield "pareto", charts.pareto(every, best, size)
    yield "loss", charts.loss(every)
    yield "memory", charts.memory(every, size)
    yield "planned", charts.planned(every, size)


def said(figure) -> list[str]:
    """Returns all texts that a chart shows before the user hovers over it."""
    layout = figure.layout
    texts = [note.text for note in layout.annotations] + [
        button.label for m in layout.updatemenus for button in m.buttons
    ]
    texts += [text for axis in (layout.xaxis, layout.yaxis) for text in (axis.title.text, *(axis.ticktext or ()))]
    texts += [text for trace in figure.data if "text" in (trace.mode or "") for text in trace.text]
    return [*filter(None, texts), *(trace.name for trace in figure.data if layout.showlegend is not False)]


def test_comparison_chart_of_fifty_runs_has_as_little_text_as_a_chart_of_five(fifty):
    for (name, many), (_, few) in zip(drawn(fifty, 50), drawn(fifty, 5), strict=True):
        assert said(many) == said(few) and max(map(len, said(many))) < 30, name
        many.update_layout(showlegend=True)  # wrong on purpose: a legend with all runs
        assert len(said(many)) > len(said(few)), name


@pytest.mark.parametrize(
    ("answers", "title"), [({}, "loss, nats per token"), ({"validation": [{"accuracy": 0.7}]}, "loss")]
)
def test_loss_chart_names_nats_per_token_only_if_no_run_trained_preferences(tmp_path, answers, title):
    finished(tmp_path / "tokens", ["lr=0.001"])
    finished(tmp_path / "answers", ["loss=dpo"], **answers)
    assert title in said(dict(drawn(tmp_path, 2))["loss"])


def test_hover_labels_of_comparison_charts_have_short_lines(fifty):
    for name, figure in drawn(fifty, 50):
        traces = [trace for trace in figure.data if trace.hoverinfo != "skip"]
        touched = [text for trace in traces for text in (trace.text or (trace.meta["label"],))]
        assert len(touched) >= 48, name
        assert max(len(line) for text in touched for line in text.split("<br>")) <= charts.LINE, name


def lab(colour: str) -> tuple[float, float, float]:
    """Returns CIE L*a*b* of an sRGB colour."""
    linear = [((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92 for c in bytes.fromhex(colour[1:])]
    to_xyz = (
        (0.4339, 0.3762, 0.1899),
        (0.2126, 0.7152, 0.0722),
        (0.0177, 0.1095, 0.8727),
    )  # relative to the white point
    xyz = (sum(a * b for a, b in zip(row, linear, strict=True)) for row in to_xyz)
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: str, other: str) -> float:
    return sum((a - b) ** 2 for a, b in zip(lab(one), lab(other), strict=True)) ** 0.5


def test_colours_of_runs_categories_and_ink_are_visibly_apart():
    assert tuple(colours.OF_CATEGORY) == CATEGORIES
    categories = colours.OF_CATEGORY.values()
    assert min(apart(run, category) for run in colours.OF_RUNS for category in categories) > 30
    assert min(apart(colours.INK, colour) for colour in (*categories, *colours.OF_RUNS)) > 20
    assert min(apart(*pair) for pair in combinations(colours.OF_RUNS, 2)) > 25
    before = (
        "#3b6fb6",
        "#e08b2f",
        "#3f9d6b",
        "#c04a5b",
        "#7a5195",
        "#2b9eb3",
    )  # wrong on purpose: a palette that runs and categories share
    assert min(apart(run, category) for run in before for category in categories) == 0


def test_pareto_front_contains_the_runs_that_no_run_beats(fifty):
    runs = folders.runs_below(fifty)
    every = [read(run, "", "") for run in runs]
    of = {(one.device, one.tokens_per_second) for one in front(every)}
    points = {(one.device, one.tokens_per_second) for one in every if one.device is not None}
    beaten = {(d, s) for d, s in points if any(e <= d and t >= s and (e, t) != (d, s) for e, t in points)}
    assert of == points - beaten and 1 < len(of) < 20


def test_all_of_few_compared_runs_are_coloured_and_of_fifty_runs_only_the_pareto_front(sweep, fifty):
    for folder in (sweep, fifty):
        every = [read(run, str(i), str(i)) for i, run in enumerate(folders.runs_below(folder))]
        best = front(every)
        charts.paint(every, best)
        bright = [one for one in every if one.stands_out]
        assert bright == (every if folder == sweep else [one for one in every if one in best])
        assert len({one.colour for one in bright}) == len(bright) <= 8


# --- in a browser ------------------------------------------------------------------------------------------------

FAULTS = (Path(__file__).parent / "faults.js").read_text()
WHOLE_NAMES = """(async () => {
  const whole = [...document.querySelectorAll("dd")].map((said) => said.textContent);
  %s
  await new Promise((done) => setTimeout(done, 300));
})()"""
ON_AN_AXIS = (
    "await Plotly.relayout('pareto', { 'yaxis.tickvals': whole.map((_, i) => i / 10), 'yaxis.ticktext': whole });"
)
AT_THE_DOTS = "await Plotly.restyle('pareto', { mode: 'markers+text', text: [whole] }, 1);"
IN_THE_TABLE = (
    "document.querySelectorAll('td.label').forEach((cell, i) => { cell.innerHTML = `<span>${whole[i]}</span>`; });"
)
needs_a_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    opened = browser.Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@needs_a_browser
@pytest.mark.parametrize("width", [1400, 390])
def test_comparison_page_of_fifty_runs_with_long_names_is_legible(chromium, fifty, width):
    written(fifty)
    chromium.open(fifty / "comparison.html", width)
    assert chromium.errors == [] and chromium.run("innerWidth") == width
    assert chromium.run("document.querySelectorAll('tbody tr').length") == 50
    assert chromium.run(FAULTS) == []
    for choice in ("phases", "steps"):
        chromium.run(f"byId('inside-by').value = '{choice}'; byId('inside-by').onchange()")
        chromium.settle()
        assert chromium.run(FAULTS) == []


@pytest.mark.wrong
@needs_a_browser
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("wrong", [ON_AN_AXIS, AT_THE_DOTS, IN_THE_TABLE], ids=["axis", "dots", "table"])
def test_full_length_names_on_the_comparison_page_are_found_as_faults(chromium, fifty, width, wrong):
    written(fifty)
    chromium.open(fifty / "comparison.html", width)
    chromium.run(WHOLE_NAMES % wrong)
    assert len(chromium.run(FAULTS)) > 5


@pytest.mark.wrong
@needs_a_browser
def test_desktop_layout_of_the_comparison_page_on_a_phone_is_found_as_a_fault(chromium, fifty):
    page = fifty / "comparison.html"
    written(fifty)
    page.write_text(page.read_text().replace("max-width: 46rem", "max-width: 1rem"))
    chromium.open(page, 390)
    faults = chromium.run(FAULTS)
    assert "the table scrolls sideways" in faults and any("leaves the screen" in fault for fault in faults)


@needs_a_browser
@pytest.mark.parametrize("width", [1400, 390])
def test_comparison_page_shows_runs_of_every_status(chromium, sweep, width):
    written(sweep)
    chromium.open(sweep / "comparison.html", width)
    assert chromium.errors == [] and chromium.run(FAULTS) == []
    rows = chromium.run(
        "[...document.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((c) => c.innerText.trim()))"
    )
    # Finished runs come first, ordered by memory, and then other runs. The labels contain only "path" and "lr", which
    # differ between the runs.
    assert [row[0] for row in rows] == [f"path=…{n} lr=0.00{n + 1}" for n in (0, 2, 1, 3, 4, 5, 6)]
    assert rows[0][2:7] == ["600.0", "1,800.0", "1,000", "3.0000", "1.200"] and rows[3][2] == "-"
    assert rows[1][7] == "NVIDIA H200" and rows[0][8] == "" and rows[3][8] == "failed: ZeroDivisionError: </script><b>"
    # The loss chart has all runs with a readable CSV file. Other charts have only finished runs.
    drawn = "Object.fromEntries([...document.querySelectorAll('.plotly-graph-div')].map((c) => [c.id, c.data.length]))"
    assert chromium.run(drawn) == {"pareto": 2, "loss": 14, "memory": 6, "inside": 5, "planned": 1}
    assert chromium.run("byId('pareto').data[1].marker.symbol") == ["star", "star", "circle"]
    peak = chromium.run(
        "byId('inside').data.map((trace) => trace.y.at(-1))"
    )  # MiB by category, of the run with the least memory
    assert sum(peak) == pytest.approx(600, rel=1e-3)


@needs_a_browser
def test_click_on_a_table_row_isolates_a_run_and_a_second_click_resets(chromium, sweep):
    written(sweep)
    chromium.open(sweep / "comparison.html", 1400)
    visible = "byId('loss').data.filter((trace) => trace.visible !== false).map((trace) => trace.meta.run)"
    faded = "byId('pareto').data[1].marker.opacity.map((opacity) => opacity < 0.5)"
    assert chromium.run(f"[{visible}.length, {faded}]") == [14, [False] * 3]
    chromium.run("document.querySelectorAll('tbody tr')[1].click()")
    assert chromium.run(f"[{visible}, {faded}]") == [[1, 1], [True, False, True]]
    assert chromium.run("[byId('inside-of').value, byId('all').hidden]") == ["1", False]
    chromium.run("document.querySelectorAll('tbody tr')[1].click()")
    assert chromium.run(f"[{visible}.length, {faded}, byId('all').hidden]") == [14, [False] * 3, True]


@needs_a_browser
def test_click_on_a_column_title_sorts_runs_with_missing_values_last(chromium, sweep):
    written(sweep)
    chromium.open(sweep / "comparison.html", 1400)
    speeds = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[4].textContent)"
    for order in (["900", "1,000", "2,000"], ["2,000", "1,000", "900"]):
        chromium.run("table.tHead.rows[0].cells[4].click()")
        assert chromium.run(speeds) == [*order, *["-"] * 4]


@needs_a_browser
def test_buttons_of_comparison_charts_change_the_axis(chromium, sweep):
    written(sweep)
    chromium.open(sweep / "comparison.html", 1400)
    last = "byId('loss').data.filter((trace) => trace.mode === 'lines')[0].x.at(-1)"
    assert chromium.run(last) == 4000
    click = "document.querySelectorAll('#{} .updatemenu-button')[1].dispatchEvent(new Event('click'))"
    chromium.run(click.format("loss"))
    chromium.run(click.format("memory"))
    chromium.settle()
    assert chromium.run(f"[{last}, byId('loss').layout.xaxis.title.text]") == [4.0, "seconds"]
    assert chromium.run("byId('memory').data.map((trace) => trace.y[0])")[0] == 1800.0
    assert chromium.errors == [] and chromium.run(FAULTS) == []
