"""Runs side by side: whatever state they are in, from whichever machine."""

import csv
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lowmem import runs
from lowmem.compare import job
from lowmem.compare.page import CATEGORIES

MIB = 2**20
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LONG = "data.path=a/folder/whose/name/is/longer/than/any/label/of/an/axis/"


def finished(folder: Path, overrides: list[str], peak: int = 800 * MIB, speed: float = 1000.0, **more) -> Path:
    """A run as train.py leaves it, of 40 steps."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "hydra.yaml").write_text("hydra:\n  job:\n    name: train\n")
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {line}\n" for line in overrides))
    share = dict(zip(CATEGORIES, (0.2, 0.2, 0.4, 0.15, 0.05), strict=True))
    summary = {"interrupted": False, "overrides": overrides, "val_loss": 3.0, "bits_per_byte": 1.2, "device": "cpu"}
    summary |= {"tokens_per_second": speed, "peak_bytes": {"device": peak, "host_rss": 3 * peak}}
    summary |= {"peak_bytes_by_category": {c: int(s * peak) for c, s in share.items()}}
    summary |= {"predicted": {"phases": {"step": {"device": int(1.02 * peak), "host": 0}}}}
    summary |= {"peak_bytes_by_phase": {"step": {"device": peak, "host": 1}}}
    (folder / "summary.json").write_text(json.dumps(summary | more))
    lines = ["step,tokens,seconds,train_loss,val_loss"]
    lines += [f"{step},{100 * step},{step / 10},{5 - step / 20}," for step in range(1, 41)] + ["40,4000,4.1,,3.0"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    head = ["step", "phase", "rss_peak_bytes", "live_peak_bytes", *(f"{c}_bytes" for c in CATEGORIES)]
    rows = [
        [step, phase, 3 * peak, size, *(int(s * size) for s in share.values())]
        for step in range(1, 41)
        for phase, size in (("forward", peak // 2), ("backward", int(0.9 * peak)), ("step", peak))
    ]
    (folder / "memory.csv").write_text("\n".join(",".join(map(str, row)) for row in [head, *rows]) + "\n")
    lines = [f"{row[1]},{','.join(map(str, row[4:]))}" for row in rows[-3:]]
    (folder / "memory_step.csv").write_text("\n".join(["phase," + ",".join(head[4:]), *lines]) + "\n")
    return folder


@pytest.fixture
def sweep(tmp_path):
    """Three finished runs of which the second is beaten by the first, a failed, a running and two broken ones."""
    folder = tmp_path / "sweep"
    finished(folder / "0", [f"{LONG}0", "lr=0.001"], 600 * MIB, 1000.0)
    finished(folder / "1", [f"{LONG}1", "lr=0.002"], 900 * MIB, 900.0)
    finished(folder / "2", [f"{LONG}2", "lr=0.003"], 800 * MIB, 2000.0, device="NVIDIA H200")
    for number in range(3, 7):
        (finished(folder / str(number), [f"{LONG}{number}", f"lr=0.00{number + 1}"]) / "summary.json").unlink()
    (folder / "3" / runs.FAILED).write_text(
        "Traceback (most recent call last):\n  ...\nZeroDivisionError: </script><b>\n"
    )
    (folder / "4" / "summary.json").write_text('{"interrupted": fal')
    for path in (folder / "5").iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    (folder / "6" / "memory.csv").write_text("step,phase,live_peak_bytes\n1,forw")
    return folder


def test_every_run_is_listed_in_the_state_in_which_it_is(sweep, capsys):
    job.main([str(sweep)])
    said = capsys.readouterr().out
    table = dict(re.findall(r"^(\d) +a/folder.*? 0\.00\d .*?(done|failed.*|broken.*|running.*)$", said, re.MULTILINE))
    assert [table[str(n)].split(":")[0] for n in range(7)] == [*["done"] * 3, "failed", "broken", "broken", "running"]
    assert "ZeroDivisionError" in table["3"] and "summary.json cannot be read (JSONDecodeError" in table["4"]
    assert "ended without a summary" in table["5"] and "no summary yet" in table["6"]
    with (sweep / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == [table[str(n)].split(":")[0] for n in range(7)]
    assert float(rows[0]["device GiB"]) == 600 / 1024 and rows[3]["device GiB"] == "" and rows[2]["lr"] == "0.003"


def test_folders_from_several_places_are_told_apart(sweep, tmp_path, capsys, monkeypatch):
    other = finished(tmp_path / "other" / "run", ["lr=0.001", "precision=bf16"])
    monkeypatch.chdir(tmp_path)
    job.main([str(sweep), str(other), str(sweep / "0")])
    said = capsys.readouterr().out
    assert "sweep/0" in said and "other/run" in said and said.count("sweep/0 ") == 1 and "precision" in said
    assert (tmp_path / "comparison.html").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda at: None, "there is no such folder"),
        (lambda at: at.mkdir(), "no run of train.py is here or below"),
        (lambda at: at.write_text("x"), "this is a file"),
        (lambda at: (at / "checkpoint-500").mkdir(parents=True), "no run of train.py is here or below"),
        (lambda at: (at / ".hydra").mkdir(parents=True), "no run of train.py is here or below"),  # another Hydra tool
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, make, says):
    make(tmp_path / "what")
    with pytest.raises(SystemExit) as stop:
        job.main([str(tmp_path / "what")])
    assert says in stop.value.code and str(tmp_path / "what") in stop.value.code


def test_a_summary_of_another_tool_is_broken_and_not_fatal(tmp_path, capsys):
    for name, text in (("list", "[1, 2]"), ("empty", ""), ("other", '{"loss": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text)
    job.main([str(tmp_path)])
    assert capsys.readouterr().out.count("broken: summary.json cannot be read") == 3


def test_a_folder_that_cannot_be_written_is_said(sweep, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="Type --to"):
        job.main([str(sweep), "--to", str(tmp_path / "file" / "below")])


# --- in a browser ------------------------------------------------------------------------------------------------

# Runs in the page before anything else, and when all is drawn writes down what is there.
PROBE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
console.error = console.warn = (...said) => errors.push(said.join(" "));
addEventListener("load", () => setTimeout(async () => {
  const charts = [...document.querySelectorAll(".chart")];
  const drawn = () => Object.fromEntries(charts.map((chart) => [chart.id, chart.data.length]));
  const found = { before: drawn(), rows: document.querySelectorAll("tbody tr").length };
  found.names = document.getElementById("memory").data.map((trace) => trace.name);
  found.stars = document.getElementById("pareto").data.filter((t) => t.marker && t.marker.symbol === "star").length;
  found.bars = document.getElementById("peak").data.map((trace) => trace.x);
  found.places = new Set(document.getElementById("peak").data.map((trace) => [...trace.y]).flat()).size;
  found.svg = charts.filter((chart) => chart.querySelector("svg.main-svg")).length;
  found.states = [...document.querySelectorAll("td.reason")].map((cell) => cell.textContent);
  found.wide = document.documentElement.scrollWidth - innerWidth;
  document.querySelector("tbody tr").click();
  await new Promise((done) => setTimeout(done, 300));
  found.hidden = drawn();
  found.left = document.getElementById("memory").data.map((trace) => trace.name);
  document.querySelector("tbody tr").click();
  document.getElementById("loss-x").value = "1";
  document.getElementById("loss-x").onchange();
  document.getElementById("inside-x").value = "steps";
  document.getElementById("inside-x").onchange();
  await new Promise((done) => setTimeout(done, 300));
  found.after = drawn();
  found.seconds = document.getElementById("loss").data[0].x.at(-1);
  found.inside = document.getElementById("inside").data[0].x.length;
  found.errors = errors;
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
}, 500));
</script>"""


