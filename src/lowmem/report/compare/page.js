"use strict";
// The charts come from plotly (charts.py). This script sorts the table, isolates runs, and fills the chart of one run.
const { ink: INK, runs } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const table = byId("table");
const picked = new Set();

// --- isolating runs: other rows and dots fade; other curves are hidden, so that the axes fit the remaining curves

const shown = (i) => picked.size === 0 || picked.has(i);
const colour = (i) => picked.size ? (picked.has(i) ? runs[i].colour : INK) : (runs[i].stands_out ? runs[i].colour : INK);
const opacity = (i) => picked.size ? (picked.has(i) ? 1 : 0.12) : (runs[i].stands_out ? 1 : 0.4);

function repaint() {
  for (const id of ["loss", "memory"]) {
    const of = byId(id).data.map((trace) => trace.meta.run);
    if (of.length) Plotly.restyle(id, { visible: of.map(shown), opacity: of.map(opacity), "line.color": of.map(colour), "marker.color": of.map(colour) });
  }
  for (const id of ["pareto", "planned"]) {
    byId(id).data.forEach(({ customdata: of }, trace) => {
      if (of) Plotly.restyle(id, { "marker.color": [of.map(colour)], "marker.opacity": [of.map(opacity)] }, trace);
    });
  }
  for (const row of table.tBodies[0].rows) {
    const i = Number(row.dataset.run);
    row.classList.toggle("picked", picked.has(i));
    const own = picked.has(i) || runs[i].stands_out;
    row.querySelector(".swatch").style.setProperty("--colour", own ? runs[i].colour : "");
  }
  table.classList.toggle("some", picked.size > 0);
  byId("all").hidden = picked.size === 0;
}

function pick(i) {
  picked.has(i) ? picked.delete(i) : picked.add(i);
  if (picked.has(i) && runs[i].inside.at.length) {
    byId("inside-of").value = i;
    inside();
  }
  repaint();
}

for (const row of table.tBodies[0].rows) {
  row.onclick = () => pick(Number(row.dataset.run));
  row.onkeydown = (event) => { if (event.key === "Enter") row.onclick(); };
}
for (const id of ["loss", "memory"]) byId(id).on("plotly_click", ({ points: [point] }) => pick(point.data.meta.run));
for (const id of ["pareto", "planned"]) byId(id).on("plotly_click", ({ points: [point] }) => pick(point.customdata));
byId("all").onclick = () => { picked.clear(); repaint(); };

// --- sorting: rows without a value are always last

for (const head of table.tHead.rows[0].cells) head.onclick = () => {
  const down = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
  const value = (row) => row.cells[head.cellIndex].dataset.value;
  const compared = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b) * down;
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => !value(a) - !value(b) || compared(value(a), value(b)));
  table.tBodies[0].append(...rows);
};

// --- the chart of one run, by category

function inside() {
  const of = runs[byId("inside-of").value], by = byId("inside-by").value;
  const { at, sizes } = of ? of[by] : { at: [], sizes: [] };
  const alone = by === "inside"; // a phase may occur several times, so the x-axis has numbers and not names
  const kind = by === "phases" ? { type: "bar", stackgroup: null } : { type: "scatter", stackgroup: "all" };
  const traces = byId("inside").data.map((trace, i) => ({ ...trace, ...kind, text: at.map((a) => (by === "steps" ? `step ${a}` : a)), x: alone ? [...at.keys()] : at, y: sizes[i] }));
  const starts = alone ? at.flatMap((phase, i) => phase !== at[i - 1] ? [i] : []) : [];
  const ends = [...starts.slice(1), at.length];
  const roomy = starts.map((start, i) => [start, ends[i]]).filter(([start, end]) => end - start > 0.2 * at.length);
  const axis = { ...byId("inside").layout.xaxis, autorange: true, type: { inside: "linear", steps: "linear", phases: "category" }[by] };
  const ticks = alone ? { tickmode: "array", tickvals: roomy.map(([start, end]) => (start + end) / 2), ticktext: roomy.map(([start]) => at[start]) } : { tickmode: "auto" };
  const title = { inside: "allocations and frees, in order", steps: "optimizer step", phases: "" }[by];
  Plotly.react("inside", traces, {
    ...byId("inside").layout,
    xaxis: { ...axis, ...ticks, showgrid: by === "steps", title: { ...axis.title, text: title } },
    shapes: starts.length > 12 ? [] : starts.slice(1).map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { width: 1, dash: "dot", color: INK } })),
  });
}

runs.forEach((run, i) => { if (run.inside.at.length || run.steps.at.length) byId("inside-of").append(new Option(run.label, i)); });
byId("inside-of").onchange = byId("inside-by").onchange = inside;
inside();

// The charts were drawn before the page was complete, so their sizes may have changed.
for (const chart of document.querySelectorAll(".plotly-graph-div")) Plotly.Plots.resize(chart);
