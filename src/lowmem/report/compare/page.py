"""Makes the comparison page, comparison.html: a single file that needs no network."""

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
from lowmem.system.units import CATEGORIES, WORDS, unit

HERE = Path(__file__).parent


def page(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    """Returns the comparison page as HTML. `names` are unique names of the runs."""
    every = [*map(read, runs, names, labels(runs, names))]
    every.sort(key=lambda figures: figures.device or float("inf"))  # smallest first, unmeasured runs last
    best = front(every)
    charts.paint(every, best)
    size = unit(max((figures.device or 0 for figures in every), default=0))
    sections = {
        "STYLE": (HERE / "page.css").read_text(encoding="utf-8"),
        "LEAD": _lead(every),
        "TABLE": _table(every, size),
        "FRONT": "".join(_line_of_front(figures, size) for figures in best),
        "KEY": "".join(f"<li>{_swatch(OF_CATEGORY[category])}{WORDS[category]}</li>" for category in CATEGORIES),
        "PARETO": _written("pareto", charts.pareto(every, best, size)),
        "LOSS": _written("loss", charts.loss(every)),
        "MEMORY": _written("memory", charts.memory(every, size)),
        "PLANNED": _written("planned", charts.planned(every, size)),
        "INSIDE": _written("inside", charts.inside(size)),
        "TYPED": "".join(map(_typed, every)),
        "DATA": _json({"ink": INK, "runs": [_drawn(figures, size) for figures in every]}),
        "SCRIPT": (HERE / "page.js").read_text(encoding="utf-8"),
        "PLOTLY": get_plotlyjs(),
    }
    html = (HERE / "page.html").read_text(encoding="utf-8")
    for mark, content in sections.items():
        html = html.replace(f"<!--{mark}-->", content)
    return html


def _written(name: str, figure: go.Figure) -> str:
    """Returns a chart as HTML that adapts to the size of its box on the page. `name` is the id of the chart's
    element."""
    look = {"displayModeBar": False, "responsive": True}
    return figure.to_html(config=look, include_plotlyjs=False, full_html=False, div_id=name)


# --- text -------------------------------------------------------------------------------------------------------


def _lead(every: Sequence[Figures]) -> str:
    """Returns the first lines of the page as HTML: the number of runs by status, the overrides that all runs share, and
    notes. Labels of runs do not repeat the shared overrides."""
    states = [figures.run.status for figures in every]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    typed = [figures.run.overrides for figures in every]
    same = [line for line in typed[0] if all(line in lines for lines in typed)] if len(every) > 1 else []
    counted = f"<p>{len(every)} {'run' if len(every) == 1 else 'runs'}: {counts}.</p>"
    shared = f"<p>Overrides that all runs share: <code>{escape(' '.join(same))}</code></p>" if same else ""
    notes = folders.notes([figures.run for figures in every], [figures.name for figures in every])
    return counted + shared + "".join(f"<p>{escape(note)}</p>" for note in notes)


def _line_of_front(figures: Figures, size: Unit) -> str:
    """Returns the item of a run of the Pareto front, for the list below the Pareto chart."""
    at = f"{_size(figures.device, size)} {size[1]}, {figures.tokens_per_second:,.0f} tokens/s"
    return f"<li>{_swatch(figures.colour if figures.stands_out else None)}{_label(figures)} <small>{at}</small></li>"


def _typed(figures: Figures) -> str:
    overrides = escape(" ".join(figures.run.overrides) or "no overrides")
    return f"<dt>{escape(figures.name)}</dt><dd><code>{overrides}</code></dd>"


def _label(figures: Figures) -> str:
    """Returns a run's label as HTML, with gray keys, and without line breaks inside words."""
    words = (word.rpartition("=") for word in figures.label.split(" "))
    return " ".join(f"<span><em>{escape(key + equals)}</em>{escape(value)}</span>" for key, equals, value in words)


def _swatch(colour: str | None) -> str:
    return f'<span class="swatch" style="--colour: {colour}"></span>' if colour else '<span class="swatch"></span>'


def _size(size: float | None, size_unit: Unit) -> str:
    return "-" if size is None else f"{size / size_unit[0]:,.{size_unit[2]}f}"


# --- the table ---------------------------------------------------------------------------------------------------


def _table(every: Sequence[Figures], size: Unit) -> str:
    """Returns the table of runs as HTML, with a row per run. `size` is the unit of all sizes."""
    numbers = {
        f"device {size[1]}": lambda figures: (figures.device, _size(figures.device, size)),
        f"host {size[1]}": lambda figures: (figures.host, _size(figures.host, size)),
        "tokens/s": lambda figures: (figures.tokens_per_second, _number(figures.tokens_per_second, ",.0f")),
        "learned tokens/s": lambda figures: (
            figures.learned_tokens_per_second,
            _number(figures.learned_tokens_per_second, ",.0f"),
        ),
        "val loss": lambda figures: (figures.val_loss, _number(figures.val_loss, ".4f")),
        "bits/byte": lambda figures: (figures.bits_per_byte, _number(figures.bits_per_byte, ".3f")),
    }
    if all(figures.learned_tokens_per_second == figures.tokens_per_second for figures in every):
        del numbers["learned tokens/s"]
    if any(figures.accuracy is not None for figures in every):
        numbers["accuracy"] = lambda figures: (figures.accuracy, _number(figures.accuracy, ".3f"))
    if any(figures.drive is not None for figures in every):
        numbers[f"drive {size[1]}"] = lambda figures: (figures.drive, _size(figures.drive, size))
        numbers["drive GB/s"] = lambda figures: (figures.drive_rate, _number(figures.drive_rate, ".2f"))
    words = {}  # columns of text: the hardware if it differs between runs, and the reasons if any run is not done
    if len({figures.on for figures in every if figures.on}) > 1:
        words["hardware"] = lambda figures: (figures.on, figures.on)
    if any(figures.run.reason for figures in every):
        words["not finished"] = lambda figures: (figures.run.reason or None, _state(figures))
    largest = max((sum(figures.peak.values()) for figures in every), default=0)
    head = '<th class="label">run</th><th class="bar">device peak, by category</th>'
    head += "".join(f'<th class="number">{name}</th>' for name in numbers)
    head += "".join(f'<th class="word">{name}</th>' for name in words)
    rows = []
    for i, figures in enumerate(every):
        cells = [
            _cell("label", i, _swatch(figures.colour if figures.stands_out else None) + _label(figures), figures.name)
        ]
        cells += [_cell("bar", figures.device, _bar(figures, largest))]
        cells += [_cell("number", *read(figures)) for read in numbers.values()]
        cells += [
            _cell("word", value, escape(text), figures.run.reason)
            for value, text in (r(figures) for r in words.values())
        ]
        rows.append(f'<tr tabindex="0" data-run="{i}">{"".join(cells)}</tr>')
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _cell(kind: str, value: object, content: str, title: str = "") -> str:
    """Returns a cell as HTML. `kind` is its CSS class, `value` the number or text by which the column is sorted,
    `content` the HTML in the cell, and `title` a text that appears on hovering."""
    order = "" if value is None else escape(str(value))
    return f'<td class="{kind}" data-value="{order}" title="{escape(title)}">{content}</td>'


def _bar(figures: Figures, largest: float) -> str:
    sizes = ((category, figures.peak.get(category, 0)) for category in CATEGORIES if figures.peak.get(category))
    return "".join(f'<i style="width: {100 * s / largest:.2f}%; background: {OF_CATEGORY[c]}"></i>' for c, s in sizes)


def _state(figures: Figures) -> str:
    return f"{figures.run.status}: {folders.line(figures.run.reason)}" if figures.run.reason else ""


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


# --- for the script ----------------------------------------------------------------------------------------------


def _drawn(figures: Figures, size: Unit) -> dict:
    stacks = {"inside": figures.inside, "steps": figures.steps, "phases": figures.phases}
    look = {"label": figures.label, "colour": figures.colour, "stands_out": figures.stands_out}
    return look | {name: _columns(stack, size) for name, stack in stacks.items()}


def _columns(stack: Stack, size: Unit) -> dict:
    sizes = [[round(row[i] / size[0], size[2] + 1) for _, row in stack] for i in range(len(CATEGORIES))]
    return {"at": [at for at, _ in stack], "sizes": sizes}


def _json(value: object) -> str:
    return json.dumps(value).replace("<", "\\u003c")  # otherwise a label with HTML could end the script element
