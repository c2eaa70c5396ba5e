"use strict";
const { categories, runs } = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3b6fb6", "#e08b2f", "#3f9d6b", "#c04a5b", "#7a5195", "#2b9eb3", "#b0892f", "#d0679d", "#6a8d3a", "#8a8f98"];
const OF_CATEGORY = { weights: "#3b6fb6", gradients: "#e08b2f", optimizer: "#7a5195", activations: "#3f9d6b", other: "#9a9a9a" };
const DASHES = ["solid", "dash", "dot", "dashdot"];
const hidden = new Set();
runs.forEach((run, i) => {
  run.colour = COLOURS[i % COLOURS.length];
  run.dash = DASHES[Math.floor(i / COLOURS.length) % DASHES.length];
});
const byId = (id) => document.getElementById(id);
const sum = (sizes) => Object.values(sizes).reduce((a, b) => a + b, 0);
const shown = () => runs.filter((run) => !hidden.has(run));
const wrapped = (text) => safe(text).replace(/(.{16,}?) /g, "$1<br>"); // a label beside an axis
const safe = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // plotly reads some HTML

// One unit for the whole page, so that charts can be compared.
const largest = Math.max(0, ...runs.map((run) => (run.peak ? sum(run.peak) : 0)), ...runs.flatMap((run) => run.device_bytes[1]));
const [UNIT, NAME] = largest >= 2 ** 29 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
const inUnit = (bytes) => bytes / UNIT;

function layout(more) {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 13, family: "system-ui, sans-serif" },
    margin: { l: 10, r: 10, t: 10, b: 10 }, showlegend: false, hovermode: "closest", ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

function draw(id, traces, more) {
  const empty = { text: "nothing was measured", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 };
  const { labels = [], ...rest } = more;
  const wanted = layout({ ...rest, annotations: traces.length ? labels : [empty] });
  Plotly.react(id, traces, wanted, { responsive: true, displayModeBar: false });
}

