"""Tests the comparison of runs that finished, failed, are damaged or are running, on this or another machine."""

import csv
import errno
import json
import os
import re
import time
from pathlib import Path

import pytest

from lowmem.report import folders
from lowmem.report.compare import compare
from lowmem.report.compare.figures import front, read
from lowmem.system import folder_locks
from lowmem.system.units import GIB, MIB
from made_runs import damaged, finished, written_here


def test_every_compared_run_is_listed_with_its_status_and_the_reason_of_a_failure(sweep, capsys):
    compare.main([str(sweep)])
    said = capsys.readouterr().out
    # the overrides are in a second line, because they are long
    rows = r"^(\d) .* (done|failed|broken|running)\n  data.path=a/folder.* lr=0\.00\d$"
    table = dict(re.findall(rows, said, re.MULTILINE))
    assert [table[str(n)] for n in range(7)] == [*["done"] * 3, "failed", "broken", "broken", "running"]
    reasons = dict(re.findall(r"^(\d) \w+: (.*)$", said, re.MULTILINE))
    assert reasons.keys() == {*"3456"}
    assert "ZeroDivisionError" in reasons["3"] and "summary.json cannot be read (JSONDecodeError" in reasons["4"]
    assert "ended without a summary" in reasons["5"] and "no summary.json yet" in reasons["6"]
    with (sweep / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == [table[str(n)] for n in range(7)]
    assert float(rows[0]["device GiB"]) == 600 / 1024 and rows[3]["device GiB"] == "" and rows[2]["lr"] == "0.003"


def test_compared_runs_of_several_folders_are_listed_once_with_distinct_names(sweep, tmp_path, capsys, monkeypatch):
    other = finished(tmp_path / "other" / "run", ["lr=0.001", "precision=bf16"])
    monkeypatch.chdir(tmp_path)
    compare.main([str(sweep), str(other), str(sweep / "0")])
    said = capsys.readouterr().out
    assert "sweep/0" in said and "other/run" in said and said.count("sweep/0 ") == 1 and "precision" in said
    assert (tmp_path / "comparison.html").exists()


def test_run_of_several_ranks_is_one_row_with_the_highest_memory(tmp_path, capsys):
    ranks = [{"device": size, "host_rss": 3 * size} for size in (400 * MIB, 512 * MIB)]
    run = finished(tmp_path / "run", ["strategy=fsdp", "devices=2"], 400 * MIB, ranks=ranks)
    (run / "rank-1").mkdir()
    (run / "rank-1" / "memory.csv").write_text((run / "memory.csv").read_text())
    finished(tmp_path / "alone", ["strategy=auto"], 256 * MIB)
    compare.main([str(tmp_path)])
    assert "rank-1" not in capsys.readouterr().out
    with (tmp_path / "comparison.csv").open() as file:
        rows = {row["run"]: (float(row["device GiB"]), float(row["host GiB"])) for row in csv.DictReader(file)}
    assert rows == {"alone": (0.25, 0.75), "run": (0.5, 1.5)}


ON_DRIVE = {"bytes": 3 * GIB, "read_gb_per_second": 1.25, "written_gb_per_second": 1.5}


def test_comparison_has_a_drive_column_only_if_a_run_has_a_drive(tmp_path, capsys):
    finished(tmp_path / "0", ["lr=1"], drive=None)
    compare.main([str(tmp_path)])
    page = tmp_path / "comparison.html"
    assert " drive" not in capsys.readouterr().out and '<th class="number">drive' not in page.read_text()
    with_drive = finished(tmp_path / "1", ["lr=2"], drive=ON_DRIVE)
    memory = [line.split(",") for line in (with_drive / "memory.csv").read_text().splitlines()]
    memory = [[*row, cell] for row, cell in zip(memory, ["drive_bytes", *[3 * GIB] * 120], strict=True)]
    (with_drive / "memory.csv").write_text("\n".join(",".join(map(str, row)) for row in memory))
    compare.main([str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said[:5])) <= 80 and said[1].split()[-3:] == ["GiB", "GB/s", "status"]
    with (tmp_path / "comparison.csv").open() as file:
        assert [(row["drive GiB"], row["drive GB/s"]) for row in csv.DictReader(file)] == [("", ""), ("3.0", "2.75")]
    text = page.read_text()
    assert ">drive GB/s</th>" in text and '"label":"drive"' in text and ">3,072.0</td>" in text and ">2.75</td>" in text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda at: None, "this folder does not exist"),
        (lambda at: at.mkdir(), "contains no run of train.py"),
        (lambda at: at.write_text("x"), "this is a file"),
        (lambda at: (at / "checkpoint-500").mkdir(parents=True), "contains no run of train.py"),
        (
            lambda at: (at / ".hydra").mkdir(parents=True),
            "contains no run of train.py",
        ),  # a folder of another program that uses Hydra
    ],
)
def test_comparison_of_a_folder_without_runs_is_refused_with_the_reason(tmp_path, make, says):
    make(tmp_path / "what")
    with pytest.raises(SystemExit) as stop:
        compare.main([str(tmp_path / "what")])
    assert says in stop.value.code and str(tmp_path / "what") in stop.value.code


