"""Tests that a run with a drive reports the bytes that it stores, reads and writes on the drive, and that a run without
a drive reports none."""

import csv
import json
from types import SimpleNamespace

import pytest

from lowmem.report import drive_figures, summary
from lowmem.system.units import GIB

STREAMED = ("weights=streamed", "precision=bf16-master", "optim=adamw", "gradient_checkpointing=every_layer")
STREAMED += ("model.architecture.n_layer=6", "max_steps=5")


def columns(file) -> dict[str, list[str]]:
    rows = list(csv.DictReader(file.open()))
    return {column: [row[column] for row in rows] for column in rows[0]}


def test_run_with_a_drive_reports_drive_bytes_and_rates_in_summary_log_metrics_and_table(
    fit, tmp_path, monkeypatch, caplog
):
    from lightning.pytorch.loggers import CSVLogger

    logged = set()
    monkeypatch.setattr(CSVLogger, "log_metrics", lambda self, metrics, step=None: logged.update(metrics))
    chart = ("+logger.csv._target_=lightning.pytorch.loggers.CSVLogger", "+logger.csv.save_dir=${output_dir}")
    with caplog.at_level("INFO", logger="lowmem"):
        found, run = fit(*STREAMED, *chart, f"weights.drive={tmp_path / 'drive'}")
    shown = json.loads((run / "summary.json").read_text())["drive"]
    assert shown == found["drive"] and shown["bytes"] > 0
    assert shown["read_bytes_per_step"] > 0 and shown["written_gb_per_second"] > 0
    (said,) = [line for line in caplog.messages if line.startswith(f"weights.drive={tmp_path / 'drive'}: ")]
    assert ("direct I/O" in said) == shown["direct"] != ("buffered" in said)
    rates = {f"drive_{way}_gb_per_second" for way in drive_figures.WAYS}
    assert all(float(columns(run / "metrics.csv")[rate][0]) > 0 for rate in rates)
    assert logged >= {"memory/drive_gib", "memory/drive_read_gib", "memory/drive_written_gib"}
    assert logged >= {f"train/{rate}" for rate in rates}
    table = summary.table(found)
    for line in ("\non the drive  ", "\n  read per step  ", "\n  written per step  ", "\n  written per 1,000 steps "):
        assert line in table


def test_run_without_a_drive_reports_no_drive_values(fit, caplog):
    with caplog.at_level("INFO", logger="lowmem"):
        found, run = fit("max_steps=1")
    assert found["drive"] is None and "drive" not in summary.table(found) and "drive" not in caplog.text
    assert "drive" not in (run / "metrics.csv").read_text()
    memory = columns(run / "memory.csv")
    assert {cell for column in memory if column.startswith("drive") for cell in memory[column]} == {""}


# Rows of memory.csv: loading, a first step that creates the optimizer state, an evaluation, and two equal steps.
ROWS = [
    {"step": step, "phase": phase, "drive_bytes": size, "drive_read_bytes": read, "drive_written_bytes": written}
    for step, phase, size, read, written in (
        (0, "load", 2 * GIB, 0, 900 * GIB),
        (1, "step", 4 * GIB, GIB, 6 * GIB),
        (2, "step", 4 * GIB, 3 * GIB, 4 * GIB),
        (3, "step", 4 * GIB, 3 * GIB, 4 * GIB),
    )
]
ROWS.insert(2, {"step": 1, "phase": "evaluation"})


def test_reported_drive_bytes_and_rates_are_those_of_a_steady_step():
    shown = drive_figures.figures(SimpleNamespace(direct=True), ROWS, seconds=2.0)
    assert shown == {
        "bytes": 4 * GIB,
        "direct": True,
        "read_bytes_per_step": 3 * GIB,
        "written_bytes_per_step": 4 * GIB,
        "read_gb_per_second": pytest.approx(3 * GIB / 2 / 1e9),
        "written_gb_per_second": pytest.approx(4 * GIB / 2 / 1e9),
        "written_tb_per_1000_steps": pytest.approx(4 * GIB / 1e9),
    }
    loads = [
        row | {"phase": "step"} for row in ROWS if row["phase"] == "load"
    ]  # wrong on purpose: loading counts as three steps
    assert drive_figures.figures(SimpleNamespace(direct=True), [*ROWS, *3 * loads], 2.0) != shown


def test_drive_table_shows_terabytes_per_1000_steps_and_dashes_for_unknown_rates():
    direct, buffered = (SimpleNamespace(direct=is_direct) for is_direct in (True, False))
    rows = dict(drive_figures.lines(drive_figures.figures(direct, ROWS, 2.0)))
    assert rows["on the drive"] == "4.000 GiB" and rows["  written per step"] == "4.000 GiB, 2.15 GB/s"
    assert rows["  written per 1,000 steps"] == "4.295 TB"
    rows = dict(drive_figures.lines(drive_figures.figures(buffered, ROWS, None)))  # a resumed run without a step
    assert rows["on the drive"] == "4.000 GiB (buffered)" and rows["  read per step"] == "3.000 GiB, - GB/s"
    assert drive_figures.figures(direct, ROWS[:1], 2.0) is None and drive_figures.figures(None, ROWS, 2.0) is None
    assert not list(drive_figures.lines(None))


@pytest.mark.parametrize(("direct", "says"), [(True, "direct I/O"), (False, "refuses direct I/O")])
def test_log_states_whether_the_drive_is_accessed_by_direct_io(caplog, direct, says):
    with caplog.at_level("INFO", logger="lowmem"):
        drive_figures.log_access(SimpleNamespace(folder="scratch", direct=direct))
        drive_figures.log_access(None)
    (said,) = caplog.messages
    assert said.startswith("weights.drive=scratch: ") and says in said
