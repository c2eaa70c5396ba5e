"""Draws the charts of the comparison page with plotly. A run has the same color in all charts, and all sizes on the
page have the same unit.

The label of a run appears when the mouse is over its dot or curve. Permanent labels would overlap if there are many
runs.
"""

import html
import textwrap
from collections.abc import Iterator, Sequence

import plotly.graph_objects as go

from lowmem.report.colours import INK, OF_CATEGORY, OF_RUNS
from lowmem.report.compare.figures import AXES, Curve, Figures
from lowmem.system.units import CATEGORIES

LINE = 30  # characters per line of a hover label, so that the label fits on the screen of a phone
Unit = tuple[int, str, int]  # (bytes per unit, name, decimals)


def paint(every: Sequence[Figures], front: Sequence[Figures]) -> None:
    """Sets the color of each run, and whether the run stands out. If there are at most as many runs as colors, all runs
    stand out; otherwise only the first runs of the Pareto front stand out, at most one run per color."""
    for i, run in enumerate(sorted(every, key=lambda run: run not in front)):
        run.colour = OF_RUNS[i % len(OF_RUNS)]
        run.stands_out = i < len(OF_RUNS) and (len(every) <= len(OF_RUNS) or run in front)


def pareto(every: Sequence[Figures], front: Sequence[Figures], unit: Unit) -> go.Figure:
    size, name, digits = unit
    runs = {i: run for i, run in enumerate(every) if run.device is not None and run.tokens_per_second is not None}
    line = go.Scatter(
        x=[run.tokens_per_second for run in front],
        y=[run.device / size for run in front],
        mode="lines",
        line={"dash": "dot", "color": INK, "width": 1},
        hoverinfo="skip",
    )
    x = [run.tokens_per_second for run in runs.values()]
    dots = _dots(
        runs, x, [run.device / size for run in runs.values()], f"%{{x:,.0f}} tokens/s<br>%{{y:,.{digits}f}} {name}"
    )
    dots.marker.symbol = ["star" if run in front else "circle" for run in runs.values()]
    dots.marker.size = [15 if run in front else 9 for run in runs.values()]
    axes = {"xaxis": {"title": "tokens/s", "rangemode": "tozero"}, "yaxis": {"rangemode": "tozero"}}
    return _figure([line, dots] if runs else [], f"peak on the device, {name}", **axes)


def loss(every: Sequence[Figures]) -> go.Figure:
    traces, places = [], {axis: [] for axis in AXES}
    for i, run in _front_last(every):
        for curve, mode, name in ((run.loss, "lines", "loss"), (run.evaluations, "markers", "validation loss")):
            *axes, values = curve
            if values:
                label = f"{name} %{{y:.4f}}<br>at %{{x:,.0f}} %{{xaxis.title.text}}"
                traces.append(_curve(i, run, axes[0], values, label, mode))
                for axis, x in zip(AXES, axes, strict=True):
                    places[axis].append(x)
    of_answers = any(run.accuracy is not None for run in every)  # the loss of pairs or rated answers is not per token
    figure = _figure(traces, "loss" if of_answers else "loss, nats per token", xaxis={"title": "tokens"})
    if places["learned_tokens"] == places["tokens"]:
        del places["learned_tokens"]
    choices = {axis.replace("_", " "): x for axis, x in places.items()}
    return _with_choice(figure, {title: [{"x": x}, {"xaxis.title.text": title}] for title, x in choices.items()})


def memory(every: Sequence[Figures], unit: Unit) -> go.Figure:
    """Draws the peak of each step over the run. Buttons switch between device memory, host memory and, if a run uses a
    drive, the bytes on the drive."""
    size, name, digits = unit
    traces, on_host, on_drive = [], [], []
    for i, run in _front_last(every):
        if run.device_bytes[0] or run.host_bytes[0]:
            label = f"step %{{x}}<br>%{{y:,.{digits}f}} {name}"
            traces.append(_curve(i, run, run.device_bytes[0], _in(size, run.device_bytes), label, "lines"))
            on_host.append((run.host_bytes[0], _in(size, run.host_bytes)))
            on_drive.append((run.drive_bytes[0], _in(size, run.drive_bytes)))
    axes = {"xaxis": {"title": "optimizer step"}, "yaxis": {"rangemode": "tozero"}}
    figure = _figure(traces, name, **axes)
    sides = {"device": [(trace.x, trace.y) for trace in traces], "host": on_host}
    sides |= {"drive": on_drive} if any(x for x, _ in on_drive) else {}
    choices = {side: [{"x": [x for x, _ in xy], "y": [y for _, y in xy]}] for side, xy in sides.items()}
    return _with_choice(figure, choices)


def planned(every: Sequence[Figures], unit: Unit) -> go.Figure:
    """Draws the error of predicted device peaks in percent of the measured peaks: a row per phase, with a dot per
    run."""
    size, name, digits = unit
    phases = [*dict.fromkeys(phase for run in every for phase in run.planned)]
    runs = {i: run for i, run in enumerate(every) if run.planned}
    at, x, y, compared = [], [], [], []
    for place, (i, run) in enumerate(runs.items()):
        for phase, (predicted, measured) in run.planned.items():
            at.append(i)
            x.append(100 * (predicted / measured - 1))
            y.append(phases.index(phase) + 0.6 * ((place + 0.5) / len(runs) - 0.5))
            compared.append(f"predicted {predicted / size:,.{digits}f}, measured {measured / size:,.{digits}f} {name}")
    dots = _dots(every, x, y, "%{x:+.2f} %<br>%{hovertext}", at)
    dots.hovertext = compared
    rows = {"tickvals": [*range(len(phases))], "ticktext": phases, "range": [len(phases) - 0.4, -0.6]}
    return _figure(
        [dots] if at else [],
        "",
        xaxis={"title": "prediction error, %", "rangemode": "tozero", "zeroline": True},
        yaxis=rows,
    )