def test_run_with_an_unreadable_summary_is_listed_as_broken(tmp_path, capsys):
    for name, text in (("list", "[1, 2]"), ("empty", ""), ("other", '{"loss": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(text)
    compare.main([str(tmp_path)])
    said = capsys.readouterr().out
    assert said.count("broken: summary.json cannot be read") == 3


def test_comparison_table_fits_80_characters_and_merges_equal_failure_reasons(tmp_path, capsys):
    for number in range(4):
        finished(tmp_path / f"{number}", [f"batch_size={number}", "optim=" + "adamw8bit" * (number % 2)])
    for number in (1, 2):
        (tmp_path / f"{number}" / folders.FAILED).write_text("batch_size=0: " + "give a whole number " * 5)
    compare.main([str(tmp_path)])
    said = capsys.readouterr().out
    rows = said[: said.index("1, 2 failed: batch_size=0: ")].splitlines()
    assert max(map(len, rows)) <= 80 and said.count("give a whole") == 5
    assert [row.split()[0] for row in rows[2::2]] == [*"0123"] and rows[5] == "  batch_size=1 optim=adamw8bit"
    finished(tmp_path / "more" / "4", ["batch_size=4"])
    table = folders.table(folders.runs_below(tmp_path / "more"), ["4"])
    assert table.splitlines()[1].split() == ["run", "loss", "byte", "tokens/s", "MiB", "GiB", "status"]


def test_unwritable_target_folder_of_a_comparison_is_refused_with_advice(sweep, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="Type --to"):
        compare.main([str(sweep), "--to", str(tmp_path / "file" / "below")])


def test_run_of_an_earlier_version_is_listed_without_its_missing_values(sweep, capsys):
    """Earlier versions wrote fewer values to summary.json and memory.csv."""
    old = json.loads((sweep / "0" / "summary.json").read_text())
    for key in ("peak_bytes_by_category", "peak_bytes_by_phase", "bits_per_byte", "device", "peak_bytes"):
        del old[key]
    (sweep / "0" / "summary.json").write_text(json.dumps(old))
    (sweep / "0" / "memory.csv").write_text("phase,live_peak_bytes\nforward,5\n")
    (sweep / "1" / "summary.json").write_text(json.dumps(old | {"predicted": {"recipe": 1}}))
    compare.main([str(sweep)])
    with (sweep / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows[:3]] == ["done"] * 3 and rows[0]["tokens/s"] == "1000.0"
    assert rows[0]["device GiB"] == "" and (sweep / "comparison.html").stat().st_size > 1_000_000


def test_damaged_run_keeps_its_row_in_a_comparison_and_changes_no_other_row(tmp_path, capsys):
    names = damaged(tmp_path)
    compare.main([str(tmp_path)])
    said = capsys.readouterr().out
    with (tmp_path / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == names and rows[0]["status"] == "done" and not re.search(r"\bnan|\binf", said)
    figures = folders.columns(folders.runs_below(tmp_path / "0"))
    assert re.search(r"^0 +3\.0000 +1\.200 +1,000 +800\.0 +2\.344 +done$", said, re.MULTILINE), said
    interrupted = next(row for row in rows if row["status"] == "interrupted")
    assert [interrupted[name] for name in figures] == ["", *(rows[0][name] for name in figures[1:])]
    page = (tmp_path / "comparison.html").read_text()
    assert all(f"<dt>{name}</dt>" in page for name in names) and "NaN" not in page.partition("plotly.js v")[0]


def test_evaluation_run_has_no_speed_and_is_not_on_the_pareto_front(tmp_path, capsys):
    finished(tmp_path / "trained", ["lr=1"], 900 * MIB)
    finished(tmp_path / "evaluated", ["evaluate=trained"], 100 * MIB, tokens_per_second=0.0, seconds_per_step=None)
    compare.main([str(tmp_path)])
    assert re.search(r"^evaluated .* 3\.0000 +1\.200 +- +100\.0", capsys.readouterr().out, re.MULTILINE)
    runs = [read(run, run.folder.name, "") for run in folders.runs_below(tmp_path)]
    assert [run.name for run in front(runs)] == ["trained"]


@pytest.fixture
def silent(tmp_path):
    """Returns the folder of a run without summary.json, whose files were written an hour ago."""
    folder = finished(tmp_path / "runs" / "silent", ["lr=1"])
    (folder / "summary.json").unlink()
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    return folder


def status(folder, capsys):
    compare.main([str(folder), "--to", str(folder.parent)])
    return capsys.readouterr().out.partition("\n\n")[0].splitlines()[-1]


def test_run_of_a_live_process_is_listed_as_running_even_if_no_file_changed(silent, capsys):
    written_here(silent)
    handle = os.open(silent, os.O_RDONLY)
    assert folder_locks.lock(handle)
    assert status(silent, capsys) == "silent running: no summary.json yet"
    os.close(handle)
    assert status(silent, capsys) == "silent broken: the process ended without a summary.json"


def test_status_of_a_run_on_another_machine_depends_on_its_last_write(silent, capsys):
    said = "silent unknown: no file changed for 1 h 0 min; it may be running on another machine"
    assert status(silent, capsys) == said
    (silent / "metrics.csv").touch()
    assert status(silent, capsys) == "silent running: no summary.json yet"


def test_status_of_a_run_on_a_file_system_without_locks_depends_on_its_last_write(silent, capsys, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")  # the error of NFS for a folder

    written_here(silent)
    monkeypatch.setattr(folder_locks.fcntl, "flock", unsupported)
    assert status(silent, capsys).startswith("silent unknown: no file changed for 1 h 0 min")


def test_unlistable_folder_does_not_end_the_comparison(silent, tmp_path, capsys, monkeypatch):
    """If the folder of another user has mode 711, its files can be read by name, but not listed."""
    done = finished(tmp_path / "runs" / "done", ["lr=2"])

    def shut(place):
        if place in (silent, done):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))

    opened, listed = os.open, Path.iterdir
    monkeypatch.setattr(os, "open", lambda place, *how, **more: shut(place) or opened(place, *how, **more))
    monkeypatch.setattr(Path, "iterdir", lambda place: shut(place) or listed(place))
    compare.main([str(done), str(silent), "--to", str(tmp_path)])
    said = capsys.readouterr().out
    assert re.search(r"^done .* done$", said, re.MULTILINE)
    assert "silent unknown: the folder cannot be listed (Permission denied)" in said


def test_comparison_has_a_rate_of_learned_tokens_only_if_some_tokens_are_not_learned(tmp_path, capsys):
    """Earlier versions counted only learned tokens. A note says so if a run of an earlier version is compared with a
    newer run."""
    finished(tmp_path / "old", ["lr=1"])
    finished(tmp_path / "new", ["lr=2"], speed=3000.0, learned_tokens=1000, learned_tokens_per_second=1000.0)
    rows = (tmp_path / "new" / "metrics.csv").read_text().splitlines()
    with_learned = [f"{rows[0]},learned_tokens", *(f"{row},{10 * n}" for n, row in enumerate(rows[1:], 1))]
    (tmp_path / "new" / "metrics.csv").write_text("\n".join(with_learned) + "\n")
    compare.main([str(tmp_path)])
    said, page = capsys.readouterr().out, (tmp_path / "comparison.html").read_text()
    assert re.search(r"^new +2 +3\.0000 +1\.200 +3,000 +1,000 ", said, re.MULTILINE), said
    assert re.search(r"^old +1 +3\.0000 +1\.200 +1,000 +1,000 ", said, re.MULTILINE), said
    note = "old: an earlier version counted only learned tokens (with a label) in tokens and tokens/s."
    assert note in said and note in page and ">learned tokens/s</th>" in page
    new, old = (read(run, run.folder.name, "") for run in folders.runs_below(tmp_path))
    assert (new.loss[0][:2], new.loss[1][:2]) == ([100, 200], [10, 20]) and old.loss[0] == old.loss[1]
    assert '"learned tokens"' in page
    (tmp_path / "new" / "metrics.csv").write_text("\n".join(rows) + "\n")
    alike = {"learned_tokens": 4000, "learned_tokens_per_second": 3000.0}
    finished(tmp_path / "more" / "text", ["lr=2"], speed=3000.0, **alike)
    compare.main([str(tmp_path / "more")])
    assert "learned tokens" not in capsys.readouterr().out
    assert "learned tokens" not in (tmp_path / "more" / "comparison.html").read_text().partition("plotly.js v")[0]
