"""Writes comparison.html: one file that opens without a network, for three runs or fifty, at a desk or on a phone."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from lowmem.report import folders
from lowmem.report.colours import INK, OF_CATEGORY
from lowmem.report.compare import charts
from lowmem.report.compare.charts import Unit
from lowmem.report.compare.figures import Figures, Stack, front, read
from lowmem.report.compare.labels import labels
from lowmem.report.folders import RunFolder
from lowmem.system.units import CATEGORIES, unit

HERE = Path(__file__).parent


def page(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """Returns the page. Args: names: of the runs."""
    every = [*map(read, runs, names, labels(runs, names))]
    every.sort(key=lambda one: one.device or float("inf"))  # the smallest first, the unfinished last
    best = front(every)
    charts.paint(every, best)
    size = unit(max((one.device or 0 for one in every), default=0))
    parts = {
        "STYLE": (HERE / "page.css").read_text(encoding="utf-8"),
        "LEAD": _lead(every),
        "TABLE": _table(every, size),
        "FRONT": "".join(_line_of_front(one, size) for one in best),
        "KEY": "".join(f"<li>{_swatch(OF_CATEGORY[category])}{category}</li>" for category in CATEGORIES),
        "PARETO": _written("pareto", charts.pareto(every, best, size)),
        "LOSS": _written("loss", charts.loss(every)),
        "MEMORY": _written("memory", charts.memory(every, size)),
        "PLANNED": _written("planned", charts.planned(every, size)),
        "INSIDE": _written("inside", charts.inside(size)),
        "TYPED": "".join(map(_typed, every)),
        "DATA": _json({"ink": INK, "runs": [_drawn(one, size) for one in every]}),
        "SCRIPT": (HERE / "page.js").read_text(encoding="utf-8"),
        "PLOTLY": get_plotlyjs(),
    }
    html = (HERE / "page.html").read_text(encoding="utf-8")
    for mark, content in parts.items():
        html = html.replace(f"<!--{mark}-->", content)
    return html


def _written(name: str, figure: go.Figure) -> str:
    """Returns a chart as plotly writes it, filling the box that the style gives it."""
    look = {"displayModeBar": False, "responsive": True}
    return figure.to_html(config=look, include_plotlyjs=False, full_html=False, div_id=name)


# --- in words ----------------------------------------------------------------------------------------------------


def _lead(every: Sequence[Figures]) -> str:
    """Returns the number of runs, and their common overrides, which the page shows only here."""
    states = [one.run.status for one in every]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    typed = [one.run.overrides for one in every]
    same = [line for line in typed[0] if all(line in lines for lines in typed)] if len(every) > 1 else []
    said = f"<p>{len(every)} {'run' if len(every) == 1 else 'runs'}: {counts}.</p>"
    return said + (f"<p>The same in all: <code>{escape(' '.join(same))}</code></p>" if same else "")


def _line_of_front(one: Figures, size: Unit) -> str:
    """Returns a run's line of the Pareto front's legend, which has a line per run below its chart."""
    at = f"{_size(one.device, size)} {size[1]}, {one.tokens_per_second:,.0f} tokens/s"
    return f"<li>{_swatch(one.colour if one.stands_out else None)}{_label(one)} <small>{at}</small></li>"


def _typed(one: Figures) -> str:
    return f"<dt>{escape(one.name)}</dt><dd><code>{escape(' '.join(one.run.overrides) or 'as shipped')}</code></dd>"


def _label(one: Figures) -> str:
    """Returns a label with grey keys, which breaks only between words."""
    words = (word.rpartition("=") for word in one.label.split(" "))
    return " ".join(f"<span><em>{escape(key + equals)}</em>{escape(value)}</span>" for key, equals, value in words)


def _swatch(colour: str | None) -> str:
    return f'<span class="swatch" style="--colour: {colour}"></span>' if colour else '<span class="swatch"></span>'


def _size(size: float | None, of: Unit) -> str:
    return "-" if size is None else f"{size / of[0]:,.{of[2]}f}"


# --- the table ---------------------------------------------------------------------------------------------------


def _table(every: Sequence[Figures], size: Unit) -> str:
    """Returns the table in one unit, with a row per run. On a phone a row has the label above the figures."""
    numbers = {
        f"device {size[1]}": lambda one: (one.device, _size(one.device, size)),
        f"host {size[1]}": lambda one: (one.host, _size(one.host, size)),
        "tokens/s": lambda one: (one.tokens_per_second, _number(one.tokens_per_second, ",.0f")),
        "val loss": lambda one: (one.val_loss, _number(one.val_loss, ".4f")),
        "bits/byte": lambda one: (one.bits_per_byte, _number(one.bits_per_byte, ".3f")),
    }
    words = {}  # columns that say the same of every run are left out
    if len({one.on for one in every if one.on}) > 1:
        words["on"] = lambda one: (one.on, one.on)
    if any(one.run.reason for one in every):
        words["not done"] = lambda one: (one.run.reason or None, _state(one))
    largest = max((sum(one.peak.values()) for one in every), default=0)
    head = '<th class="label">run</th><th class="bar">device peak, by category</th>'
    head += "".join(f'<th class="number">{name}</th>' for name in numbers)
    head += "".join(f'<th class="word">{name}</th>' for name in words)
    rows = []
    for i, one in enumerate(every):
        cells = [_cell("label", i, _swatch(one.colour if one.stands_out else None) + _label(one), one.name)]
        cells += [_cell("bar", one.device, _bar(one, largest))]
        cells += [_cell("number", *read(one)) for read in numbers.values()]
        cells += [
            _cell("word", value, escape(said), one.run.reason) for value, said in (r(one) for r in words.values())
        ]
        rows.append(f'<tr tabindex="0" data-run="{i}">{"".join(cells)}</tr>')
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _cell(kind: str, value: object, content: str, title: str = "") -> str:
    """Returns a cell. Args: value: the number or text by which rows are sorted."""
    order = "" if value is None else escape(str(value))
    return f'<td class="{kind}" data-value="{order}" title="{escape(title)}">{content}</td>'


def _bar(one: Figures, largest: float) -> str:
    parts = ((category, one.peak.get(category, 0)) for category in CATEGORIES if one.peak.get(category))
    return "".join(f'<i style="width: {100 * s / largest:.2f}%; background: {OF_CATEGORY[c]}"></i>' for c, s in parts)


def _state(one: Figures) -> str:
    return f"{one.run.status}: {folders.line(one.run.reason)}" if one.run.reason else ""


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


# --- for the script ----------------------------------------------------------------------------------------------


def _drawn(one: Figures, size: Unit) -> dict:
    stacks = {"inside": one.inside, "steps": one.steps, "phases": one.phases}
    look = {"label": one.label, "colour": one.colour, "stands_out": one.stands_out}
    return look | {name: _columns(stack, size) for name, stack in stacks.items()}


def _columns(stack: Stack, size: Unit) -> dict:
    sizes = [[round(row[i] / size[0], size[2] + 1) for _, row in stack] for i in range(len(CATEGORIES))]
    return {"at": [at for at, _ in stack], "sizes": sizes}


def _json(value: object) -> str:
    return json.dumps(value).replace("<", "\\u003c")  # or a label that quotes HTML could end the script