def browsed(page: Path, width: int) -> dict:
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("<head>", "<head>" + PROBE))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},1200",
        "--virtual-time-budget=15000",
    ]
    offline = "--host-resolver-rules=MAP * ~NOTFOUND"  # nothing may come from a network
    done = subprocess.run(
        [BROWSER, *flags, offline, f"--user-data-dir={page.parent}/profile", "--dump-dom", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    written = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert written, done.stderr[-2000:]
    return json.loads(written[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1400, 500])  # the narrowest that a headless window can be
def test_the_page_draws_every_run_and_a_click_hides_one(sweep, width):
    job.main([str(sweep)])
    found = browsed(sweep / "comparison.html", width)
    assert found["errors"] == [] and found["rows"] == 7 and found["svg"] == 6
    assert found["states"][2] == "done" and found["states"][3] == "failed: ZeroDivisionError: </script><b>"
    # curves exist of all whose csv can be read, figures only of the finished
    assert found["names"] == [f"{LONG}{n - 1} lr=0.00{n}" for n in range(1, 7)]
    assert found["before"] == {"peak": 5, "pareto": 4, "loss": 14, "memory": 6, "inside": 5, "planned": 3}
    assert found["stars"] == 2  # the second is slower and larger than the first
    assert sum(column[2] for column in found["bars"]) == pytest.approx(600 / 1024, rel=1e-6)  # the first, from below
    assert found["places"] == 3  # each has a bar of its own, however alike the names are
    assert found["left"] == found["names"][1:]
    assert found["hidden"] == {"peak": 5, "pareto": 2, "loss": 12, "memory": 5, "inside": 5, "planned": 2}
    assert found["after"] == found["before"]
    assert found["seconds"] == 4.0 and found["inside"] == 40
    assert found["wide"] <= 0  # nothing to scroll sideways but the table


def test_the_page_holds_everything_and_asks_no_network(sweep):
    job.main([str(sweep)])
    html = (sweep / "comparison.html").read_text()
    own = html[: html.index("<script>")] + html[html.rindex("<script>") :]
    assert not re.search(r"""(src|href)=["']|https?://""", own)
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL)[1]
    assert "</script><b>" in [run["reason"] for run in json.loads(data)["runs"]][3]  # what looks like HTML ends nothing
