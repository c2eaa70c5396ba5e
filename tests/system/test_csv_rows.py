"""Tests that the csv and jsonl files of a resumed run keep the rows of earlier steps, even if the process is killed
while it rewrites such a file."""

import csv
import math

import pytest

from lowmem.system import csv_rows

ROWS = [{"step": step, "loss": 0.5 * step} for step in range(1, 6)]


class Killed(BaseException):
    pass


@pytest.fixture
def written(tmp_path):
    file = tmp_path / "metrics.csv"
    out, writer, _ = csv_rows.open_csv(file, ["step", "loss"], 0)
    with out:
        writer.writerows(ROWS)
    return file


def read(file):
    with file.open(newline="") as rows:
        return [{column: float(value) for column, value in row.items() if value} for row in csv.DictReader(rows)]


@pytest.mark.parametrize(("columns", "until"), [(["step", "loss"], 3), (["step", "loss", "new"], math.inf)])
def test_process_killed_while_rewriting_a_csv_file_loses_no_rows(written, monkeypatch, columns, until):
    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(csv.DictWriter, "writeheader", killed)
        csv_rows.open_csv(written, columns, until)
    assert read(written) == ROWS


def test_csv_file_of_a_resumed_run_keeps_earlier_rows_and_drops_later_and_incomplete_ones(written):
    written.write_text(written.read_text() + "3,1.")  # truncated, although each column has a value
    out, writer, last = csv_rows.open_csv(written, ["step", "new"], 3)
    with out:
        writer.writerow({"step": 4, "new": 7})
    assert read(written) == [*ROWS[:3], {"step": 4, "new": 7}]
    assert last == {"step": "3", "loss": "1.5"}


def test_jsonl_file_is_truncated_after_a_step_and_keeps_its_lines_if_the_process_is_killed(tmp_path, monkeypatch):
    file = tmp_path / "samples.jsonl"
    lines = [f'{{"step": {step}}}\n' for step in (1, 2, 3)]
    file.write_text("".join(lines) + '{"step": 3, "te')

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("os.replace", killed)
        csv_rows.cut_after(file, 2)
    assert file.read_text().startswith("".join(lines))
    csv_rows.cut_after(file, 2)
    assert file.read_text() == "".join(lines[:2])