const titled = (text, more = {}) => ({ title: { text }, ...more });
const LEGEND = { showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" } };

function peak() {
  const mine = shown().filter((run) => run.peak).reverse();
  draw("peak", mine.length === 0 ? [] : categories.map((category) => ({
    type: "bar", orientation: "h", name: category, y: mine.map((_, i) => i), x: mine.map((run) => inUnit(run.peak[category] || 0)),
    text: mine.map((run) => safe(run.label)), textposition: "none", marker: { color: OF_CATEGORY[category] },
    hovertemplate: `%{text}<br>${category} %{x:.3f} ${NAME}<extra></extra>`,
  })), {
    barmode: "stack", xaxis: titled(NAME), ...LEGEND,
    yaxis: { tickvals: mine.map((_, i) => i), ticktext: mine.map((run) => wrapped(run.label)), tickfont: { size: mine.length > 5 ? 10 : 12 } },
  });
}

function pareto() {
  const mine = shown().filter((run) => run.figures["device GiB"] !== null && run.figures["tokens/s"] !== null);
  const at = (run) => [run.figures["tokens/s"], (run.figures["device GiB"] * 2 ** 30) / UNIT];
  const front = mine.filter((run) => !mine.some((other) => {
    const [[s, m], [os, om]] = [at(run), at(other)];
    return os >= s && om <= m && (os > s || om < m);
  })).sort((a, b) => at(a)[0] - at(b)[0]);
  const traces = mine.map((run) => ({
    type: "scatter", mode: "markers", x: [at(run)[0]], y: [at(run)[1]], name: safe(run.label),
    marker: { color: run.colour, size: front.includes(run) ? 14 : 9, symbol: front.includes(run) ? "star" : "circle" },
    hovertemplate: `${safe(run.label)}<br>%{x:,.0f} tokens/s<br>%{y:.3f} ${NAME}<extra></extra>`,
  }));
  if (front.length > 1) traces.unshift({
    type: "scatter", mode: "lines", name: "Pareto front", x: front.map((run) => at(run)[0]), y: front.map((run) => at(run)[1]),
    line: { dash: "dot", color: "#8a8f98" }, hoverinfo: "skip",
  });
  draw("pareto", traces, { xaxis: titled("tokens/s", { rangemode: "tozero" }), yaxis: titled(`peak of the device, ${NAME}`, { rangemode: "tozero" }) });
}

function loss() {
  const which = Number(byId("loss-x").value);
  const unit = ["tokens", "s"][which];
  const traces = [];
  for (const run of shown()) {
    const hover = `${safe(run.label)}<br>%{x:,.0f} ${unit}<br>loss %{y:.4f}<extra></extra>`;
    if (run.loss[2].length) traces.push({ type: "scatter", mode: "lines", x: run.loss[which], y: run.loss[2], name: safe(run.label), line: { color: run.colour, dash: run.dash, width: 1.5 }, hovertemplate: hover });
    if (run.val_loss[2].length) traces.push({ type: "scatter", mode: "markers", x: run.val_loss[which], y: run.val_loss[2], name: safe(run.label), marker: { color: run.colour, size: 9 }, hovertemplate: "validation, " + hover });
  }
  draw("loss", traces, { xaxis: titled(which ? "seconds of training" : "tokens"), yaxis: titled("loss, nats per token") });
}

function memory() {
  const of = byId("memory-of").value;
  const traces = shown().filter((run) => run[of][0].length).map((run) => ({
    type: "scatter", mode: "lines+markers", x: run[of][0], y: run[of][1].map(inUnit), name: safe(run.label), marker: { size: 4 },
    line: { color: run.colour, dash: run.dash, width: 1.5 }, hovertemplate: `${safe(run.label)}<br>step %{x}<br>%{y:.3f} ${NAME}<extra></extra>`,
  }));
  draw("memory", traces, { xaxis: titled("optimizer step"), yaxis: titled(NAME, { rangemode: "tozero" }) });
}

function inside() {
  const run = runs[Number(byId("inside-of").value)];
  const by = byId("inside-x").value;
  const rows = run ? run[by] : [];
  const x = rows.map(([at], i) => by === "inside" ? i : at);
  const kind = by === "phases" ? { type: "bar" } : { type: "scatter", mode: "lines", stackgroup: "all", line: { width: 0 } };
  const starts = by === "inside" ? rows.flatMap(([phase], i) => rows.findIndex(([other]) => other === phase) === i ? [[phase, i]] : []) : [];
  draw("inside", rows.length === 0 ? [] : categories.map((category, i) => ({
    ...kind, name: category, x, y: rows.map(([, sizes]) => inUnit(sizes[i])),
    marker: { color: OF_CATEGORY[category] }, fillcolor: OF_CATEGORY[category], text: rows.map(([at]) => at),
    hovertemplate: `${by === "steps" ? "step " : ""}%{text}<br>${category} %{y:.3f} ${NAME}<extra></extra>`,
  })), {
    barmode: "stack", yaxis: titled(NAME, { rangemode: "tozero" }), ...LEGEND,
    xaxis: titled({ inside: "allocations and releases, in order", steps: "optimizer step", phases: "" }[by]),
    shapes: starts.map(([, i]) => ({ type: "line", x0: i, x1: i, yref: "paper", y0: 0, y1: 1, line: { width: 1, dash: "dot", color: "#8a8f98" } })),
    labels: starts.map(([phase, i]) => ({ text: phase, x: i, yref: "paper", y: 1, showarrow: false, xanchor: "left", yanchor: "top" })),
  });
}

function planned() {
  const mine = shown().filter((run) => Object.keys(run.planned).length);
  byId("planned-section").hidden = !runs.some((run) => Object.keys(run.planned).length);
  draw("planned", mine.map((run) => {
    const names = Object.keys(run.planned);
    return {
      type: "bar", name: safe(run.label), x: names, y: names.map((phase) => 100 * (run.planned[phase][0] / run.planned[phase][1] - 1)),
      customdata: names.map((phase) => run.planned[phase].map(inUnit)), marker: { color: run.colour },
      hovertemplate: `${safe(run.label)}<br>%{x}: %{y:+.2f} %<br>predicted %{customdata[0]:.3f}, measured %{customdata[1]:.3f} ${NAME}<extra></extra>`,
    };
  }), { barmode: "group", yaxis: titled("%") });
}

function table() {
  const columns = Object.keys(runs[0].figures);
  const element = (tag, text, kind) => Object.assign(document.createElement(tag), { textContent: text, className: kind || "" });
  const head = document.createElement("tr");
  head.append(element("th", "run"), ...columns.map((c) => element("th", c, "number")), element("th", "on"), element("th", "status"));
  byId("table").append(document.createElement("thead"), document.createElement("tbody"));
  byId("table").tHead.append(head);
  const digits = { "tokens/s": 0, "validation loss": 4 };
  for (const run of runs) {
    const row = document.createElement("tr");
    const first = element("td", run.label);
    const swatch = element("span", "", "swatch");
    swatch.style.background = run.colour;
    first.prepend(swatch);
    const number = (c) => run.figures[c] === null ? "-" : run.figures[c].toLocaleString("en", { minimumFractionDigits: digits[c] ?? 3, maximumFractionDigits: digits[c] ?? 3 });
    row.append(first, ...columns.map((c) => element("td", number(c), "number")), element("td", run.device || "-"));
    const status = element("td", run.reason ? `${run.status}: ${run.short}` : run.status, "reason");
    status.title = run.reason;
    row.append(status);
    row.tabIndex = 0;
    row.onclick = () => {
      hidden.has(run) ? hidden.delete(run) : hidden.add(run);
      row.classList.toggle("hidden");
      all();
    };
    row.onkeydown = (event) => { if (event.key === "Enter") row.onclick(); };
    byId("table").tBodies[0].append(row);
    const line = document.createElement("p");
    line.append(element("b", `${run.name}: `), element("code", run.overrides.join(" ") || "(as shipped)"));
    byId("typed").append(line);
  }
}

function all() { [peak, pareto, loss, memory, inside, planned].forEach((chart) => chart()); }

runs.forEach((run, i) => { if (run.inside.length || run.steps.length) byId("inside-of").append(new Option(run.label, i)); });
table();
all();
byId("loss-x").onchange = loss;
byId("memory-of").onchange = memory;
byId("inside-of").onchange = inside;
byId("inside-x").onchange = inside;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