def inside(unit: Unit) -> go.Figure:
    """Returns an empty chart of memory by category. The script of the page (`page.js`) fills the chart with the data of
    the run that the user chooses."""
    label = f"%{{text}}<br>%{{fullData.name}} %{{y:,.{unit[2]}f}} {unit[1]}<extra></extra>"
    traces = [
        go.Scatter(
            name=category,
            mode="lines",
            stackgroup="all",
            line={"width": 0, "color": OF_CATEGORY[category]},
            fillcolor=OF_CATEGORY[category],
            marker={"color": OF_CATEGORY[category]},
            hovertemplate=label,
        )
        for category in CATEGORIES
    ]
    return _figure(traces, unit[1], barmode="stack", xaxis={"title": ""}, yaxis={"rangemode": "tozero"})


# --- shared by all charts ---------------------------------------------------------------------------------------


def _figure(traces: Sequence[go.Scatter], above: str, **layout) -> go.Figure:
    """Returns a figure, which says "no measurements" if `traces` is empty. `above` is the title of the y-axis, which is
    above the chart because phone screens are narrow."""
    at = {"xref": "paper", "yref": "paper", "showarrow": False}
    notes = [at | {"text": above, "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "yshift": 6}]
    if not traces:
        notes = [at | {"text": "no measurements", "x": 0.5, "y": 0.5}]
    # invisible ticks keep the zeros of both axes from overlapping
    axis = {"automargin": True, "ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)"}
    axis |= {"gridcolor": "rgba(128,138,150,0.22)", "zerolinecolor": "rgba(128,138,150,0.5)"}
    for name in ("xaxis", "yaxis"):
        layout[name] = axis | {"zeroline": False, "title": {"standoff": 6}} | layout.get(name, {})
    return go.Figure(
        list(traces),
        go.Layout(
            template="none",
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"size": 12, "family": "system-ui, sans-serif"},
            margin={"l": 8, "r": 8, "t": 34 if above else 8, "b": 8},
            showlegend=False,
            hovermode="closest",
            hoverlabel={"align": "left", "font": {"size": 12}, "namelength": -1},
            annotations=notes,
            **layout,
        ),
    )


def _dots(runs, x: Sequence[float], y: Sequence[float], label: str, at: Sequence[int] | None = None) -> go.Scatter:
    """Returns a trace of dots. Its `customdata` has the index of each dot's run, which the script of the page reads."""
    at = list(runs) if at is None else at
    return go.Scatter(
        x=x,
        y=y,
        mode="markers",
        customdata=at,
        text=[_touched(runs[i]) for i in at],
        marker={"color": [_colour(runs[i]) for i in at], "opacity": [_opacity(runs[i]) for i in at], "size": 8},
        hovertemplate=f"%{{text}}<br>{label}<extra></extra>",
    )


def _curve(i: int, run: Figures, x: Sequence[float], y: Sequence[float], label: str, mode: str) -> go.Scatter:
    """Returns the curve of a run. Its `meta` has the index of the run, which the script of the page reads."""
    return go.Scatter(
        x=x,
        y=y,
        mode=mode,
        meta={"run": i, "label": _touched(run)},
        line={"width": 1.8 if run.stands_out else 1, "color": _colour(run)},
        marker={"color": _colour(run), "size": 6},
        opacity=_opacity(run),
        hovertemplate=f"%{{meta.label}}<br>{label}<extra></extra>",
    )


def _with_choice(figure: go.Figure, choices: dict[str, list]) -> go.Figure:
    """Adds buttons at the top right of the chart. `choices` maps the text of each button to the arguments of plotly's
    method "update"."""
    buttons = [{"label": label, "method": "update", "args": change} for label, change in choices.items()]
    place = {"x": 1, "y": 1, "xanchor": "right", "yanchor": "bottom", "pad": {"b": 4, "r": 0}}
    look = {"bgcolor": "rgba(128,138,150,0.12)", "bordercolor": "rgba(128,138,150,0.3)", "font": {"size": 11}}
    return figure.update_layout(
        updatemenus=[{"type": "buttons", "direction": "right", "buttons": buttons} | place | look]
    )


def _front_last(every: Sequence[Figures]) -> Iterator[tuple[int, Figures]]:
    """Yields all runs with their indices. Runs that stand out come last, so that their curves are drawn on top."""
    return iter(sorted(enumerate(every), key=lambda pair: pair[1].stands_out))


def _colour(run: Figures) -> str:
    return run.colour if run.stands_out else INK


def _opacity(run: Figures) -> float:
    return 1.0 if run.stands_out else 0.4


def _touched(run: Figures) -> str:
    """Returns the hover label of a run: its label in short lines, as HTML for plotly."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(run.label, LINE)) or "a run"


def _in(size: int, curve: Curve) -> list[float]:
    return [value / size for value in curve[1]]
